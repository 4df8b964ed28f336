"""MODEL.LINEAR_PATCHES: embed patches by one matrix product instead of a convolution."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from engine.speed.replace_forward import mix_in
from engine.speed.shape import BuiltModel, Choice, Shape
from utils.errors import UserError

MODULE = "patch_embed.proj"
LARGE_PATCH = 16
"""Patches of this size and larger gain nothing in fp32 on a CPU; see docs/dev/kernels.md."""
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


class PatchesByProduct(Shape):
    """`auto`: where it was faster in measurements."""

    key = "linear_patches"

    def choose(self, built: BuiltModel) -> Choice:
        convolutions = list(_patch_convolutions(built.model))
        if built.config.MODEL.LINEAR_PATCHES is True:
            if not convolutions:
                raise UserError(
                    f"MODEL.LINEAR_PATCHES true: {built.name} has no embedding of non-overlapping patches; leave it "
                    "auto."
                )
            return Choice(True)
        if not convolutions or LISTED & built.listed:
            return Choice(False)
        return Choice(built.precision.level != "O0" or max(convolutions[0].kernel_size) < LARGE_PATCH)

    def apply(self, built: BuiltModel, value: bool) -> None:
        for convolution in _patch_convolutions(built.model):
            mix_in(convolution, LinearPatches)

    def words(self, choice: Choice) -> str:
        return "patches by a matrix product"


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
