"""MODEL.LINEAR_PATCHES: embed patches by one matrix product instead of a convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from engine.amp.precision import Precision
from engine.speed.replace_forward import mix_in
from utils.errors import UserError

MODULE = "patch_embed.proj"
LARGE_PATCH = 16
"""Patches of this size and larger gain nothing in fp32 on a CPU; see docs/dev/kernels.md."""
MEASURED = ("cpu", "cuda")
LISTED = frozenset({"conv2d", "linear", "fc", "matmul_v2", "fused_gemm_epilogue"})


class LinearPatches(nn.Module):
    """A convolution without overlap, computed as a matrix product. The shape of its weights does not change."""

    autocast_operators = ("linear", "conv2d")
    """As in `engine/amp/cast_weights.py`."""
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
        tokens = F.linear(pixels, self.weight.flatten(1), self.bias)
        # The shape that a convolution returns. The model flattens it again, which needs no copy.
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))


def patches_are_linear(wanted: Any, model: nn.Module, precision: Precision, listed: Iterable[str]) -> bool:
    """Whether to embed patches by a matrix product. `auto`: where it was faster in measurements.

    `listed`: operators on AMP's lists, which may name the convolution.
    """
    convolutions = list(_patch_convolutions(model))
    if wanted is True and not convolutions:
        raise UserError(
            f"MODEL.LINEAR_PATCHES true: {type(model).__name__} has no embedding of non-overlapping patches; leave it "
            "auto."
        )
    if wanted != "auto":
        return bool(wanted)
    if not convolutions or precision.device.type not in MEASURED or LISTED.intersection(listed):
        return False
    if precision.level != "O0":
        return True
    return precision.device.type == "cpu" and max(convolutions[0].kernel_size) < LARGE_PATCH


def use_linear_patches(model: nn.Module) -> None:
    for convolution in _patch_convolutions(model):
        mix_in(convolution, LinearPatches)


def _patch_convolutions(model: nn.Module) -> Iterator[nn.Conv2d]:
    for name, module in model.named_modules():
        if f".{name}".endswith(f".{MODULE}") and isinstance(module, nn.Conv2d) and _is_matrix_product(module):
            yield module


def _is_matrix_product(convolution: nn.Conv2d) -> bool:
    """Whether the windows of a convolution are adjacent and do not overlap."""
    return (
        convolution.stride == convolution.kernel_size
        and convolution.kernel_size != (1, 1)
        and convolution.padding in ((0, 0), "valid")
        and convolution.dilation == (1, 1)
        and convolution.groups == 1
    )
