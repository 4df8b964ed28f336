"""MODEL.LINEAR_PATCHES: patches that do not overlap, embedded by one matrix product instead of a convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.speed.amx import linear
from engine.speed.cpu_products import MKL, OWN
from engine.speed.replace_forward import mix_in
from utils.errors import UserError

PLACE = "patch_embed.proj"
LARGE_PATCH = 16
"""From this side on, convolution and product take the same time in a CPU's fp32; see docs/dev/kernels.md."""
MEASURED = ("cpu", "cuda")
LISTED = frozenset({"conv2d", "linear", "fc", "matmul_v2", "fused_gemm_epilogue"})


class LinearPatches(nn.Module):
    """A convolution whose windows lie side by side, as the product that it is. It keeps its weights' shape."""

    kernel_dtype: torch.dtype | None = None
    """On a CPU, the precision of inputs that our kernels serve."""
    kernel_size: tuple[int, int]
    weight: Tensor
    bias: Tensor | None

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        down, across = self.kernel_size
        if height % down or width % across:
            return super().forward(images)
        rows, columns = height // down, width // across
        patches = images.reshape(batch, channels, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        pixels = patches.reshape(batch, rows * columns, channels * down * across)
        tokens = linear(pixels, self.weight.flatten(1), self.bias, self.kernel_dtype)
        # As a convolution hands it on; what flattens it again finds the tokens as they lie, and copies nothing.
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))


def patches_are_linear(
    wanted: Any, model: nn.Module, precision: Precision, listed: Iterable[str], library: str = MKL
) -> bool:
    """auto: where it was measured to be faster.

    `listed`: AMP's lists, which may mean the convolution. `library`: of products on a CPU.
    """
    found = list(_patch_convolutions(model))
    if wanted is True and not found:
        raise UserError(
            f"MODEL.LINEAR_PATCHES true: {type(model).__name__} embeds no patches that lie side by side; leave it auto."
        )
    if wanted != "auto":
        return bool(wanted)
    if not found or precision.device.type not in MEASURED or LISTED.intersection(listed):
        return False
    if precision.level != "O0" or library == OWN:
        return True
    return precision.device.type == "cpu" and max(found[0].kernel_size) < LARGE_PATCH


def use_linear_patches(model: nn.Module, kernel_dtype: torch.dtype | None = None) -> None:
    for convolution in _patch_convolutions(model):
        mix_in(convolution, LinearPatches)
        convolution.kernel_dtype = kernel_dtype  # pyright: ignore[reportArgumentType]


def _patch_convolutions(model: nn.Module) -> Iterator[nn.Conv2d]:
    for name, module in model.named_modules():
        if f".{name}".endswith(f".{PLACE}") and isinstance(module, nn.Conv2d) and _side_by_side(module):
            yield module


def _side_by_side(convolution: nn.Conv2d) -> bool:
    return (
        convolution.stride == convolution.kernel_size
        and convolution.kernel_size != (1, 1)
        and convolution.padding in ((0, 0), "valid")
        and convolution.dilation == (1, 1)
        and convolution.groups == 1
    )
