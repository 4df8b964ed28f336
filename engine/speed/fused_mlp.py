"""Computes bias and GELU of a transformer's MLP in one kernel, forward and backward (SPEED).

Between the two matrix products of an MLP, the time goes into moving memory, and torch reads it once more than needed.
The products themselves stay torch's.
"""

import importlib.util

import torch
import torch.nn.functional as F
from timm.layers import activations
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.nn.modules import module as modules

from engine.amp.low_precision import is_forced
from engine.amp.op_lists import HALVES
from engine.amp.precision import Precision
from engine.speed.speedup import BuiltModel, Choice, Speedup, mix_in
from models.parts import has_adapters
from utils.errors import UserError
from utils.log import log

LISTED = frozenset({"linear", "fc", "addmm", "mm", "matmul", "matmul_v2", "fused_gemm_epilogue", "gelu"})
"""Names of linear layers and GELU on AMP's lists, which would have no effect inside the fused operator."""
ADAPTED = "MODEL.LORA has adapters in fc1 or fc2, which its kernels would leave out"
"""Obstacle that is logged under `auto`, too"""
FIRST_CAPABILITY = (8, 0)
"""First GPUs with bf16, and with tensor cores so fast that memory is the MLP's bottleneck between products."""


class FusedMlp(nn.Module):
    """Mixin for timm's Mlp that computes its first bias and GELU as one operator.

    In fp32, or where its layers must be called by themselves, timm's own forward computes.
    """

    fc1: nn.Linear
    act: nn.Module
    drop1: nn.Dropout
    norm: nn.Module
    fc2: nn.Linear
    drop2: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not _in_half(x) or any(_has_own_call(part) for part in (self.fc1, self.act)):
            return super().forward(x)
        without_bias = F.linear(x, self.fc1.weight)
        activations_of_fc1 = torch.ops.vitamp.gelu_with_bias(without_bias, self.fc1.bias)
        return self.drop2(self.fc2(self.norm(self.drop1(activations_of_fc1))))


class FusedMlps(Speedup):
    """Fuses bias and GELU in all plain MLPs. `auto` does so on a GPU in half precision if the kernels work."""

    key = "fused_mlp"
    title = "bias and GELU in one kernel"

    def choose(self, built: BuiltModel) -> Choice:
        """Choose True if the model has MLPs that the kernels can compute, and the kernels work here."""
        wanted = built.config.wants("fused_mlp")
        if built.precision.level == "O0":
            log.info("SPEED +fused_mlp has no effect: AMP is off")
            return Choice(False)
        obstacle_in_model = _obstacle(built)
        obstacle = obstacle_in_model or _why_kernels_fail(built.precision)
        # Under auto, only what a user would not expect is logged: adapters, and kernels that fail.
        is_auto = wanted is None
        kernels_fail = obstacle and not obstacle_in_model
        if is_auto and (kernels_fail or obstacle_in_model == ADAPTED):
            log.info("SPEED auto leaves out fused_mlp: %s", obstacle)
        if obstacle and wanted:
            raise UserError(f"SPEED +fused_mlp: {obstacle}; leave it out.")
        return Choice(not obstacle)

    def apply(self, built: BuiltModel, value: bool) -> None:
        import engine.speed.kernels.gelu  # noqa: F401

        for mlp in _plain_mlps(built.model):
            mix_in(mlp, FusedMlp)


def _obstacle(built: BuiltModel) -> str:
    """Say why this model, device or precision cannot use the kernels; '' if nothing is known before trying them."""
    precision = built.precision
    for mlp in built.model.modules():
        if type(mlp) is Mlp and (has_adapters(mlp.fc1) or has_adapters(mlp.fc2)):
            return ADAPTED
    if not _plain_mlps(built.model):
        return f"{built.name} has no MLP with linear layers, biases and exact GELU"
    if precision.device.type != "cuda" or torch.version.hip is not None:
        return "its kernels need an NVIDIA GPU"
    if precision.fp8:
        return "fp8 has its own linear layers"
    if built.sharded:
        return "it was not tested with DIST.STRATEGY fsdp"
    operators = ", ".join(sorted(LISTED & built.listed))
    if operators:
        return f"AMP's lists would have no effect on {operators} inside a fused operator"
    return ""


def _why_kernels_fail(precision: Precision) -> str:
    """Try the kernels, and say why they fail; '' if they work.

    Triton needs a driver, a C compiler and headers, and finds out only when it runs.
    """
    if torch.cuda.get_device_capability(precision.device) < FIRST_CAPABILITY:
        return "this GPU is older than compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    from engine.speed.kernels.gelu import self_test

    try:
        self_test(precision.device, precision.choice.dtype)
    except Exception as error:
        log.debug("fused_mlp", exc_info=True)
        return f"its kernels fail here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return ""


def _plain_mlps(model: nn.Module) -> list[Mlp]:
    """List the MLPs that the kernels can compute: two linear layers, a bias, exact GELU and no norm."""
    mlps = []
    for mlp in model.modules():
        if type(mlp) is not Mlp:
            continue
        act = mlp.act
        is_exact = type(act) is activations.GELU or (type(act) is nn.GELU and act.approximate == "none")
        is_linear = type(mlp.fc1) is nn.Linear and type(mlp.fc2) is nn.Linear
        if is_exact and is_linear and mlp.fc1.bias is not None and type(mlp.norm) is nn.Identity:
            mlps.append(mlp)
    return mlps


def _in_half(x: Tensor) -> bool:
    """Return whether a layer computes in half precision on a GPU with this input: by its dtype, or by autocast."""
    return x.is_cuda and (x.dtype in HALVES or torch.is_autocast_enabled("cuda"))


def _has_own_call(part: nn.Module) -> bool:
    """Return whether a layer must be called by itself: it is forced to fp32, or it or all modules have hooks."""
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or modules._global_forward_hooks
    return is_forced(part) or bool(hooks)
