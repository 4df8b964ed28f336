"""Rows of numbers of every sample of a validation: each rank keeps its own, and rank 0 gets all at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.task.base import check_count
from utils.distributed.world import World, broadcast, sum_over_ranks

BYTES_AT_ONCE = 64 * 2**20
"""Most memory of a device that gathering takes."""


class Gathered:
    """Rows are in host memory."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self._indices: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor, indices: Tensor) -> None:
        """One row per sample of a batch; those of padding are left out."""
        # The last column counts how often a sample was seen.
        rows, indices = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).cpu(), indices.cpu()
        real = indices >= 0
        self._rows.append(rows[real])
        self._indices.append(indices[real])

    def on_rank_0(self, world: World) -> Tensor:
        """All rows, in the order of the split; on other ranks none. A collective call.

        Ranks add up their rows, and zeros for others', a few rows at a time.
        """
        indices, rows = torch.cat(self._indices), torch.cat(self._rows)
        width = rows.shape[1]
        table = torch.zeros(self._samples if world.first else 0, width)
        at_once = max(1, BYTES_AT_ONCE // (4 * width))
        for first in range(0, self._samples, at_once):
            last = min(first + at_once, self._samples)
            own = (indices >= first) & (indices < last)
            some = torch.zeros(last - first, width).index_add_(0, indices[own] - first, rows[own])
            some = sum_over_ranks(some.to(self._device), world)
            if world.first:
                table[first:last] = some.cpu()
        check_count(broadcast(int((table[:, -1] == 1).sum()), world), self._samples)
        return table[:, :-1]
