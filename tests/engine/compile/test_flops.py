"""The operations of a model, counted: from them follows whether compiling is worth its time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.compile.choice import training_flops
from models import build_without_weights
from utils.config import ModelConfig


def counted(name: str, size: int = 224, **settings: Any) -> float:
    """GFLOP of an image in training."""
    model = build_without_weights(ModelConfig(NAME=name, **settings), size, 3)
    found = training_flops(model, 3, size)
    assert found is not None
    return found / 1e9


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_patch16_224", 7.46),
        pytest.param("vit_small_patch16_224", 27.5, marks=pytest.mark.slow),
        ("vit_base_patch16_224", 105.2),
        pytest.param("vit_large_patch16_224", 369, marks=pytest.mark.slow),
        pytest.param("vit_huge_patch14_224", 1003, marks=pytest.mark.slow),
        ("resnet50", 24.3),  # batch norm
    ],
)
def test_flops_of_known_models(name: str, expected: float) -> None:
    assert counted(name, TYPE="x") == pytest.approx(expected, rel=2e-3)


def by_hand(width: int, depth: int, tokens: int, mlp: int, patch: int, classes: int) -> float:
    """A ViT's products; forward, then two as large backward, but for the pixels, which want no gradient."""
    patches = 2 * (tokens - 1) * width * 3 * patch**2
    block = 2 * tokens * width * (4 * width + 2 * mlp * width) + 2 * 2 * tokens**2 * width
    return (2 * patches + 3 * (depth * block + 2 * width * classes)) / 1e9


SMALL: dict[str, Any] = {"EMBED_DIM": 64, "DEPTH": 2, "NUM_HEADS": 2, "PATCH_SIZE": 8, "NUM_CLASSES": 10}


def test_flops_include_attention() -> None:
    assert counted("own", 64, **SMALL) == pytest.approx(by_hand(64, 2, 65, 4, 8, 10), rel=1e-9)
    assert counted("own", 64, **SMALL, MLP_RATIO=2) == pytest.approx(by_hand(64, 2, 65, 2, 8, 10), rel=1e-9)


def test_flops_that_cannot_be_counted_are_none() -> None:
    class Curious(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images * float(images.mean())

    assert training_flops(Curious(), 3, 8) is None
    assert training_flops(nn.Identity(), 3, 8) is None
