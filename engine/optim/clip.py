"""The gradients of an update: their norm, and clipping. Which weights there are is looked up once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine.parallel.fsdp import is_dealt


class Gradients:
    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())

    def clip(self, limit: float | None) -> Tensor:
        """The norm of the unscaled gradients, before clipping."""
        gradients = [p.grad for p in self._weights if p.grad is not None]
        norm: Any = get_total_norm(gradients)
        if is_dealt(norm):
            norm = norm.full_tensor()
        if limit is not None and not _seen_within(norm, limit):
            clip_grads_with_norm_(self._weights, limit, norm)
        return torch.as_tensor(norm)


def _seen_within(norm: Tensor, limit: float) -> bool:
    """Whether clipping would multiply by exactly 1, where that is known without waiting: on a CPU.

    The factor is torch's own, to the last bit; multiplying all gradients by 1 takes as long as by anything else.
    """
    return norm.device.type == "cpu" and bool((limit / (norm + 1e-6)).float().numpy() >= 1)
