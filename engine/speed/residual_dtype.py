"""TRAIN.RESIDUAL_DTYPE: the residual stream between blocks in autocast's dtype.

Position and class embeddings are fp32, and adding to fp32 gives fp32, so under autocast the residual stream stays fp32
while the blocks compute in half precision. Here it is cast where it enters a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn

from engine.amp.fp32_modules import is_forced
from engine.amp.precision import Precision
from models.blocks import blocks_of
from utils.errors import UserError
from utils.log import log


def casts_residual_stream(wanted: str, model: nn.Module, precision: Precision) -> bool:
    if wanted != "autocast":
        return False
    if precision.level != "O1":
        why = "AMP is off" if precision.level == "O0" else f"AMP.LEVEL {precision.level} has no fp32 residual stream"
        log.info("TRAIN.RESIDUAL_DTYPE autocast has no effect: %s", why)
        return False
    if not any(True for _ in blocks_of(model)):
        raise UserError(
            f"TRAIN.RESIDUAL_DTYPE autocast: {type(model).__name__} has no sequence of equal blocks; leave it fp32."
        )
    return True


def cast_residual_stream(model: nn.Module, precision: Precision) -> None:
    """Cast the residual stream at each block while autocast is on. A validation in fp32 is not affected."""
    how = {"dtype": precision.choice.dtype, "device_type": precision.device.type}
    for _, block in blocks_of(model):
        block.register_forward_pre_hook(partial(_cast_input, **how))
        for scale in (module for module in block.modules() if isinstance(module, LayerScale)):
            # Its factors are fp32, so its output is too, and would turn the stream inside the block to fp32.
            scale.register_forward_hook(partial(_cast_output, **how))


def _cast_input(block: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype, device_type: str) -> Any:
    if is_forced(block) or not inputs or not torch.is_autocast_enabled(device_type):
        return None
    return (inputs[0].to(dtype), *inputs[1:])


def _cast_output(scale: nn.Module, _inputs: Any, output: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    return output.to(dtype) if torch.is_autocast_enabled(device_type) and not is_forced(scale) else output
