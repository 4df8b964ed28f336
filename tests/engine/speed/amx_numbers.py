"""What the tests of kernels for CPUs with AMX have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

needs_tiles = pytest.mark.usefixtures("tiles")
FP32_BOUND = 1e-6


def numbers(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=random).to(dtype) for size in sizes]


def layers_of(*sizes: int) -> list[Tensor]:
    """x, then a weight and a bias for each layer, and the gradient of what comes out."""
    rows, first, *widths = sizes
    shapes: list[tuple[int, ...]] = [(rows, first)]
    for width in widths:
        shapes += [(width, shapes[-2][0] if len(shapes) > 1 else first), (width,)]
    *leaves, grad = numbers(*shapes, (rows, widths[-1]))
    return [*(leaf.requires_grad_() for leaf in leaves), grad]
