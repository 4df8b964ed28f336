"""linear_patches: a convolution whose windows lie side by side, as a matrix product."""

from __future__ import annotations

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.amp.low_precision import force_fp32
from engine.amp.precision import Precision
from engine.speed.convolutions import LinearPatches, PatchesAsProduct
from engine.speed.speedup import mix_in
from tests.engine.small import BF16, CPU, OFF, built_of, chosen
from utils.errors import UserError


def gradients(convolution: nn.Conv2d, images: Tensor) -> tuple[Tensor, ...]:
    images = images.clone().requires_grad_()
    out = convolution(images)
    return out, *torch.autograd.grad((out * out.cos()).sum(), [images, *convolution.parameters()])


@pytest.mark.parametrize(("channels", "patch", "bias"), [(3, 4, True), (1, 2, False), (3, (2, 4), True)])
def test_product_equals_the_convolution_to_rounding(channels: int, patch: int, bias: bool) -> None:
    convolution = nn.Conv2d(channels, 24, patch, patch, bias=bias)
    images = torch.randn(2, channels, 16, 8)
    expected = gradients(convolution, images)
    mix_in(convolution, PatchesAsProduct)
    for found, wanted in zip(gradients(convolution, images), expected, strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, atol=2e-5)
    odd = torch.randn(1, channels, 17, 9)
    assert convolution(odd).shape == nn.Conv2d(channels, 24, patch, patch)(odd).shape, "as a convolution leaves it over"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_linear_patches_change_neither_weights_nor_outputs(name: str) -> None:
    model = create_model(name, img_size=112, num_classes=3).eval()
    images, before = torch.randn(1, 3, 112, 112), {key: value.shape for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(images)
        LinearPatches().apply(built_of(model), True)
        assert isinstance(model.get_submodule("patch_embed.proj"), PatchesAsProduct)
        found = model(images)
    assert {key: value.shape for key, value in model.state_dict().items()} == before
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("amp", "patch", "listed", "linear"),
    [(OFF, 4, (), True), (OFF, 16, (), False), (BF16, 16, (), True), (BF16, 16, ("conv2d",), False)],
)
def test_auto_uses_linear_patches_where_they_are_faster(amp, patch: int, listed: tuple[str, ...], linear: bool) -> None:
    model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=patch, embed_dim=16, num_heads=2, depth=1)
    for wanted, found in (("auto", linear), ("+linear_patches", True), ("-linear_patches", False)):
        settings = {"SPEED": [wanted], "AMP": {"CUSTOM_BLACK_LIST": listed}}
        assert chosen(LinearPatches, built_of(model, Precision(amp, CPU), **settings)).value is found


def test_linear_patches_are_rejected_for_models_without_patches() -> None:
    model = create_model("test_resnet", num_classes=3)
    assert chosen(LinearPatches, built_of(model)).value is False
    with pytest.raises(UserError, match=r"SPEED \+linear_patches: ResNet"):
        chosen(LinearPatches, built_of(model, SPEED=["+linear_patches"]))


def test_linear_patches_can_be_forced_to_fp32_by_name_and_class() -> None:
    for pattern in ("patch_embed.proj", "Conv2d"):
        model = create_model("test_vit", num_classes=3)
        LinearPatches().apply(built_of(model), True)
        assert force_fp32(model, [pattern], "cpu") == ["patch_embed.proj"]
        with torch.autocast("cpu", torch.bfloat16):
            out = model.patch_embed.proj(torch.randn(1, 3, 160, 160))  # type: ignore[operator, union-attr]
        assert out.dtype is torch.float32
