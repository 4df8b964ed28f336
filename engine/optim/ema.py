"""A moving average of the weights.

The lists of tensors are made once; walking two state dicts at every update costs more than the arithmetic.
"""

# torch._foreach_* are what torch's own optimisers are made of; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.parallel.fsdp import own_part


class Ema:
    def __init__(self, model: nn.Module, decay: float, warmup: bool, device: torch.device) -> None:
        # In fp32 whatever the weights are in: a step of the average is smaller than half precision can add.
        self.module = copy.deepcopy(model).to(device).float().eval().requires_grad_(False)
        self.decay, self.warmup, self.device = decay, warmup, device
        self.updates: int | Tensor = 0
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Average the weights of `model`; called again once both were dealt out over ranks: each averages its part."""
        self._sources = [own_part(p.detach()) for p in model.parameters()]
        self._averages = [own_part(p.detach()) for p in self.module.parameters()]
        # Running statistics are averages already; they are taken over as they are.
        self._buffers = _of_one_kind(zip(self.module.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, moved: bool | Tensor) -> None:
        """Take one step towards the weights, if they moved."""
        if moved is False:
            return
        averages, sources = self._averages, self._sources
        if sources[0].device != self.device or sources[0].dtype != averages[0].dtype:
            sources = [s.to(self.device, torch.float32) for s in sources]
        if isinstance(moved, Tensor):
            self._update_on_device(moved, averages, sources)
            return
        torch._foreach_lerp_(averages, sources, 1 - self._decay_at(self.updates))
        self.updates += 1
        for ours, theirs in self._buffers:
            torch._foreach_copy_(ours, theirs)

    def _update_on_device(self, moved: Tensor, averages: list[Tensor], sources: list[Tensor]) -> None:
        """The same where only the device knows whether the weights moved: the step is multiplied by 0 or 1."""
        moved = moved.to(self.device)
        self.updates = torch.as_tensor(self.updates, device=self.device)
        count = self.updates.double() if self.device.type != "mps" else self.updates.float()
        decay = torch.clamp((1 + count) / (10 + count), max=self.decay) if self.warmup else self.decay
        weight = ((1 - decay) * moved.reshape(())).float()
        steps = torch._foreach_sub(sources, averages)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(averages, steps)
        self.updates = self.updates + moved.reshape(()).long()
        for ours, theirs in self._buffers:
            chosen = torch.where(moved.reshape(()).bool(), _flat(theirs).to(self.device), _flat(ours))
            parts = chosen.split([tensor.numel() for tensor in ours])
            torch._foreach_copy_(ours, [part.view_as(tensor) for part, tensor in zip(parts, ours, strict=True)])

    def _decay_at(self, updates: int | Tensor) -> float:
        """A young average follows quickly, so that it is not made of the first, random weights."""
        count = int(updates)
        return min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay


def _of_one_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Buffers by their types: what is of one type is copied all at once, and a batch norm has two types."""
    kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for ours, theirs in pairs:
        kind = kinds.setdefault((ours.dtype, theirs.dtype), ([], []))
        kind[0].append(ours)
        kind[1].append(theirs)
    return list(kinds.values())


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def on_its_device(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` where it computes: an average in host memory as a copy.

    Moved there and back it would hold other tensors than those that its updates go into.
    """
    elsewhere = next(model.parameters()).device.type != device.type
    return copy.deepcopy(model).to(device) if elsewhere else model
