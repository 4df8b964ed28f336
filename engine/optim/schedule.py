"""The learning rate, a function of how many updates have moved the weights.

An update that the loss scaler skips does not count: otherwise the first overflows of an fp16 run would eat a part
of its warm-up. On a GPU only the device knows which were skipped, so there the count and the rates live on the
device too, and nothing waits for them.
"""

# torch._foreach_* are what torch's own optimisers are made of; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

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
    """timm's schedule of that name, counted in updates."""
    _, start_lr, end_lr = rates
    total = train.NUM_EPOCHS * per_epoch
    warmup = min(round(train.WARMUP_EPOCHS * per_epoch), total)
    common = {"warmup_t": warmup, "warmup_lr_init": start_lr, "t_in_epochs": False}
    shape = train.LR_SCHEDULER
    if shape.NAME == "step":
        decay = shape.DECAY_EPOCHS * per_epoch
        return StepLRScheduler(optimizer, decay, decay_rate=shape.DECAY_RATE, warmup_prefix=False, **common)
    if shape.NAME == "multi-step":
        # timm lets a milestone act one step early; per update that would be before its epoch has ended.
        milestones = sorted(epoch * per_epoch + 1 for epoch in shape.MILESTONES)
        return MultiStepLRScheduler(optimizer, milestones, decay_rate=shape.DECAY_RATE, warmup_prefix=False, **common)
    if shape.NAME == "cosine" or shape.NAME == "warmupcosine":
        # A cosine of one update is its start; timm would warn of a length of 1.
        return CosineLRScheduler(optimizer, max(2, total - warmup), lr_min=end_lr, warmup_prefix=True, **common)
    assert_never(shape.NAME)


TABLE_UPDATES = 10_000


class Schedule:
    """Sets the optimiser's rates before each update. `moved` counts the updates that counted."""

    def __init__(self, scheduler: Scheduler, optimizer: Optimizer, total: int, on_device: torch.device | None) -> None:
        """`on_device`: where skips are known only there (an fp16 run on a GPU), that device."""
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._total = total
        self._moved: int | Tensor = 0
        self._table: Tensor | None = None
        self._last: float | Tensor = 0.0
        scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
        self._told = scales.index(1.0) if 1.0 in scales else 0
        self._told_scale = scales[self._told]
        self._first = self._left = 0
        if on_device is not None:
            self._keep_on_device(on_device)
        self._apply()

    def _keep_on_device(self, device: torch.device) -> None:
        self._moved = torch.zeros((), dtype=torch.int64, device=device)
        self._fill_table(0, device)

    def _fill_table(self, first: int, device: torch.device) -> None:
        """The rates of the next updates from `first` on. The host fills it anew before the device can run out of it."""
        rows = [self._rates(update) for update in range(first, first + TABLE_UPDATES)]
        self._table = torch.tensor(rows, dtype=torch.float32, device=device)
        self._first, self._left = first, TABLE_UPDATES - 1
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros((), device=device)

    def _rates(self, update: int) -> list[float]:
        self._scheduler.step_update(min(update, self._total))
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def advance(self, moved: bool | Tensor) -> None:
        if isinstance(self._moved, Tensor):
            self._moved += moved
            self._left -= 1
            if self._left == 0:  # the one wait in thousands of updates
                rate = self._optimizer.param_groups[self._told]["lr"]
                self._fill_table(int(self._moved), self._moved.device)
                self._optimizer.param_groups[self._told]["lr"].copy_(rate)
        else:
            self._moved += int(moved)
        self._apply()

    def _apply(self) -> None:
        """Set the rates of the coming update, and remember the one that the last was made with."""
        told = self._optimizer.param_groups[self._told]
        if self._table is None:
            self._last = told["lr"]
            self._scheduler.step_update(int(self._moved))
            return
        assert isinstance(self._moved, Tensor)
        self._last = told["lr"].clone()
        row = self._table.index_select(0, (self._moved - self._first).reshape(1))[0]
        # All at once: with a rate of its own each layer would ask the device for something of its own.
        torch._foreach_copy_([group["lr"] for group in self._optimizer.param_groups], list(row.unbind()))

    def last_rate(self) -> float | Tensor:
        """That of the update just made, before a layer's own factor; a tensor where it lives on the device."""
        return self._last if self._told_scale == 1.0 else self._last / self._told_scale

    def rate_at(self, moved: int) -> float:
        """The same after `moved` updates; for messages, not for training."""
        groups = self._optimizer.param_groups
        now = [group["lr"] for group in groups]
        rate = self._rates(moved)[self._told] / self._told_scale
        for group, lr in zip(groups, now, strict=True):
            group["lr"] = lr
        return rate

    @property
    def moved(self) -> int:
        """Waits for the device; for saving, not for every update."""
        return int(self._moved)

    def restore(self, moved: int) -> None:
        if isinstance(self._moved, Tensor):
            self._moved.fill_(moved)
            self._fill_table(moved, self._moved.device)  # with new tensors: loading an optimiser replaced them
        else:
            self._moved = moved
        self._apply()
