"""TRAIN.CHANNELS_LAST: channels of a pixel side by side in memory, as the faster kernels of convolutions want them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from utils.errors import UserError


def channels_go_last(wanted: Any, model: nn.Module, precision: Precision, dealt_out: bool) -> bool:
    """auto: on a GPU in half precision, for models that convolve. `dealt_out`: over ranks, in rows."""
    convolves = any(_convolves(module) for module in model.modules())
    if wanted is True and not convolves:
        raise UserError(
            f"TRAIN.CHANNELS_LAST true: {type(model).__name__} has no convolutions but that of its patches, and would "
            "gain nothing; leave it auto."
        )
    if wanted is True and dealt_out:
        raise UserError("TRAIN.CHANNELS_LAST true: DIST.STRATEGY fsdp takes no weights in that order; leave it auto.")
    if wanted == "auto":
        return convolves and precision.device.type == "cuda" and precision.level != "O0" and not dealt_out
    return bool(wanted)


def put_channels_last(model: nn.Module, inputs: Inputs) -> None:
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    inputs.layout = torch.channels_last


def lay_out_alike(optimizer: Optimizer) -> None:
    """Moments that were read from a file, in the order of their weights: fused kernels walk through both together."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _convolves(module: nn.Module) -> bool:
    """Windows that overlap; those that lie side by side are a matrix product."""
    if not isinstance(module, nn.Conv2d):
        return False
    return any(size > step for size, step in zip(module.kernel_size, module.stride, strict=True))
