"""O2 and NAIVE: a half-precision copy of the fp32 master weights computes forward and backward.

The optimiser, the EMA, checkpoints and clipping use the masters only.
"""

from __future__ import annotations

import copy

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from datasets import Batch, Share
from engine.ability import Ability, Computing
from engine.amp.fp32_modules import forced_modules
from engine.amp.precision import Precision
from models import is_inside
from utils.distributed.world import World, sum_over_ranks

# Always fp32: its running statistics are, and its kernels take no weights of another dtype.
BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *BATCH_NORM)
Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""(master, half-precision copy) of each trained weight."""


class HalfCopy(Ability):
    """Computes in the model's place, gives it its gradients, and takes up its new weights."""

    def __init__(self, precision: Precision, world: World) -> None:
        self._precision, self._world = precision, world

    def attach(self, to: Computing) -> None:
        """A copy has gradients only where its master has them now, and fp32 only where it computes in fp32 now."""
        self._master = to.model
        self._copy, self._pairs = half_copy_of(to.model, self._precision)
        to.forward = self._copy

    def holds(self) -> dict[str, list[Tensor]]:
        pairs = zip(self._copy.parameters(), self._master.parameters(), strict=True)
        return {"weights": [ours.detach() for ours, theirs in pairs if ours is not theirs]}  # frozen ones too

    @torch.no_grad()
    def after_backward(self, share: Share, batch: Batch) -> None:
        """Add the copy's gradients to the masters' in fp32, where sums of many micro-batches lose no small terms."""
        pairs = [(master, half) for master, half in self._pairs if half.grad is not None]
        first = [(master, half.grad) for master, half in pairs if master.grad is None and half.grad is not None]
        later = [
            (master.grad, half.grad) for master, half in pairs if master.grad is not None and half.grad is not None
        ]
        if later:
            torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])
        if first:  # copied, not added to zeros: of mixed dtypes, only copies are fused into few kernels on a GPU
            for master, _ in first:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([m.grad for m, _ in first if m.grad is not None], [gradient for _, gradient in first])
        for _, half in pairs:
            half.grad = None

    @torch.no_grad()
    def before_step(self, update: int) -> None:
        """All-reduce the masters' gradients in fp32, in one message; once per update."""
        if self._world.size == 1:
            return
        gradients: list[Tensor] = [p.grad for p in self._master.parameters() if p.grad is not None]
        sums = sum_over_ranks(_flatten_dense_tensors(gradients), self._world)
        torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(sums, gradients)))

    @torch.no_grad()
    def after_update(self, update: int, moved: bool | Tensor) -> None:
        """Copy the masters' new values into the half-precision weights."""
        if self._pairs:
            masters, halves = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(halves), list(masters))


def half_copy_of(master: nn.Module, precision: Precision) -> tuple[nn.Module, Pairs]:
    """The copy of `master` that AMP.LEVEL O2 or NAIVE computes with, and its trained weights with their masters."""
    return in_half(master, precision.choice.dtype, precision.level == "O2", forced_modules(master))


def in_half(master: nn.Module, dtype: torch.dtype, norms_in_fp32: bool, in_fp32: list[str]) -> tuple[nn.Module, Pairs]:
    """`norms_in_fp32`: true for O2. `in_fp32`: names of modules that stay in fp32 in any case."""
    model = copy.deepcopy(master)
    if not norms_in_fp32:
        cast_inputs_to_half(model)
    fp32_classes = NORMS if norms_in_fp32 else BATCH_NORM
    pairs: Pairs = []
    for (name, ours), theirs in zip(model.named_modules(), master.modules(), strict=True):
        pairs += _copy_module(ours, theirs, is_inside(name, in_fp32) or isinstance(ours, fp32_classes), dtype)
    return model, pairs


def _copy_module(ours: nn.Module, theirs: nn.Module, in_fp32: bool, dtype: torch.dtype) -> Pairs:
    """Convert a module's parameters to half precision, or share the master's. Buffers are always shared."""
    pairs: Pairs = []
    for name, parameter in theirs.named_parameters(recurse=False):
        if in_fp32 or not parameter.is_floating_point():
            ours._parameters[name] = parameter
            continue
        half = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        ours._parameters[name] = half
        if parameter.requires_grad:
            pairs.append((parameter, half))
    for name, _ in list(theirs.named_buffers(recurse=False)):
        ours._buffers[name] = theirs._buffers[name]
    return pairs


def cast_inputs_to_half(model: nn.Module) -> None:
    """Cast the images to the dtype of the first weights, which autocast would do if it were on."""

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].to(next(module.parameters()).dtype), *args[1:])

    model.register_forward_pre_hook(cast)


def convert_to_half(model: nn.Module, dtype: torch.dtype) -> None:
    """O3: convert the weights themselves to half precision, without fp32 masters."""
    model.to(dtype)
    cast_inputs_to_half(model)
