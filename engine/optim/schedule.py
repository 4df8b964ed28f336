"""Learning-rate schedule over the updates that moved the weights.

Updates that the loss scaler skips do not count: otherwise the first overflows of an fp16 run would shorten its warm-up.
On a GPU only the device knows which updates were skipped, so count and learning rates are on the device too, and the
host does not wait for them.
"""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from typing import assert_never

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from utils.config.train import TrainConfig


def build_scheduler(optimizer: Optimizer, train: TrainConfig, rates: tuple[float, float, float], per_epoch: int):
    """timm's schedule of the name in TRAIN.LR_SCHEDULER, in updates."""
    _, start_lr, end_lr = rates
    total = train.NUM_EPOCHS * per_epoch
    warmup = min(round(train.WARMUP_EPOCHS * per_epoch), total)
    common = {"warmup_t": warmup, "warmup_lr_init": start_lr, "t_in_epochs": False}
    shape = train.LR_SCHEDULER
    if shape.NAME == "step":
        decay = shape.DECAY_EPOCHS * per_epoch
        return StepLRScheduler(optimizer, decay, decay_rate=shape.DECAY_RATE, warmup_prefix=False, **common)
    if shape.NAME == "multi-step":
        # timm applies a milestone one step early, which in updates would be before the end of the epoch.
        milestones = sorted(epoch * per_epoch + 1 for epoch in shape.MILESTONES)
        return MultiStepLRScheduler(optimizer, milestones, decay_rate=shape.DECAY_RATE, warmup_prefix=False, **common)
    if shape.NAME == "wsd":
        begin = round(train.epochs_before_decay * per_epoch)
        return WarmupStableDecay(optimizer, warmup, begin, total, start_lr, end_lr)
    if shape.NAME == "cosine" or shape.NAME == "warmupcosine":
        # timm warns about a length of 1. A cosine of one update only uses its first value.
        return CosineLRScheduler(optimizer, max(2, total - warmup), lr_min=end_lr, warmup_prefix=True, **common)
    assert_never(shape.NAME)


def describe_schedule(train: TrainConfig, end_lr: float) -> str:
    """Shape after the warm-up, for the banner: 'cosine to 0'."""
    name = train.LR_SCHEDULER.NAME.removeprefix("warmup")
    if name == "wsd" and train.epochs_before_decay >= train.NUM_EPOCHS:
        return "wsd: the warm-up leaves no epoch for the constant learning rate or the decay"
    if name == "wsd":
        return f"wsd: constant through epoch {train.epochs_before_decay:g}, then decaying (1 - sqrt) to {end_lr:.3g}"
    return f"cosine to {end_lr:.3g}" if name == "cosine" else name


class WarmupStableDecay(Scheduler):
    """Linear warm-up, a constant learning rate, and a decay by 1 - sqrt from update `begin` to update `total`.

    It needs `total` only to decay, so that a run made longer before that goes on as if it had been so from the start.
    The shape is the best of those compared in https://arxiv.org/abs/2405.18392. timm's WSDLRScheduler has the same, but
    only in its latest releases.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: int, begin: int, total: int, start_lr: float, end_lr: float
    ) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self._warmup, self._begin, self._total = warmup, begin, total
        self._start_lr, self._end_lr = start_lr, end_lr

    def _get_lr(self, t: int) -> list[float]:
        if t < self._warmup:
            return [self._start_lr + t * ((base - self._start_lr) / self._warmup) for base in self.base_values]
        if t <= self._begin:
            return list(self.base_values)
        left = 1 - math.sqrt(min(1.0, (t - self._begin) / (self._total - self._begin)))
        return [self._end_lr + (base - self._end_lr) * left for base in self.base_values]


TABLE_UPDATES = 10_000
"""Updates whose learning rates are on the device at a time."""


class Schedule:
    """Sets the optimiser's learning rates before each update. `moved` counts the updates that moved the weights."""

    def __init__(self, scheduler: Scheduler, optimizer: Optimizer, total: int, on_device: torch.device | None) -> None:
        """`on_device`: the device, if only it knows of skipped updates (fp16 on a GPU)."""
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._total = total
        self._moved: int | Tensor = 0
        self._table: Tensor | None = None
        self._last: float | Tensor = 0.0
        scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
        self._reported = scales.index(1.0) if 1.0 in scales else 0
        self._reported_scale = scales[self._reported]
        self._first = self._left = 0
        if on_device is not None:
            self._moved = torch.zeros((), dtype=torch.int64, device=on_device)
            self._fill_table(0, on_device)
        self._apply()

    def _fill_table(self, first: int, device: torch.device) -> None:
        """Copy the rates of the next updates, from `first` on, to the device, before it needs them."""
        rows = [self._rates(update) for update in range(first, first + TABLE_UPDATES)]
        self._table = torch.tensor(rows, dtype=torch.float32, device=device)
        self._first, self._left = first, TABLE_UPDATES - 1
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros((), device=device)

    def _rates(self, update: int) -> list[float]:
        self._scheduler.step_update(min(update, self._total))
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def advance(self, stepped: bool | Tensor) -> None:
        if isinstance(self._moved, Tensor):
            self._moved += stepped
            self._left -= 1
            if self._left == 0:  # waits for the device, once in thousands of updates
                rate = self._optimizer.param_groups[self._reported]["lr"]
                self._fill_table(int(self._moved), self._moved.device)
                self._optimizer.param_groups[self._reported]["lr"].copy_(rate)
        else:
            self._moved += int(stepped)
        self._apply()

    def _apply(self) -> None:
        """Set the learning rates for the next update, and remember that of the last one."""
        reported = self._optimizer.param_groups[self._reported]
        if self._table is None:
            self._last = reported["lr"]
            self._scheduler.step_update(int(self._moved))
            return
        assert isinstance(self._moved, Tensor)
        self._last = reported["lr"].clone()
        row = self._table.index_select(0, (self._moved - self._first).reshape(1))[0]
        # One call for all groups: with layer decay there are many.
        torch._foreach_copy_([group["lr"] for group in self._optimizer.param_groups], list(row.unbind()))

    def last_rate(self) -> float | Tensor:
        """Learning rate of the last update, before layer-wise factors; a tensor if it is on the device."""
        return self._last if self._reported_scale == 1.0 else self._last / self._reported_scale

    def rate_at(self, stepped: int) -> float:
        """Learning rate after `moved` updates, for messages."""
        groups = self._optimizer.param_groups
        now = [group["lr"] for group in groups]
        rate = self._rates(stepped)[self._reported] / self._reported_scale
        for group, lr in zip(groups, now, strict=True):
            group["lr"] = lr
        return rate

    @property
    def stepped(self) -> int:
        """Number of updates that moved the weights. It waits for the device, so it is for saving only."""
        return int(self._moved)

    def restore(self, stepped: int) -> None:
        if isinstance(self._moved, Tensor):
            self._moved.fill_(stepped)
            self._fill_table(stepped, self._moved.device)  # makes new tensors: loading the optimiser replaced them
        else:
            self._moved = stepped
        self._apply()
