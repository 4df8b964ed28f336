"""channels_last: channels of a pixel side by side. linear_patches: windows side by side, as a matrix product."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.amp.low_precision import force_fp32
from engine.amp.precision import Precision
from engine.setup import setting_of
from engine.speed.convolutions import ChannelsLast, LinearPatches, PatchesAsProduct
from engine.speed.speedup import mix_in
from tests.engine.small import BF16, CPU, OFF, build, built_of, chosen, train
from utils.errors import UserError

LAST = torch.channels_last


# ---- channels_last


@pytest.mark.parametrize(
    ("name", "level", "strategy", "last"),
    [
        ("test_resnet", "O1", "ddp", True),
        ("test_convnext", "O2", "ddp", True),
        ("test_resnet", "O0", "ddp", False),
        ("test_resnet", "O1", "fsdp", False),
        ("test_vit", "O1", "ddp", False),
        ("swin_tiny_patch4_window7_224", "O1", "ddp", False),
        ("pvt_v2_b0", "O1", "ddp", True),
    ],
)
def test_auto_is_for_convolutions_on_a_cpu_and_in_half_precision_on_a_gpu(
    name: str, level: str, strategy: str, last: bool
) -> None:
    with torch.device("meta"):
        model = create_model(name)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), level=level)
    assert chosen(ChannelsLast, built_of(model, on_gpu, DIST={"STRATEGY": strategy})).value is last
    built = built_of(model, DIST={"STRATEGY": strategy})
    assert chosen(ChannelsLast, built).value is ((name, strategy) == ("test_resnet", "ddp"))
    assert chosen(ChannelsLast, replace(built, before={"channels_last": False})).value is False, "as the resumed run"


@pytest.mark.parametrize(
    ("name", "strategy", "words"), [("test_vit", "ddp", "no convolutions"), ("test_resnet", "fsdp", "fsdp does not")]
)
def test_channels_last_is_rejected_without_convolutions_or_with_fsdp(name: str, strategy: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"SPEED \+channels_last: .*{words}"):
        chosen(ChannelsLast, built_of(create_model(name), SPEED=["+channels_last"], DIST={"STRATEGY": strategy}))


def test_training_in_channels_last_is_the_same_to_rounding(tiny: Path) -> None:
    text = re.sub("NAME: tiny.*", "TYPE: timm, NAME: test_resnet, NUM_CLASSES: 10}", tiny.read_text())
    tiny.write_text(text.replace("IMAGE_SIZE: 8", "IMAGE_SIZE: 32"))
    weights = []
    for last in ("+channels_last", "-channels_last"):
        ready = build(tiny, SPEED=last, TRAIN__MODEL_EMA="true")
        seen: set[bool] = set()

        def note(convolution: nn.Module, images: tuple[Tensor], seen: set[bool] = seen) -> None:
            both = (images[0], convolution.get_parameter("weight"))
            seen |= {tensor.is_contiguous(memory_format=LAST) for tensor in both}

        ready.model.get_submodule("conv1.3").register_forward_pre_hook(note)
        train(ready, 2)
        assert seen == {last == "+channels_last"}
        assert ready.choices["channels_last"] == (last == "+channels_last")
        assert setting_of(ready).faster == ("SPEED=+channels_last",) * (last == "-channels_last"), "the log's advice"
        weights.append(ready.model.state_dict().values())
    assert all(torch.allclose(a.float(), b.float(), atol=1e-4) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("by_pixel", [False, True])
def test_images_are_converted_to_the_models_memory_format(by_pixel: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    built = built_of(nn.Conv2d(3, 4, 3))
    wanted = built.inputs(images)
    ChannelsLast().apply(built, True)
    found = built.inputs(images.contiguous(memory_format=LAST) if by_pixel else images)
    assert wanted.is_contiguous()
    assert found.is_contiguous(memory_format=LAST)
    assert torch.equal(found, wanted)


# ---- linear_patches


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
