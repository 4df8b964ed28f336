"""TRAIN.RESIDUAL_DTYPE: what blocks add their results to, and hand on to one another, in autocast's precision.

Position and class embeddings are fp32, and whatever is added to fp32 becomes it: under autocast that stream stays
twice as wide as what the blocks compute from it. Here it is rounded where it enters a block.
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


def stream_is_narrow(wanted: str, model: nn.Module, precision: Precision) -> bool:
    if wanted != "autocast":
        return False
    if precision.level != "O1":
        why = "AMP is off" if precision.level == "O0" else f"AMP.LEVEL {precision.level} has no fp32 there anyway"
        log.info("TRAIN.RESIDUAL_DTYPE autocast has no effect: %s", why)
        return False
    if not any(True for _ in blocks_of(model)):
        raise UserError(
            f"TRAIN.RESIDUAL_DTYPE autocast: {type(model).__name__} has no row of like blocks that hand a stream on; "
            "leave it fp32."
        )
    return True


def narrow_stream(model: nn.Module, precision: Precision) -> None:
    """Do so wherever autocast is on; the same weights validate in fp32 as before."""
    how = {"dtype": precision.choice.dtype, "kind": precision.device.type}
    for _, block in blocks_of(model):
        block.register_forward_pre_hook(partial(_narrow_input, **how))
        for scale in (module for module in block.modules() if isinstance(module, LayerScale)):
            # Its factors are fp32, and would widen what is added to the stream inside the block.
            scale.register_forward_hook(partial(_narrow_output, **how))


def _narrow_input(block: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype, kind: str) -> Any:
    if is_forced(block) or not inputs or not torch.is_autocast_enabled(kind):
        return None
    return (inputs[0].to(dtype), *inputs[1:])


def _narrow_output(scale: nn.Module, _inputs: Any, output: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    return output.to(dtype) if torch.is_autocast_enabled(kind) and not is_forced(scale) else output
