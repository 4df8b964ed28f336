"""Makes convolutions faster (SPEED): patches by a matrix product, and the memory format channels_last."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.speed.speedup import BuiltModel, Choice, Speedup, mix_in
from models.parts import is_convolutional, overlapping_convolutions
from utils.errors import UserError

PATCH_PROJECTION = "patch_embed.proj"
"""Name of the convolution of the patch embedding, in a model or in a part of it"""
LARGE_PATCH = 16
"""Patches of this size and larger gain nothing in fp32 on a CPU; see docs/dev/kernels.md."""
LISTED = frozenset({"conv2d", "linear", "fc", "matmul_v2", "fused_gemm_epilogue"})
"""Names of convolutions and linear layers on AMP's lists, which may cast one of the two and not the other."""


class PatchesAsProduct(nn.Module):
    """Mixin for a convolution without overlap: computes it as a matrix product, with the same weights."""

    autocast_operators = ("linear", "conv2d")
    """As in `engine/amp/low_precision.py`."""
    kernel_size: tuple[int, int]
    weight: Tensor
    bias: Tensor | None

    def forward(self, images: Tensor) -> Tensor:
        """Compute the patch embedding. Images that patches do not divide evenly go to the convolution itself."""
        batch, channels, height, width = images.shape
        down, across = self.kernel_size
        if height % down or width % across:
            return super().forward(images)
        rows = height // down
        columns = width // across
        # Patches x the pixels of each: batch x rows x columns x channels x down x across, then flattened.
        patches = images.reshape(batch, channels, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        pixels = patches.reshape(batch, rows * columns, channels * down * across)
        tokens = F.linear(pixels, self.weight.flatten(1), self.bias)
        # The shape that a convolution returns: batch x features x rows x columns. The model flattens rows and columns
        # again, and none of this copies.
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))


class LinearPatches(Speedup):
    """Computes the patch embedding as a matrix product. `auto` does so where it was faster in measurements."""

    key = "linear_patches"
    title = "patches by a matrix product"

    def choose(self, built: BuiltModel) -> Choice:
        """Choose True if the model has such an embedding, and SPEED asks for it or it was faster in measurements."""
        convolutions = _patch_convolutions(built.model)
        if built.config.wants("linear_patches"):
            if not convolutions:
                raise UserError(
                    f"SPEED +linear_patches: {built.name} has no embedding of non-overlapping patches; leave it out."
                )
            return Choice(True)
        # Under auto. If AMP's lists name one of these operators, they may treat a convolution unlike a product.
        if not convolutions or LISTED & built.listed:
            return Choice(False)
        # It was faster in half precision, and in fp32 with small patches.
        is_half = built.precision.level != "O0"
        return Choice(is_half or max(convolutions[0].kernel_size) < LARGE_PATCH)

    def apply(self, built: BuiltModel, value: bool) -> None:
        for convolution in _patch_convolutions(built.model):
            mix_in(convolution, PatchesAsProduct)


def _patch_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """List the convolutions of the patch embedding whose windows are adjacent and do not overlap."""
    return [
        module
        for name, module in model.named_modules()
        if f".{name}".endswith(f".{PATCH_PROJECTION}")  # the whole name, or after a dot
        and isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size
        and module.kernel_size != (1, 1)
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    ]


class ChannelsLast(Speedup):
    """Uses the memory format channels_last, for which convolutions have faster kernels.

    `auto` uses it on a GPU in half precision, and on a CPU for ResNet, EfficientNet and the like
    (docs/dev/kernels.md).
    """

    key = "channels_last"
    title = "channels last"

    def choose(self, built: BuiltModel) -> Choice:
        """Choose True if SPEED asks for it, else what the resumed run chose, else whether it gains on this device."""
        obstacle = ""
        wanted = built.config.wants("channels_last")
        if not overlapping_convolutions(built.model):
            obstacle = f"{built.name} has no convolutions except for its patch embedding, and would gain nothing"
        elif built.sharded:
            obstacle = "DIST.STRATEGY fsdp does not support it"
        if obstacle and wanted:
            raise UserError(f"SPEED +channels_last: {obstacle}; leave it out.")
        if obstacle:
            return Choice(False)
        if wanted:
            return Choice(True)
        # Under auto: a speed-up that SPEED leaves out is not asked to choose (`speedups`).
        gains = built.precision.device.type != "cpu" or is_convolutional(built.model)
        return Choice(built.before.get(self.key, gains))

    def apply(self, built: BuiltModel, value: bool) -> None:
        built.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        built.inputs.layout = torch.channels_last
