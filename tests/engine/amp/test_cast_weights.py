"""Which weights autocast always casts, so that FSDP may gather them in half precision."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers.std_conv import StdConv2d
from torch import nn

from engine.amp.low_precision import cast_weights, force_fp32
from engine.speed.convolutions import LinearPatches
from tests.engine.small import built_of


def names_of(model: nn.Module, *black_list: str) -> set[str]:
    cast = {id(weight) for weight in cast_weights(model, black_list)}
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in cast}


def test_only_linear_layers_and_convolutions_of_a_vit_are_cast() -> None:
    sizes: dict[str, Any] = {"depth": 1, "embed_dim": 12, "num_heads": 1, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, init_values=1e-5, reg_tokens=2, qk_norm=True)
    layers = {
        "patch_embed.proj",
        "head",
        *(f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    }
    assert names_of(model) == {f"{layer}.{own}" for layer in layers for own in ("weight", "bias")}
    without_linear = {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert names_of(model, "fc") == without_linear, "Paddle's name of linear"
    assert names_of(model, "linear", "conv2d") == set()
    LinearPatches().apply(built_of(model), True)
    assert names_of(model) >= without_linear
    assert names_of(model, "fc") == set()
    force_fp32(model, ["blocks.0", "head"], "cpu")
    assert names_of(model) == without_linear


def test_weights_with_another_use_are_not_cast() -> None:
    """Their other use is in fp32, and would be of rounded weights."""
    model = nn.ModuleDict(
        {
            "standardised": StdConv2d(2, 2, 1),
            "normalised": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "formerly": nn.utils.weight_norm(nn.Linear(2, 2, bias=False)),
            "embedding": nn.Embedding(2, 2),
            "tied": nn.Linear(2, 2),
        }
    )
    model["tied"].weight = model["embedding"].weight  # pyright: ignore[reportArgumentType]
    assert names_of(model) == {"tied.bias"}


def test_autocast_casts_these_weights() -> None:
    """The gradient's way back is a cast, and the result that of weights that are in half precision already."""
    for layer, images in ((nn.Linear(3, 2), torch.rand(4, 3)), (nn.Conv2d(3, 2, 1), torch.rand(4, 3, 2, 2))):
        assert names_of(layer) == {"weight", "bias"}
        with torch.autocast("cpu", torch.bfloat16):
            expected = layer(images)
            assert torch.equal(layer.bfloat16()(images), expected)
