"""Gradient norm and clipping. The list of weights is made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine.parallel.shards import is_sharded


class Gradients:
    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())

    def clip(self, limit: float | None) -> Tensor:
        """Clip the unscaled gradients to norm `limit`. Returns their norm before clipping."""
        gradients = [p.grad for p in self._weights if p.grad is not None]
        norm: Any = get_total_norm(gradients)
        if is_sharded(norm):
            norm = norm.full_tensor()
        if limit is not None and not _is_known_within(norm, limit):
            clip_grads_with_norm_(self._weights, limit, norm)
        return torch.as_tensor(norm)


def _is_known_within(norm: Tensor, limit: float) -> bool:
    """Whether clipping would multiply by exactly 1, so that it can be skipped. Known without waiting on a CPU only.

    The factor is computed as torch does, to the last bit.
    """
    return norm.device.type == "cpu" and bool((limit / (norm + 1e-6)).float().numpy() >= 1)
