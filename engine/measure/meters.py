"""Where a run stands, and its training metrics, summed on the device and read back only for a report.

An image that mixup or cutmix made of two has the label with the larger weight. Because the model is trained to predict
both, training accuracy stays far below that of validation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from engine.task.base import Metrics, Task, sum_type_of
from utils.config import Config
from utils.distributed.world import World, sum_over_ranks
from vitamp.meta import BestState, Count, Fields
from vitamp.metrics import against_guessing, metric_named, set_of
from vitamp.sizes import sides

SAMPLES = 3
"""Index into the rows of sums; before it are the loss and the two counts of the task."""
NEVER = -1
MOST_SKIPS = 100  # in a row, which end the run
GRID = 2.0**20


@dataclass(frozen=True)
class Reading:
    """Metrics of one report."""

    update: Metrics
    epoch: Metrics
    grad_norm: float
    scale: float
    lr: float
    skipped: int
    skipped_in_a_row: int
    first_bad: int


class TrainMeters:
    def __init__(self, device: torch.device, world: World, task: Task, weighted: bool = False) -> None:
        """`weighted`: images do not count alike in the loss (TRAIN.CLASS_WEIGHTS)."""
        self._world = world
        self._task = task
        self._weighted = weighted
        self._sum_type = sum_type_of(device)
        self._update = torch.zeros(4, dtype=self._sum_type, device=device)
        self._finished_update = torch.zeros_like(self._update)
        self._epoch = torch.zeros_like(self._update)
        self._epoch_counts = torch.zeros((), dtype=self._sum_type, device=device)
        """What the images of the epoch count for in the loss, if they are weighted"""
        self._one = torch.ones((), dtype=self._sum_type, device=device)
        self._norm = torch.zeros((), device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros_like(self._skipped)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, weight: float, counts: float = 0.0) -> None:
        """Count one micro-batch. One of weight 0 is skipped: it only keeps this rank in step with the others.

        `counts`: as in `MicroBatch`.
        """
        if weight == 0.0:
            return
        n = float(len(labels))
        first, second = self._task.counts(logits, labels, self._sum_type)
        loss = loss.to(self._sum_type)
        samples = self._one * n
        self._update += torch.stack((loss * weight, first, second, samples))
        # One forward pass that overflows must not turn the epoch's mean into NaN.
        of_epoch = loss * (counts if self._weighted else n)
        sums = torch.stack((of_epoch, first, second, samples)).where(torch.isfinite(loss), 0.0)
        if self._weighted:
            # Unlike numbers of samples, weights are no round numbers. On a grid, their sums do not depend on the order,
            # and so not on the number of processes.
            sums = (sums * GRID).round() / GRID
            counted = (self._one * counts).where(torch.isfinite(loss), 0.0)
            self._epoch_counts += (counted * GRID).round() / GRID
        self._epoch += sums

    @torch.no_grad()
    def close_update(self, update: int, norm: Tensor, stepped: bool | Tensor, scaled: bool) -> None:
        """Finish an update, counted from 1. Without loss scaling, a gradient norm that is not finite is a fault."""
        finished = self._update
        self._update = self._finished_update.zero_()
        self._finished_update = finished
        self._norm.copy_(norm)
        if scaled:
            taken = stepped.long().reshape(()) if isinstance(stepped, Tensor) else int(stepped)
            skipped = 1 - taken
            self._skipped += skipped
            self._in_a_row += 1
            self._in_a_row *= skipped
        else:
            bad = ~torch.isfinite(norm) & (self._first_bad == NEVER)
            self._first_bad.masked_fill_(bad, update)

    def read(self, scale: Tensor, lr: float | Tensor) -> Reading:
        """Read everything in one copy from the device. A collective call."""
        sums = sum_over_ranks(torch.cat((self._finished_update, self._epoch)), self._world)
        # Summed apart: a longer all-reduce may add the losses of several ranks in another order.
        counts = sum_over_ranks(self._epoch_counts.clone(), self._world) if self._weighted else sums[4 + SAMPLES]
        same_on_all_ranks = [
            self._norm,
            scale,
            torch.as_tensor(lr, dtype=self._sum_type),
            self._skipped,
            self._in_a_row,
            self._first_bad,
            counts,
        ]
        read = [sums]
        read += [value.to(sums.device, self._sum_type).reshape(1) for value in same_on_all_ranks]
        numbers = torch.cat(read).tolist()
        norm, scale_value, rate, skipped, in_a_row, first_bad, counted = numbers[8:]
        return Reading(
            update=self._metrics(numbers[:4], 1.0),
            epoch=self._metrics(numbers[4:8], counted or 1.0),
            grad_norm=norm,
            scale=scale_value,
            lr=rate,
            skipped=int(skipped),
            skipped_in_a_row=int(in_a_row),
            first_bad=int(first_bad),
        )

    def state(self) -> dict[str, object]:
        """Running sums over all ranks, for a checkpoint."""
        sums = sum_over_ranks(self._epoch.clone(), self._world).tolist()
        if self._weighted:
            sums.append(float(sum_over_ranks(self._epoch_counts.clone(), self._world)))
        return {"epoch": sums, "skipped": int(self._skipped), "skipped_in_a_row": int(self._in_a_row)}

    def restore(self, epoch: list[float], skipped: int, skipped_in_a_row: int) -> None:
        """Restore saved sums: rank 0 holds those of all ranks. Skips that ended the run are counted anew."""
        self._in_a_row.fill_(skipped_in_a_row % MOST_SKIPS)
        found = torch.tensor(epoch, dtype=self._sum_type)
        if not self._world.first:
            found.zero_()
        self._epoch.copy_(found[:4])
        if self._weighted:  # by samples, if the run weighs its classes only from now on
            self._epoch_counts.copy_(found[-1])
        self._skipped.fill_(skipped)

    def forget_skips(self) -> None:
        """Begin a new row of skipped updates, as after an update that was not skipped."""
        self._in_a_row.zero_()

    def start_epoch(self) -> None:
        self._epoch.zero_()
        self._epoch_counts.zero_()

    def _metrics(self, sums: list[float], loss_divisor: float) -> Metrics:
        loss, first, second, samples = sums
        return self._task.training_metrics(loss / loss_divisor, (first, second), max(samples, 1.0))


@dataclass
class Position:
    """Position of a run between two updates."""

    epoch: int = 1
    """Epoch of the next update, from 1."""
    step: int = 0
    """Updates done in this epoch."""
    update: int = 0
    """Updates done in the run."""
    validated: int = 0
    """Value of `update` at the last complete validation: a run may be stopped during one."""


class SkipRecord(Fields):
    """Counts over all skipped updates; saved in checkpoints, so that a resumed run replays the same ones."""

    model_config = ConfigDict(extra="forbid")

    replays: Count = 0
    last_replay: Count = 0
    """Update of the last replay."""
    passed_over: Count = 0
    blamed: dict[str, Count] = Field(default_factory=dict)
    """Number of overflows of each module (AMP.AUTO_FP32)."""


def updates_left(config: Config, position: Position, per_epoch: int) -> int:
    """Number of updates left. `update` alone is not enough: earlier epochs may have had more or fewer updates."""
    planned = (config.TRAIN.NUM_EPOCHS - position.epoch + 1) * per_epoch - position.step
    limit = config.TRAIN.MAX_UPDATES
    return max(0, planned if limit is None else min(planned, limit - position.update))


def is_complete(config: Config, position: Position) -> bool:
    """Whether all is trained, and validated: a run may be stopped within the validation after its last update."""
    if position.epoch > config.TRAIN.NUM_EPOCHS:
        return True
    limit = config.TRAIN.MAX_UPDATES
    return limit is not None and (position.update > limit or position.validated == limit)


def work_until(config: Config, epochs: Sequence[float]) -> np.ndarray:
    """About what is computed until these numbers of epochs, in epochs that train on all pixels and tokens."""
    train = config.TRAIN
    full = config.DATA.IMAGE_SIZE
    pixels = math.prod(sides(full))
    with_all = max(0, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL)
    last = train.NUM_EPOCHS - 1
    changes = {0, with_all, max(last, 0), train.NUM_EPOCHS}
    for fraction, _ in train.SIZE_SCHEDULE:
        start = math.ceil(train.epochs_before(fraction))
        if start < last:
            changes.add(start)
    bounds = sorted(changes)
    shares: list[float] = []
    for start in bounds[:-1]:
        share = math.prod(sides(train.size_in(start + 1, full))) / pixels
        if train.drops_tokens_in(start + 1):
            share *= 1 - train.TOKEN_DROP
        shares.append(share)
    work = np.cumsum(np.diff(bounds) * shares)
    return np.interp(epochs, bounds, np.append(0.0, work))


class Best(BestState):
    """The best validation so far."""

    @property
    def by(self) -> str:
        return set_of(self.kind)[1]

    def is_beaten_by(self, figure: float) -> bool:
        if self.figure is None:
            return math.isfinite(figure)
        return figure > self.figure if metric_named(self.by).higher else figure < self.figure

    def is_given_up(self, patience: int | None) -> bool:
        """Whether so many validations have brought no better one (TRAIN.PATIENCE)."""
        return patience is not None and self.stale >= patience

    def words(self) -> str:
        if self.figure is None:
            return "no validation yet"
        which, by = set_of(self.kind)
        metric = metric_named(by)
        when = f"epoch {self.epoch}" if self.epoch else "before the first epoch"
        return f"{which.marked(metric.words)} {metric.number(self.figure)} ({when})"

    def words_after(self, before: str) -> str:
        """The words after others; '' without a validation."""
        return "" if self.figure is None else before + self.words()

    def record(self) -> dict[str, Any] | None:
        """Entry for meta.json."""
        if self.figure is None:
            return None
        return {"kind": self.kind, "figure": self.figure, "update": self.update, "epoch": self.epoch}


def seconds_of(text: str) -> float:
    """Parse hours, minutes and seconds: '01:30:00' -> 5400.0. The config has checked the format."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds


def mark_of_best(guess: float | None, top1: float | None) -> str:
    """Words for the best epoch so far. `top1`: of its better weights."""
    against = against_guessing(guess, top1)
    return f"best ({against} guessing)" if against else "best"
