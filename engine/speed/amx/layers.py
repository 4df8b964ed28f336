"""Linear layers and MLPs in fp32 or bf16 by AMX, where that is faster.

torch computes other dtypes, small inputs, and tensors on other devices.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.speed.amx.build import why_unavailable
from engine.speed.replace_forward import mix_in
from utils.errors import UserError
from utils.log import log

MIN_MULTIPLICATIONS = 2**25
"""Of a product; in smaller ones the call overhead is larger than the gain."""
SETTINGS = {torch.float32: "CPU_FP32", torch.bfloat16: "CPU_BF16"}
ALTERNATIVES = {torch.float32: "mkl", torch.bfloat16: "onednn"}
DTYPES = tuple(SETTINGS)
MAX_BF16_SUM = 5120
"""Most numbers in one sum of a bf16 product: the kernels hold sums in fp32, for MOST_STEPS steps of 32 in C."""


class TileLinear(nn.Module):
    """nn.Linear that multiplies by AMX's tiles where they are faster."""

    kernel_dtype: torch.dtype | None = None
    """Dtype of the inputs that tiles multiply."""
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.kernel_dtype
        if dtype is None or not use_tiles(x, self.weight, dtype):
            return super().forward(x)
        return torch.ops.vitamp.cpu_linear(x.to(dtype), self.weight, self.bias)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is nn.Linear with the forward of that class or of TileLinear."""
    return type(layer) is nn.Linear or isinstance(layer, TileLinear)


def use_linear_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Let tiles multiply inputs of `dtype` in the linear layers of `model`."""
    if why := why_not(dtype):  # the rank that decided may be on another machine
        raise UserError(f"{SETTINGS[dtype]} amx: {why}; use {ALTERNATIVES[dtype]}.")
    for layer in model.modules():
        if is_linear(layer):
            mix_in(layer, TileLinear)
            layer.kernel_dtype = dtype  # pyright: ignore[reportArgumentType]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """F.linear, by tiles where they are faster. `dtype`: dtype of the inputs that tiles multiply; None for no tiles."""
    if dtype is None or not use_tiles(x, weight, dtype):
        return F.linear(x, weight, bias)
    return torch.ops.vitamp.cpu_linear(x.to(dtype), weight, bias)


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Two linear layers with GELU between them as one operator; None if tiles do not support `x` or are slower."""
    return torch.ops.vitamp.cpu_mlp(x.to(dtype), w1, b1, w2, b2)[0] if use_tiles(x, w1, dtype) else None


def use_tiles(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product by `weight` is computed in `dtype`, and faster by tiles."""
    if x.device.type != "cpu" or x.dim() < 2 or x.numel() * len(weight) < MIN_MULTIPLICATIONS:
        return False
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return False
    if torch.is_autocast_enabled("cpu"):
        computed = torch.get_autocast_dtype("cpu")
    else:
        computed = x.dtype if x.dtype is weight.dtype else None
    short = dtype is torch.float32 or max(weight.shape[0], weight.shape[1]) <= MAX_BF16_SUM
    return computed is dtype and short


def why_not(dtype: torch.dtype | None = None) -> str:
    """Why this machine cannot use AMX, or not for products in `dtype`; empty if it can."""
    return why_unavailable() or (_why_products_fail(dtype) if dtype else "")


@cache
def _why_products_fail(dtype: torch.dtype) -> str:
    from engine.speed.amx.products import self_test

    try:
        self_test(dtype)
    except RuntimeError as error:
        log.debug("%s amx", SETTINGS[dtype], exc_info=True)
        return str(error)
    return ""
