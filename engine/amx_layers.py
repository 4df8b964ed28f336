"""CPU_FP32 amx: linear layers that compute in fp32 by the units that some CPUs have for bf16, as exactly as fp32.

Under autocast, with small inputs, or on another device they compute as torch does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from engine.kernels.native import missing
from engine.mixed_in import mix_in
from utils.errors import UserError
from utils.log import log

SMALLEST = 2**25
"""Multiplications of a product; smaller ones lose more by the call than they gain."""


class AmxLinear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not serves(x, self.weight):
            return super().forward(x)
        return torch.ops.vitamp.fp32_linear(x, self.weight, self.bias)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether a product by `weight` is in fp32, and worth it."""
    if not (x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32) or x.dim() < 2:
        return False
    return not torch.is_autocast_enabled("cpu") and x.numel() * len(weight) >= SMALLEST


def use_amx(model: nn.Module) -> None:
    if why := why_no_amx():  # on this machine, which may be another one than that of the rank that decided
        raise UserError(f"CPU_FP32 amx: {why}; use mkl.")
    for layer in model.modules():
        if type(layer) is nn.Linear:
            mix_in(layer, AmxLinear)


@cache
def why_no_amx() -> str:
    """Why these layers cannot be had on this machine; nothing where they can."""
    if why := missing():
        return why
    from engine.kernels.products import try_out

    try:
        try_out()
    except RuntimeError as error:
        log.debug("CPU_FP32 amx", exc_info=True)
        return str(error)
    return ""
