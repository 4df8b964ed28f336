"""CPU_FP32 amx and CPU_BF16 amx: linear layers by the units that some CPUs have for bf16, in fp32 as exactly as fp32.

In other precisions, with small inputs, or on another device they compute as torch does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from engine.speed.amx.build import missing
from engine.speed.replace_forward import mix_in
from utils.errors import UserError
from utils.log import log

SMALLEST = 2**25
"""Multiplications of a product; smaller ones lose more by the call than they gain."""
SETTINGS = {torch.float32: "CPU_FP32", torch.bfloat16: "CPU_BF16"}
INSTEAD = {torch.float32: "mkl", torch.bfloat16: "onednn"}
PRECISIONS = tuple(SETTINGS)
LONGEST = 5120
"""Numbers of a sum in bf16, which the kernels keep in fp32 until it is whole: DEEPEST steps of 32 in C."""


class AmxLinear(nn.Module):
    by_amx: torch.dtype | None = None
    """The precision of products that are computed so."""
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not serves(x, self.weight, self.by_amx):
            return super().forward(x)
        return torch.ops.vitamp.amx_linear(x.to(self.by_amx), self.weight, self.bias)


def serves(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a product by `weight` is to be in this precision, and worth it."""
    if dtype is None or x.device.type != "cpu" or x.dim() < 2 or x.numel() * len(weight) < SMALLEST:
        return False
    if x.dtype not in PRECISIONS or weight.dtype not in PRECISIONS:
        return False
    if torch.is_autocast_enabled("cpu"):
        computed = torch.get_autocast_dtype("cpu")
    else:
        computed = x.dtype if x.dtype is weight.dtype else None
    short = dtype is torch.float32 or max(weight.shape[0], weight.shape[1]) <= LONGEST
    return computed is dtype and short


def use_amx(model: nn.Module, dtype: torch.dtype) -> None:
    if why := why_no_amx(dtype):  # on this machine, which may be another one than that of the rank that decided
        raise UserError(f"{SETTINGS[dtype]} amx: {why}; use {INSTEAD[dtype]}.")
    for layer in model.modules():
        if type(layer) is nn.Linear or isinstance(layer, AmxLinear):
            mix_in(layer, AmxLinear)
            layer.by_amx = dtype  # pyright: ignore[reportArgumentType]


def why_no_amx(dtype: torch.dtype) -> str:
    """Why these layers cannot be had on this machine; nothing where they can."""
    return missing() or _why_products_fail(dtype)


@cache
def _why_products_fail(dtype: torch.dtype) -> str:
    from engine.speed.amx.products import try_out

    try:
        try_out(dtype)
    except RuntimeError as error:
        log.debug("%s amx", SETTINGS[dtype], exc_info=True)
        return str(error)
    return ""
