"""TRAIN.NOISE_SCALE: the gradient noise scale, the global batch from which larger batches save little time.

It is B_simple = tr(S) / |G|^2 of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training": G is the mean
gradient, and S the covariance of the gradients of single images. On average, the squared norm of a gradient over n
images is |G|^2 + tr(S) / n. So two sizes n give both terms: that of a micro-batch and that of the update. They are
averaged over updates before they are divided, as in appendix A.1 of the paper.
"""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from datasets import Batch, Share
from engine.ability import Ability, Computing, Figure
from engine.amp.precision import Precision
from engine.task.base import sum_type_of
from utils.config.train import TrainConfig
from utils.distributed.world import World, sum_over_ranks
from utils.errors import UserError

DECAY = 0.99
"""Of the averages over updates; they are about those of the last 100."""
AVERAGES = ("micro_batch", "update", "inverse_micro_batch", "inverse_update", "total")
"""Squared norms of the gradients of a micro-batch and of the update, the inverses of their sizes n, and 1.

The averages start at 0; that of 1 says how far they have come.
"""
KEY = "noise_scale"
"""In the checkpoint, metrics.jsonl and charts."""


class NoiseScale(Ability):
    """Measures the first micro-batch of each process and the whole update. Training does not use it."""

    def __init__(self, train: TrainConfig, precision: Precision, world: World) -> None:
        if train.ACCUM_ITER == 1:  # with the processes or the global batch of now
            raise UserError(
                "TRAIN.NOISE_SCALE compares the gradient of a micro-batch with that of the update, but each process "
                "has only one micro-batch per update (TRAIN.ACCUM_ITER 1). Use half of -batch_size with -accum_iter 2, "
                "which keeps the global batch, or set TRAIN.NOISE_SCALE=false."
            )
        self._precision, self._world = precision, world
        self._weights: list[nn.Parameter] = []
        self._shares: list[Share] = []
        device = precision.device
        self._averages = torch.zeros(len(AVERAGES), dtype=sum_type_of(device), device=device)
        self._first = self._averages[0]
        self._now: Tensor | None = None

    def attach(self, to: Computing) -> None:
        self._weights = list(to.model.parameters())

    @torch.no_grad()
    def after_backward(self, share: Share, batch: Batch) -> None:
        """Measure the first gradient: the next ones are added to it, and the last one is summed over ranks by DDP."""
        if not self._shares:
            self._first = self._squared_norm()
        self._shares.append(share)

    @torch.no_grad()
    def before_step(self, update: int) -> None:
        """Measure the gradient of the update. A collective call: all ranks average the same numbers."""
        shares, self._shares, self._now = self._shares, [], None
        if len(shares) == 1:  # in a short last update, on every rank: there is no second size
            return
        first, processes = shares[0], self._world.size
        own = (
            self._first / (processes * first.weight**2),
            self._first.new_full((), 1 / (processes * len(first.indices))),
            self._first.new_full((), sum(share.weight**2 / len(share.indices) for share in shares)),
        )
        micro_batch, inverse_micro_batch, inverse_update = sum_over_ranks(torch.stack(own), self._world)
        squared_scale = self._precision.scale_tensor().to(self._first.dtype).square()
        norms = micro_batch / squared_scale, self._squared_norm() / squared_scale
        self._now = torch.stack((*norms, inverse_micro_batch, inverse_update, torch.ones_like(micro_batch)))

    @torch.no_grad()
    def after_update(self, update: int, moved: bool | Tensor) -> None:
        """Average, unless the update was skipped: its gradient is not finite."""
        if self._now is None or moved is False:
            return
        averages = torch.lerp(self._averages, self._now, 1 - DECAY)
        if isinstance(moved, Tensor):
            averages = torch.where(moved.reshape(()).bool(), averages, self._averages)
        self._averages = averages

    def figures(self) -> dict[str, Figure]:
        value = noise_scale(*self._averages.tolist())
        words = "unknown" if math.isnan(value) else f"{value:,.0f} images"
        return {KEY: Figure(value, f"Noise scale: {words}")}

    def state(self) -> dict[str, Any]:
        return {KEY: dict(zip(AVERAGES, self._averages.tolist(), strict=True))}

    def restore(self, state: Mapping[str, Any]) -> None:
        if saved := state.get(KEY):  # absent from the checkpoint of a run that did not measure
            self._averages = self._averages.new_tensor([saved[name] for name in AVERAGES])

    def _squared_norm(self) -> Tensor:
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        # fp16 gradients (O3) are scaled: their norm may be too large for fp16.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        return torch.stack(norms).to(self._averages.dtype).square().sum()


def noise_scale(
    micro_batch: float, update: float, inverse_micro_batch: float, inverse_update: float, total: float
) -> float:
    """tr(S) / |G|^2 in images, from AVERAGES; NaN if one of the two is not above 0, because there is too much noise."""
    difference = inverse_micro_batch - inverse_update
    variance = (micro_batch - update) * difference
    squared_mean = (inverse_micro_batch * update - inverse_update * micro_batch) * difference
    return total * variance / squared_mean if variance > 0 and squared_mean > 0 else math.nan
