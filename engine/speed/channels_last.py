"""TRAIN.CHANNELS_LAST: the channels_last memory format, for which convolutions have faster kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from utils.errors import UserError


def uses_channels_last(wanted: Any, model: nn.Module, precision: Precision, sharded: bool) -> bool:
    """Whether to use channels_last. `auto`: on a GPU in half precision, for models with convolutions."""
    convolves = any(_convolves(module) for module in model.modules())
    if wanted is True and not convolves:
        raise UserError(
            f"TRAIN.CHANNELS_LAST true: {type(model).__name__} has no convolutions except for its patch embedding, and "
            "would gain nothing; leave it auto."
        )
    if wanted is True and sharded:
        raise UserError("TRAIN.CHANNELS_LAST true: DIST.STRATEGY fsdp does not support it; leave it auto.")
    if wanted == "auto":
        return convolves and precision.device.type == "cuda" and precision.level != "O0" and not sharded
    return bool(wanted)


def convert_to_channels_last(model: nn.Module, inputs: Inputs) -> None:
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    inputs.layout = torch.channels_last


def match_memory_format(optimizer: Optimizer) -> None:
    """Bring optimiser state from a file into the memory format of its weights, as fused kernels need."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _convolves(module: nn.Module) -> bool:
    """Whether it is a convolution with overlapping windows; without overlap it is a matrix product."""
    if not isinstance(module, nn.Conv2d):
        return False
    return any(size > step for size, step in zip(module.kernel_size, module.stride, strict=True))
