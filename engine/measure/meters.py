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
from vitamp.metrics import against_guessing, metric_named, rank, set_of
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
        self._one = torch.ones((), dtype=self._sum_type, device=device)
        """Turns numbers of the host into tensors without a copy to the device"""

        # Rows of four sums: loss times weight, the two counts of the task, and the number of samples.
        self._update_sums = torch.zeros(4, dtype=self._sum_type, device=device)
        """Of the update in progress"""
        self._finished_sums = torch.zeros_like(self._update_sums)
        """Of the last complete update"""
        self._epoch_sums = torch.zeros_like(self._update_sums)
        self._epoch_weight = torch.zeros((), dtype=self._sum_type, device=device)
        """Sum of the weights of the epoch's images in the loss, if they are weighted"""

        self._grad_norm = torch.zeros((), device=device)
        """Of the last complete update"""
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped_in_a_row = torch.zeros_like(self._skipped)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)
        """First update whose gradient was not finite, without loss scaling"""

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, weight: float, weight_sum: float = 0.0) -> None:
        """Add one micro-batch to the sums of the update and of the epoch.

        A micro-batch of weight 0 is skipped: it only keeps this rank in step with the others.
        `loss`: mean over the micro-batch. `weight`: the fraction of the update that the micro-batch is.
        `weight_sum`: sum of the weights that its images have in the loss; used if they are weighted.
        """
        if weight == 0.0:
            return
        images = float(len(labels))
        first_count, second_count = self._task.counts(logits, labels, self._sum_type)
        loss = loss.to(self._sum_type)
        samples = self._one * images
        # The loss of an update may be NaN, and is then reported so.
        self._update_sums += torch.stack((loss * weight, first_count, second_count, samples))
        # But one forward pass that overflows must not turn the epoch's mean into NaN, so the epoch leaves it out.
        loss_sum = loss * (weight_sum if self._weighted else images)
        sums = torch.stack((loss_sum, first_count, second_count, samples)).where(torch.isfinite(loss), 0.0)
        if self._weighted:
            # Weights are not whole numbers, so the last bits of their sums depend on the order of the terms, and with
            # it on the number of processes. Sums of multiples of 1 / GRID are exact, whatever the order.
            sums = (sums * GRID).round() / GRID
            finite_weight_sum = (self._one * weight_sum).where(torch.isfinite(loss), 0.0)
            self._epoch_weight += (finite_weight_sum * GRID).round() / GRID
        self._epoch_sums += sums

    @torch.no_grad()
    def close_update(self, update: int, norm: Tensor, stepped: bool | Tensor, scaled: bool) -> None:
        """Finish an update: keep its sums for the report, and count it if it was skipped. Nothing waits for the device.

        `update`: its number, from 1. `norm`: norm of its gradient. `stepped`: whether the weights moved.
        `scaled`: the loss is scaled, so that an overflow only skips an update. Without it, the first gradient norm that
        is not finite is recorded, as it ends the run.
        """
        # The sums of this update become those of the last complete one. Its row of sums is used for the next update, so
        # that nothing is allocated.
        finished = self._update_sums
        self._update_sums = self._finished_sums.zero_()
        self._finished_sums = finished
        self._grad_norm.copy_(norm)
        if scaled:
            moved = stepped.long().reshape(()) if isinstance(stepped, Tensor) else int(stepped)
            skipped = 1 - moved  # 1 or 0
            self._skipped += skipped
            # One more if this update was skipped, else 0.
            self._skipped_in_a_row += 1
            self._skipped_in_a_row *= skipped
        else:
            is_first_bad = ~torch.isfinite(norm) & (self._first_bad == NEVER)
            self._first_bad.masked_fill_(is_first_bad, update)

    def read(self, scale: Tensor, lr: float | Tensor) -> Reading:
        """Read everything in one copy from the device. A collective call.

        `scale`: the loss scale. `lr`: the learning rate of the last update. Both are copied with the sums.
        """
        # Two rows of four sums: of the update, and of the epoch.
        sums = sum_over_ranks(torch.cat((self._finished_sums, self._epoch_sums)), self._world)
        if self._weighted:
            # Not part of the all-reduce above: a longer one may add the losses of several ranks in another order.
            epoch_weight = sum_over_ranks(self._epoch_weight.clone(), self._world)
        else:
            epoch_weight = sums[4 + SAMPLES]  # each of the epoch's samples has the weight 1
        single_numbers = [
            self._grad_norm,
            scale,
            torch.as_tensor(lr, dtype=self._sum_type),
            self._skipped,
            self._skipped_in_a_row,
            self._first_bad,
            epoch_weight,
        ]
        pieces = [sums]
        pieces += [value.to(sums.device, self._sum_type).reshape(1) for value in single_numbers]
        numbers = torch.cat(pieces).tolist()
        norm, scale_value, rate, skipped, in_a_row, first_bad, weight_of_losses = numbers[8:]
        return Reading(
            update=self._metrics(numbers[:4], 1.0),
            epoch=self._metrics(numbers[4:8], weight_of_losses or 1.0),
            grad_norm=norm,
            scale=scale_value,
            lr=rate,
            skipped=int(skipped),
            skipped_in_a_row=int(in_a_row),
            first_bad=int(first_bad),
        )

    def state(self) -> dict[str, object]:
        """Running sums over all ranks, for a checkpoint."""
        sums = sum_over_ranks(self._epoch_sums.clone(), self._world).tolist()
        if self._weighted:
            sums.append(float(sum_over_ranks(self._epoch_weight.clone(), self._world)))
        return {"epoch": sums, "skipped": int(self._skipped), "skipped_in_a_row": int(self._skipped_in_a_row)}

    def restore(self, epoch: list[float], skipped: int, skipped_in_a_row: int) -> None:
        """Restore the sums of `state`. Rank 0 gets those of all ranks, other ranks begin with zeros.

        `epoch`: the four sums of the epoch so far, and if it was weighted, the sum of the weights of its losses.
        """
        # MOST_SKIPS skipped updates in a row have ended the run: the resumed one counts from 0 again.
        self._skipped_in_a_row.fill_(skipped_in_a_row % MOST_SKIPS)
        sums = torch.tensor(epoch, dtype=self._sum_type)
        if not self._world.first:
            sums.zero_()
        self._epoch_sums.copy_(sums[:4])
        # The last number is the sum of weights. A run that was not weighted before has no such number: its last one is
        # the number of samples, each with the weight 1.
        if self._weighted:
            self._epoch_weight.copy_(sums[-1])
        self._skipped.fill_(skipped)

    def forget_skips(self) -> None:
        """Begin a new row of skipped updates, as after an update that was not skipped."""
        self._skipped_in_a_row.zero_()

    def start_epoch(self) -> None:
        self._epoch_sums.zero_()
        self._epoch_weight.zero_()

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
    """Return the number of updates that are still to train. `per_epoch`: updates of each epoch from now on.

    Epochs before a resume may have had more or fewer, so `position.update` does not say how many epochs are left.
    """
    epochs_left = config.TRAIN.NUM_EPOCHS - position.epoch + 1  # the current one included
    planned = epochs_left * per_epoch - position.step
    limit = config.TRAIN.MAX_UPDATES
    if limit is not None:
        planned = min(planned, limit - position.update)
    return max(0, planned)


def is_complete(config: Config, position: Position) -> bool:
    """Return whether all epochs or MAX_UPDATES are trained, and the validation after them is done.

    A run may be stopped during the validation after its last update. It is not complete then.
    """
    # The position enters the next epoch only after the validation.
    if position.epoch > config.TRAIN.NUM_EPOCHS:
        return True
    limit = config.TRAIN.MAX_UPDATES
    if limit is None:
        return False
    # More updates than the limit: the user has lowered it since.
    return position.update > limit or position.validated == limit


def work_until(config: Config, epochs: Sequence[float]) -> np.ndarray:
    """Estimate the work that a run has done after each number of `epochs`, which may be fractions.

    The unit is an epoch that trains on all pixels and tokens. Smaller images (TRAIN.SIZE_SCHEDULE) and dropped tokens
    make an epoch less work. Returns an array of the same length as `epochs`.
    """
    train = config.TRAIN
    full_size = config.DATA.IMAGE_SIZE
    full_pixels = math.prod(sides(full_size))

    # Numbers of complete epochs after which the work per epoch may change. Before the last epoch it may, since that has
    # images of full size; a change of size after that has no effect.
    dropping_ends = max(0, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL)
    before_last = train.NUM_EPOCHS - 1
    changes = {0, dropping_ends, max(before_last, 0), train.NUM_EPOCHS}
    for start, _ in train.SIZE_SCHEDULE:
        epochs_before = math.ceil(train.epochs_before(start))
        if epochs_before < before_last:
            changes.add(epochs_before)
    bounds = sorted(changes)

    # Work of each epoch between two changes, and the sum up to each change.
    work_per_epoch: list[float] = []
    for epochs_before in bounds[:-1]:
        first_epoch = epochs_before + 1
        relative_work = math.prod(sides(train.size_in(first_epoch, full_size))) / full_pixels
        if train.drops_tokens_in(first_epoch):
            relative_work *= 1 - train.TOKEN_DROP
        work_per_epoch.append(relative_work)
    work = np.cumsum(np.diff(bounds) * work_per_epoch)
    return np.interp(epochs, bounds, np.append(0.0, work))


class Best(BestState):
    """The best validation so far, and the number of validations since then."""

    @property
    def by(self) -> str:
        """Name of the metric that decides which validation is best."""
        _, metric_name = set_of(self.kind)
        return metric_name

    def is_beaten_by(self, figure: float, loss: float) -> bool:
        """Return whether `figure` is better, or equal and of a lower loss. Any finite value beats no validation."""
        if self.figure is None:
            return math.isfinite(figure)
        metric = metric_named(self.by)
        return rank(figure, loss, metric) > rank(self.figure, self.loss, metric)

    def is_given_up(self, patience: int | None) -> bool:
        """Return whether the metric did not improve in the last `patience` validations (TRAIN.PATIENCE).

        False if `patience` is None. A lower loss with an equal metric is no improvement: where every image is
        recognised, the loss falls for as long as the run goes on.
        """
        return patience is not None and self.stale >= patience

    def words(self) -> str:
        """Describe the best validation for the log: its weights, metric, value and epoch."""
        if self.figure is None:
            return "no validation yet"
        weight_set, metric_name = set_of(self.kind)  # `kind` names both, such as "ema_acc1"
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
    """Return the mark for the log line of the best epoch so far: "best", or for example "best (as good as guessing)".

    `guess`: accuracy of always guessing the largest class. `top1`: accuracy of the epoch, by the trained weights or
    their EMA, whichever is better. Either may be unknown (None): then they are not compared.
    """
    comparison = against_guessing(guess, top1)
    return f"best ({comparison} guessing)" if comparison else "best"
