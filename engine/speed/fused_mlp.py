"""MODEL.FUSED_MLP: bias and GELU of a transformer's MLP in one kernel, forward and backward.

Between an MLP's products only memory is moved, and torch reads it once more than needed. On GPUs torch computes the
products; on CPUs where our own kernels multiply, GELU is part of the first product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import activations
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from engine.amp.fp32_modules import HALVES, is_forced
from engine.amp.precision import Precision
from engine.speed.amx import is_linear
from engine.speed.amx import mlp as mlp_on_cpu
from engine.speed.cpu_products import LISTED as LAYERS
from engine.speed.cpu_products import MKL, OWN
from engine.speed.replace_forward import mix_in
from utils.errors import UserError
from utils.log import log

LISTED = LAYERS | {"gelu"}
"""Names of linear layers and GELU on AMP's lists, which would have no effect inside the fused operator."""
FIRST_CAPABILITY = (8, 0)
"""First GPUs with bf16, and with tensor cores so fast that memory is the MLP's bottleneck between products."""


class FusedMlp(nn.Module):
    """timm's Mlp with its first bias and GELU as one operator. In fp32, or with hooks on its layers, timm's forward."""

    kernel_dtype: torch.dtype | None = None
    """On a CPU, dtype of the inputs that our kernels compute."""
    fc1: nn.Linear
    act: nn.Module
    drop1: nn.Dropout
    norm: nn.Module
    fc2: nn.Linear
    drop2: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if any(_has_own_call(part) for part in (self.fc1, self.act)):
            return super().forward(x)
        if self.kernel_dtype:
            return self._on_cpu(x, self.kernel_dtype)
        if not _in_half(x):
            return super().forward(x)
        h = F.linear(x, self.fc1.weight)
        y = torch.ops.vitamp.gelu_with_bias(h, self.fc1.bias)
        return self.drop2(self.fc2(self.norm(self.drop1(y))))

    def _on_cpu(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        weights = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        drops = self.training and self.drop1.p > 0
        frozen = torch.is_grad_enabled() and not all(weight is None or weight.requires_grad for weight in weights)
        unsupported = drops or frozen or self.fc2.bias is None or _has_own_call(self.fc2)
        y = None if unsupported else mlp_on_cpu(x, *weights, dtype)
        return super().forward(x) if y is None else self.drop2(y)


def mlps_are_fused(
    wanted: Any,
    model: nn.Module,
    precision: Precision,
    listed: Iterable[str],
    sharded: bool = False,
    library: str = MKL,
) -> bool:
    """Whether to fuse MLPs. `auto`: on a GPU in half precision if the kernels work, on a CPU if our kernels multiply.

    `sharded`: whether FSDP shards the weights. `library`: multiplies matrices on a CPU.
    """
    on_cpu = library == OWN
    if wanted is False:
        return False
    if precision.level == "O0" and not on_cpu:
        if wanted is True:
            log.info("MODEL.FUSED_MLP true has no effect: AMP is off")
        return False
    obstacle = _obstacle(model, precision, listed, sharded, on_cpu)
    if not obstacle and not on_cpu and (obstacle := _why_kernels_fail(precision)) and wanted == "auto":
        log.info("MODEL.FUSED_MLP auto has no effect: %s", obstacle)
    if obstacle and wanted is True:
        raise UserError(f"MODEL.FUSED_MLP true: {obstacle}; leave it auto.")
    return not obstacle


def fuse_mlps(model: nn.Module, kernel_dtype: torch.dtype | None = None) -> None:
    """`kernel_dtype`: dtype of the inputs that our kernels for CPUs compute; None on a GPU."""
    if kernel_dtype is None:
        import engine.speed.kernels.gelu  # noqa: F401

    for mlp in _plain_mlps(model):
        mix_in(mlp, FusedMlp)
        mlp.kernel_dtype = kernel_dtype  # pyright: ignore[reportArgumentType]


def _obstacle(model: nn.Module, precision: Precision, listed: Iterable[str], sharded: bool, on_cpu: bool) -> str:
    named = LISTED.intersection(listed)
    if not any(True for _ in _plain_mlps(model)):
        return f"{type(model).__name__} has no MLP with linear layers, biases and exact GELU"
    if not on_cpu and (precision.device.type != "cuda" or torch.version.hip is not None):
        on_a_cpu, elsewhere = f"CPU_BF16={OWN} or CPU_FP32={OWN} on a CPU", "an NVIDIA GPU"
        return f"its kernels need {on_a_cpu if precision.device.type == 'cpu' else elsewhere}"
    if precision.fp8:
        return "fp8 has its own linear layers"
    if sharded:
        return "it was not tested with DIST.STRATEGY fsdp"
    if named:
        return f"AMP's lists would have no effect on {', '.join(sorted(named))} inside a fused operator"
    return ""


def _why_kernels_fail(precision: Precision) -> str:
    """Try the kernels: Triton needs a driver, a C compiler and headers, and finds out only when it runs."""
    if torch.cuda.get_device_capability(precision.device) < FIRST_CAPABILITY:
        return "this GPU is older than compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    from engine.speed.kernels.gelu import self_test

    try:
        self_test(precision.device, precision.choice.dtype)
    except Exception as error:
        log.debug("MODEL.FUSED_MLP", exc_info=True)
        return f"its kernels fail here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return ""


def _plain_mlps(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if type(module) is Mlp and _is_plain(module):
            yield module


def _is_plain(mlp: Mlp) -> bool:
    act, fc1 = mlp.act, mlp.fc1
    exact = type(act) is activations.GELU or (type(act) is nn.GELU and act.approximate == "none")
    linear = all(is_linear(fc) for fc in (fc1, mlp.fc2))
    return exact and linear and fc1.bias is not None and type(mlp.norm) is nn.Identity


def _in_half(x: Tensor) -> bool:
    return x.is_cuda and (x.dtype in HALVES or torch.is_autocast_enabled("cuda"))


def _has_own_call(part: nn.Module) -> bool:
    """Whether a layer must be called by itself: it is forced to fp32, or has hooks."""
    return is_forced(part) or bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks)
