"""Linear layers and MLPs in fp32 or bf16 by AMX, where that is faster; elsewhere as torch computes them.

torch computes in other precisions, with small inputs, and on other devices.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
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
"""Numbers of a sum in bf16, which the kernels keep in fp32 until it is whole: MOST_STEPS steps of 32 in C."""


class TileLinear(nn.Module):
    """nn.Linear, multiplied by tiles where these serve."""

    kernel_dtype: torch.dtype | None = None
    """The precision of inputs that tiles serve."""
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.kernel_dtype
        if dtype is None or not serves(x, self.weight, dtype):
            return super().forward(x)
        return torch.ops.vitamp.cpu_linear(x.to(dtype), self.weight, self.bias)


def is_linear(layer: nn.Module) -> bool:
    """Whether it is nn.Linear with no forward pass but its own or that of TileLinear."""
    return type(layer) is nn.Linear or isinstance(layer, TileLinear)


def use_linear_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Let tiles multiply inputs of `dtype` in the linear layers of `model`."""
    if why := why_not(dtype):  # on this machine, which may be another one than that of the rank that decided
        raise UserError(f"{SETTINGS[dtype]} amx: {why}; use {INSTEAD[dtype]}.")
    for layer in model.modules():
        if is_linear(layer):
            mix_in(layer, TileLinear)
            layer.kernel_dtype = dtype  # pyright: ignore[reportArgumentType]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """F.linear. `dtype`: the precision of inputs that tiles serve; None for none."""
    if dtype is None or not serves(x, weight, dtype):
        return F.linear(x, weight, bias)
    return torch.ops.vitamp.cpu_linear(x.to(dtype), weight, bias)


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Two linear layers and GELU between them as one operator; None where tiles do not serve `x`."""
    return torch.ops.vitamp.cpu_mlp(x.to(dtype), w1, b1, w2, b2)[0] if serves(x, w1, dtype) else None


def serves(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product by `weight` is to be in `dtype`, and faster by tiles."""
    if x.device.type != "cpu" or x.dim() < 2 or x.numel() * len(weight) < SMALLEST:
        return False
    if x.dtype not in PRECISIONS or weight.dtype not in PRECISIONS:
        return False
    if torch.is_autocast_enabled("cpu"):
        computed = torch.get_autocast_dtype("cpu")
    else:
        computed = x.dtype if x.dtype is weight.dtype else None
    short = dtype is torch.float32 or max(weight.shape[0], weight.shape[1]) <= LONGEST
    return computed is dtype and short


def why_not(dtype: torch.dtype | None = None) -> str:
    """Why this machine cannot compute by AMX, or not multiply in `dtype`; nothing where it can."""
    return missing() or (_why_products_fail(dtype) if dtype else "")


@cache
def _why_products_fail(dtype: torch.dtype) -> str:
    from engine.speed.amx.products import try_out

    try:
        try_out(dtype)
    except RuntimeError as error:
        log.debug("%s amx", SETTINGS[dtype], exc_info=True)
        return str(error)
    return ""
