"""TRAIN.CHANNELS_LAST: the channels_last memory format, for which convolutions have faster kernels."""

from __future__ import annotations

import torch
from torch import nn

from engine.speed.shape import BuiltModel, Choice, Shape
from utils.errors import UserError


class ChannelsLast(Shape):
    """`auto`: on a GPU in half precision, for models with convolutions."""

    key = "channels_last"

    def choose(self, built: BuiltModel) -> Choice:
        obstacle = ""
        if not any(_convolves(module) for module in built.model.modules()):
            obstacle = f"{built.name} has no convolutions except for its patch embedding, and would gain nothing"
        elif built.sharded:
            obstacle = "DIST.STRATEGY fsdp does not support it"
        if obstacle and built.config.TRAIN.CHANNELS_LAST is True:
            raise UserError(f"TRAIN.CHANNELS_LAST true: {obstacle}; leave it auto.")
        return Choice(not obstacle)

    def apply(self, built: BuiltModel, value: bool) -> None:
        built.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        built.inputs.layout = torch.channels_last

    def words(self, choice: Choice) -> str:
        return "channels last"


def _convolves(module: nn.Module) -> bool:
    """Whether it is a convolution with overlapping windows; without overlap it is a matrix product."""
    if not isinstance(module, nn.Conv2d):
        return False
    return any(size > step for size, step in zip(module.kernel_size, module.stride, strict=True))
