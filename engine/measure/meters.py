"""Figures of training, summed up on the device and read back only when a report is due.

Training accuracy counts guesses of an image's label. An image that mixup or cutmix made of two counts as the one with
the larger share: since the other is to be guessed too, this accuracy stays far below that of validation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.distributed.world import World, sum_over_ranks

# Places in the two rows of sums.
LOSS, TOP1, TOP5, SAMPLES = range(4)
NEVER = -1


def correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the label is the first guess, and whether it is among the first five; one value a sample."""
    hits = _hits(logits, labels)
    return hits[:, 0], hits.any(dim=-1)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Which of a sample's first five guesses is its label: one of them, or none. Two classifiers guess together."""
    logits = logits.mean(1) if logits.ndim == 3 else logits
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)


@dataclass(frozen=True)
class Means:
    """Mean loss and accuracies in percent."""

    loss: float
    acc1: float
    acc5: float


@dataclass(frozen=True)
class Reading:
    """What one read-back tells."""

    update: Means
    epoch: Means
    grad_norm: float
    scale: float
    lr: float
    skipped: int
    skipped_in_a_row: int
    first_bad: int


class TrainMeters:
    def __init__(self, device: torch.device, world: World) -> None:
        self._world = world
        self._sum_type = torch.float32 if device.type == "mps" else torch.float64
        self._update, self._epoch = (torch.zeros(4, dtype=self._sum_type, device=device) for _ in range(2))
        self._finished_update = torch.zeros_like(self._update)
        self._one = torch.ones((), dtype=self._sum_type, device=device)
        self._known_factors: dict[tuple[float, float], Tensor] = {}
        self._norm = torch.zeros((), device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros_like(self._skipped)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, weight: float) -> None:
        """Count one micro-batch; one of weight 0 only keeps this rank in step with the others."""
        if weight == 0.0:
            return
        n = float(len(labels))
        hits = _hits(logits, labels).sum(0).to(self._sum_type)
        loss = loss.to(self._sum_type)
        row = torch.stack((loss, hits[0], hits.sum(), self._one))
        self._update += row * self._factors(weight, n)
        # One overflowed forward pass must not turn the whole epoch's mean into NaN.
        self._epoch += (row * self._factors(n, n)).where(torch.isfinite(loss), 0.0)

    def _factors(self, of_loss: float, samples: float) -> Tensor:
        """What a row is multiplied by; made on the device, once for each kind of micro-batch."""
        known = self._known_factors.get((of_loss, samples))
        if known is None:
            known = torch.stack([torch.full_like(self._one, value) for value in (of_loss, 1.0, 1.0, samples)])
            self._known_factors[of_loss, samples] = known
        return known

    @torch.no_grad()
    def close_update(self, update: int, norm: Tensor, moved: bool | Tensor, scaled: bool) -> None:
        """`update` counts from 1. A skipped update is the scaler's work, anything else not finite is a fault."""
        self._finished_update, self._update = self._update, self._finished_update.zero_()
        self._norm.copy_(norm)
        if scaled:
            stood = 1 - (moved.long().reshape(()) if isinstance(moved, Tensor) else int(moved))
            self._skipped += stood
            self._in_a_row += 1
            self._in_a_row *= stood
        else:
            bad = ~torch.isfinite(norm) & (self._first_bad == NEVER)
            self._first_bad.masked_fill_(bad, update)

    def read(self, scale: Tensor, lr: float | Tensor) -> Reading:
        """Everything in one copy from the device; a collective call, so all ranks make it together."""
        sums = sum_over_ranks(torch.cat((self._finished_update, self._epoch)), self._world)
        alike = [
            self._norm,
            scale,
            torch.as_tensor(lr, dtype=self._sum_type),
            self._skipped,
            self._in_a_row,
            self._first_bad,
        ]
        numbers = torch.cat((sums, *(x.to(sums.device, self._sum_type).reshape(1) for x in alike))).tolist()
        norm, scale_value, rate, skipped, in_a_row, first_bad = numbers[8:]
        return Reading(
            _means(numbers[:4], 1.0),
            _means(numbers[4:8], numbers[4 + SAMPLES]),
            norm,
            scale_value,
            rate,
            int(skipped),
            int(in_a_row),
            int(first_bad),
        )

    def state(self) -> dict[str, object]:
        """Running sums over all ranks, for a checkpoint."""
        sums = sum_over_ranks(self._epoch.clone(), self._world)
        return {"epoch": sums.tolist(), "skipped": int(self._skipped), "skipped_in_a_row": int(self._in_a_row)}

    def restore(self, epoch: list[float], skipped: int, skipped_in_a_row: int = 0) -> None:
        """Rank 0 carries what all had summed up."""
        self._in_a_row.fill_(skipped_in_a_row)
        self._epoch.copy_(torch.tensor(epoch, dtype=self._sum_type) if self._world.first else torch.zeros(4))
        self._skipped.fill_(skipped)

    def start_epoch(self) -> None:
        self._epoch.zero_()


def _means(sums: list[float], loss_divisor: float) -> Means:
    samples = max(sums[SAMPLES], 1.0)
    return Means(sums[LOSS] / max(loss_divisor, 1.0), 100 * sums[TOP1] / samples, 100 * sums[TOP5] / samples)
