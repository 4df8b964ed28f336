"""The position of a run, its best validation, and its training metrics.

Metrics are summed on the device and read back only for a report. An image that mixup or cutmix made of two has the
label with the larger weight. Because the model is trained to predict both, training accuracy stays far below that of
validation.
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
"""Index of the number of samples in a row of sums; before it are the loss and the two counts of the task."""
NEVER = -1
MOST_SKIPS = 100
"""The run ends after so many skipped updates in a row."""
GRID = 2.0**20
"""Weighted sums are rounded to multiples of 1 / GRID."""


@dataclass(frozen=True)
class Reading:
    """Metrics of one report."""

    update: Metrics
    """Of the last complete update"""
    epoch: Metrics
    """Of the epoch so far"""
    grad_norm: float
    scale: float
    """Loss scale"""
    lr: float
    skipped: int
    """Updates that loss scaling has skipped in this run"""
    skipped_in_a_row: int
    first_bad: int
    """First update with a gradient that is NaN or infinite, without loss scaling; NEVER if there is none"""


class TrainMeters:
    """Sums loss, counts of the task, gradient norm and skipped updates on the device, without waiting for it.

    A row of sums has four numbers: loss times weight, the two counts of the task, and the number of samples.
    """

    def __init__(self, device: torch.device, world: World, task: Task, weighted: bool = False) -> None:
        """`weighted`: images have different weights in the loss (TRAIN.CLASS_WEIGHTS)."""
        self._world = world
        self._task = task
        self._weighted = weighted
        self._sum_type = sum_type_of(device)
        self._update = torch.zeros(4, dtype=self._sum_type, device=device)
        self._finished_update = torch.zeros_like(self._update)
        self._epoch = torch.zeros_like(self._update)
        self._epoch_counts = torch.zeros((), dtype=self._sum_type, device=device)
        """Sum of the weights of the epoch's images in the loss, if they are weighted"""
        self._one = torch.ones((), dtype=self._sum_type, device=device)
        self._norm = torch.zeros((), device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros_like(self._skipped)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, weight: float, counts: float = 0.0) -> None:
        """Count one micro-batch. One of weight 0 is skipped: it only keeps this rank in step with the others.

        `loss`: mean over the micro-batch. `weight`: the fraction of the update that the micro-batch is.
        `counts`: sum of its images' weights in the loss, as in `MicroBatch`.
        """
        if weight == 0.0:
            return
        images = float(len(labels))
        first_count, second_count = self._task.counts(logits, labels, self._sum_type)
        loss = loss.to(self._sum_type)
        samples = self._one * images
        self._update += torch.stack((loss * weight, first_count, second_count, samples))
        # One forward pass that overflows must not turn the epoch's mean into NaN.
        loss_sum = loss * (counts if self._weighted else images)
        sums = torch.stack((loss_sum, first_count, second_count, samples)).where(torch.isfinite(loss), 0.0)
        if self._weighted:
            # Weights are not whole numbers, so their sums depend on the order of the terms, and with it on the number
            # of processes. Rounded to a grid, they do not.
            sums = (sums * GRID).round() / GRID
            counted = (self._one * counts).where(torch.isfinite(loss), 0.0)
            self._epoch_counts += (counted * GRID).round() / GRID
        self._epoch += sums

    @torch.no_grad()
    def close_update(self, update: int, norm: Tensor, stepped: bool | Tensor, scaled: bool) -> None:
        """Finish an update: keep its sums for the report, and count it if it was skipped. Nothing waits for the device.

        `update`: its number, from 1. `norm`: of its gradient. `stepped`: whether the weights moved.
        `scaled`: the loss is scaled, so that an overflow only skips an update. Without it, the first gradient norm that
        is not finite is recorded, as it ends the run.
        """
        # The two rows of sums take turns, so that nothing is allocated.
        finished = self._update
        self._update = self._finished_update.zero_()
        self._finished_update = finished
        self._norm.copy_(norm)
        if scaled:
            moved = stepped.long().reshape(()) if isinstance(stepped, Tensor) else int(stepped)
            skipped = 1 - moved
            self._skipped += skipped
            # One more if this update was skipped, else 0.
            self._in_a_row += 1
            self._in_a_row *= skipped
        else:
            is_first_bad = ~torch.isfinite(norm) & (self._first_bad == NEVER)
            self._first_bad.masked_fill_(is_first_bad, update)

    def read(self, scale: Tensor, lr: float | Tensor) -> Reading:
        """Read everything in one copy from the device. A collective call.

        `scale`: the loss scale. `lr`: the learning rate of the last update. Both are copied with the sums.
        """
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
        pieces = [sums]
        pieces += [value.to(sums.device, self._sum_type).reshape(1) for value in same_on_all_ranks]
        numbers = torch.cat(pieces).tolist()
        # Two rows of four sums come first: of the update and of the epoch.
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
        """Restore the sums of `state`. Rank 0 gets those of all ranks, other ranks begin with zeros.

        Skips that ended the run are counted anew.
        """
        self._in_a_row.fill_(skipped_in_a_row % MOST_SKIPS)
        sums = torch.tensor(epoch, dtype=self._sum_type)
        if not self._world.first:
            sums.zero_()
        self._epoch.copy_(sums[:4])
        # The last number is the sum of weights. A run that was not weighted before has no such number: its last one is
        # the number of samples, each with the weight 1.
        if self._weighted:
            self._epoch_counts.copy_(sums[-1])
        self._skipped.fill_(skipped)

    def forget_skips(self) -> None:
        """Begin a new row of skipped updates, as after an update that was not skipped."""
        self._in_a_row.zero_()

    def start_epoch(self) -> None:
        self._epoch.zero_()
        self._epoch_counts.zero_()

    def _metrics(self, sums: list[float], loss_divisor: float) -> Metrics:
        """Compute metrics from a row of sums. `loss_divisor`: the sum of the weights of the losses in it."""
        loss, first_count, second_count, samples = sums
        return self._task.training_metrics(loss / loss_divisor, (first_count, second_count), max(samples, 1.0))


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
    """Return the number of updates that are still to train.

    It is counted by epoch and step, because earlier epochs may have had more or fewer updates than `per_epoch`.
    """
    planned = (config.TRAIN.NUM_EPOCHS - position.epoch + 1) * per_epoch - position.step
    limit = config.TRAIN.MAX_UPDATES
    return max(0, planned if limit is None else min(planned, limit - position.update))


def is_complete(config: Config, position: Position) -> bool:
    """Return whether all epochs or MAX_UPDATES are trained, and the last update is validated.

    A run may be stopped during the validation after its last update: then that validation is still to do.
    """
    if position.epoch > config.TRAIN.NUM_EPOCHS:
        return True
    limit = config.TRAIN.MAX_UPDATES
    return limit is not None and (position.update > limit or position.validated == limit)


def work_until(config: Config, epochs: Sequence[float]) -> np.ndarray:
    """Estimate the work that a run has done after each of these numbers of epochs.

    The unit is an epoch that trains on all pixels and tokens. Smaller images (TRAIN.SIZE_SCHEDULE) and dropped tokens
    make an epoch less work.
    """
    train = config.TRAIN
    full_size = config.DATA.IMAGE_SIZE
    full_pixels = math.prod(sides(full_size))
    # Epochs after which the size of images or the number of tokens may change.
    drop_end = max(0, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL)
    before_last = train.NUM_EPOCHS - 1
    changes = {0, drop_end, max(before_last, 0), train.NUM_EPOCHS}
    for fraction, _ in train.SIZE_SCHEDULE:
        start = math.ceil(train.epochs_before(fraction))
        if start < before_last:
            changes.add(start)
    bounds = sorted(changes)
    work_per_epoch: list[float] = []
    for start in bounds[:-1]:
        relative_work = math.prod(sides(train.size_in(start + 1, full_size))) / full_pixels
        if train.drops_tokens_in(start + 1):
            relative_work *= 1 - train.TOKEN_DROP
        work_per_epoch.append(relative_work)
    work = np.cumsum(np.diff(bounds) * work_per_epoch)
    return np.interp(epochs, bounds, np.append(0.0, work))


class Best(BestState):
    """The best validation so far, and the number of validations since then."""

    @property
    def by(self) -> str:
        """Name of the metric that decides which validation is best."""
        return set_of(self.kind)[1]

    def is_beaten_by(self, figure: float) -> bool:
        """Return whether `figure` is better. Any finite value beats no validation."""
        if self.figure is None:
            return math.isfinite(figure)
        return figure > self.figure if metric_named(self.by).higher else figure < self.figure

    def is_given_up(self, patience: int | None) -> bool:
        """Return whether the last `patience` validations were not better (TRAIN.PATIENCE); false if it is None."""
        return patience is not None and self.stale >= patience

    def words(self) -> str:
        """Describe the best validation for the log: its weights, metric, value and epoch."""
        if self.figure is None:
            return "no validation yet"
        weight_set, metric_name = set_of(self.kind)
        metric = metric_named(metric_name)
        when = f"epoch {self.epoch}" if self.epoch else "before the first epoch"
        return f"{weight_set.marked(metric.words)} {metric.number(self.figure)} ({when})"

    def words_after(self, before: str) -> str:
        """Append the words to the text `before`; '' without a validation, so that no text is left alone."""
        return "" if self.figure is None else before + self.words()

    def record(self) -> dict[str, Any] | None:
        """Return the entry for meta.json; None without a validation."""
        if self.figure is None:
            return None
        return {"kind": self.kind, "figure": self.figure, "update": self.update, "epoch": self.epoch}


def seconds_of(text: str) -> float:
    """Parse hours, minutes and seconds: '01:30:00' -> 5400.0. The config has checked the format."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds


def mark_of_best(guess: float | None, top1: float | None) -> str:
    """Return the mark of the best epoch so far for its log line, which says so if it is no better than guessing.

    `guess`: accuracy of always guessing the largest class. `top1`: accuracy of the epoch's better weights. Both may be
    unknown (None).
    """
    comparison = against_guessing(guess, top1)
    return f"best ({comparison} guessing)" if comparison else "best"
