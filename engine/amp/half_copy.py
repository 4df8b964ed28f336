"""O2 and NAIVE: the model computes with a half-precision copy of fp32 master weights.

The optimiser, the moving average, checkpoints and clipping all stay with the masters; the copy only computes.
"""

from __future__ import annotations

import copy

# torch._foreach_* are what torch's own optimisers are made of; its type stubs call them private.
# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn

from utils.distributed.world import World, sum_over_ranks

# Its running statistics are fp32 in every level with masters, and its kernels take no weights of another type.
BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *BATCH_NORM)


class HalfCopy:
    def __init__(self, master: nn.Module, dtype: torch.dtype, keep_norms: bool, keep: list[str]) -> None:
        """`keep_norms`: norms stay in fp32 (O2). `keep`: names of modules that do so in any case."""
        self.dtype = dtype
        self._master = master
        self.model = copy.deepcopy(master)
        if not keep_norms:
            take_inputs_in_half(self.model)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        kept = NORMS if keep_norms else BATCH_NORM
        for (name, ours), theirs in zip(self.model.named_modules(), master.modules(), strict=True):
            named = any(name == k or name.startswith(f"{k}.") for k in keep)
            self._share(ours, theirs, named or isinstance(ours, kept))

    def _share(self, ours: nn.Module, theirs: nn.Module, in_fp32: bool) -> None:
        """Parameters: halved, or the master's own. Buffers (running statistics) are always the master's own."""
        for name, parameter in theirs.named_parameters(recurse=False):
            if in_fp32 or not parameter.is_floating_point():
                ours._parameters[name] = parameter
                continue
            half = nn.Parameter(parameter.detach().to(self.dtype), requires_grad=parameter.requires_grad)
            ours._parameters[name] = half
            if parameter.requires_grad:
                self._pairs.append((parameter, half))
        for name in dict(theirs.named_buffers(recurse=False)):
            ours._buffers[name] = theirs._buffers[name]

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the copy's gradients to the masters' in fp32, so that many micro-batches do not round each other away."""
        live = [(master, half) for master, half in self._pairs if half.grad is not None]
        fresh = [(master, half.grad) for master, half in live if master.grad is None and half.grad is not None]
        known = [(master.grad, half.grad) for master, half in live if master.grad is not None and half.grad is not None]
        if known:
            torch._foreach_add_([total for total, _ in known], [gradient for _, gradient in known])
        if fresh:  # written, not added to zeros: of two precisions at once only copies are few kernels on a GPU
            for master, _ in fresh:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([m.grad for m, _ in fresh if m.grad is not None], [gradient for _, gradient in fresh])
        for _, half in live:
            half.grad = None

    @torch.no_grad()
    def sum_gradients(self, world: World) -> None:
        """Once an update, the sum of the masters' gradients over ranks, in fp32 and in one message."""
        sum_gradients(self._master, world)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the masters' new values."""
        if self._pairs:
            masters, halves = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(halves), list(masters))


@torch.no_grad()
def sum_gradients(model: nn.Module, world: World) -> None:
    """Over ranks, in one message."""
    if world.size == 1:
        return
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    parts = sum_over_ranks(flat, world).split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def take_inputs_in_half(model: nn.Module) -> None:
    """Without autocast nobody else brings the images to the precision of the weights they meet."""

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].to(next(module.parameters()).dtype), *args[1:])

    model.register_forward_pre_hook(cast)


def hold_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """O3: the weights themselves in half precision, and no others."""
    model.to(dtype)
    take_inputs_in_half(model)
