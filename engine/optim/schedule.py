"""Learning-rate schedule over the updates that moved the weights.

Updates that the loss scaler skips do not count: otherwise the first overflows of an fp16 run would shorten its warm-up.
"""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from typing import assert_never

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from timm.scheduler.wsd_lr import WSDLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from utils.config.train import TrainConfig

SCALE = "lr_scale"
"""Key of a parameter group that timm's schedules multiply its learning rate by (TRAIN.LAYER_DECAY)"""


def build_scheduler(optimizer: Optimizer, train: TrainConfig, rates: tuple[float, float, float], per_epoch: int):
    """Build timm's schedule of the name in TRAIN.LR_SCHEDULER, whose unit is an update.

    `rates`: BASE_LR, WARMUP_START_LR and END_LR, scaled. `per_epoch`: updates per epoch.
    """
    _, start_lr, end_lr = rates
    settings = train.LR_SCHEDULER
    total = train.epochs_of_schedule * per_epoch  # updates, after which timm's schedules stay at END_LR
    least_warmup = 1 if train.WARMUP_EPOCHS > 0 else 0  # one update, even if the fraction of an epoch is less
    warmup = min(max(round(train.WARMUP_EPOCHS * per_epoch), least_warmup), total)
    common = {"warmup_t": warmup, "warmup_lr_init": start_lr, "t_in_epochs": False}
    if settings.NAME == "step":
        decay = settings.DECAY_EPOCHS * per_epoch
        return StepLRScheduler(optimizer, decay, decay_rate=settings.DECAY_RATE, warmup_prefix=False, **common)
    if settings.NAME == "multi-step":
        # timm applies a milestone one step early, which in updates would be before the end of the epoch.
        milestones = sorted(epoch * per_epoch + 1 for epoch in settings.MILESTONES)
        factor = settings.DECAY_RATE
        return MultiStepLRScheduler(optimizer, milestones, decay_rate=factor, warmup_prefix=False, **common)
    if settings.NAME == "wsd":
        # Its decay is 1 - sqrt, the best shape of those compared in https://arxiv.org/abs/2405.18392. Where the warm-up
        # leaves no epoch for a decay, timm still asks for one step of it, which comes after the last update.
        decay = max(1, total - round(train.epochs_before_decay * per_epoch))
        length = max(1, total - warmup)  # likewise, if the warm-up takes all updates
        return WSDLRScheduler(optimizer, length, decay, lr_min=end_lr, **common)
    if settings.NAME == "cosine" or settings.NAME == "warmupcosine":
        # timm warns about a length of 1. A cosine of one update only uses its first value.
        length = max(2, total - warmup)
        return CosineLRScheduler(optimizer, length, lr_min=end_lr, warmup_prefix=True, **common)
    assert_never(settings.NAME)


def describe_schedule(train: TrainConfig, end_lr: float) -> str:
    """Describe the schedule after the warm-up, for the banner: 'cosine to 0'."""
    name = train.LR_SCHEDULER.NAME.removeprefix("warmup")
    constant_epochs = train.NUM_EPOCHS - train.epochs_of_schedule
    end = f"{end_lr:.3g}"
    if constant_epochs:
        end += f" at epoch {train.epochs_of_schedule}, then constant"
    if name == "wsd":
        is_all_warmup = train.epochs_before_decay >= train.epochs_of_schedule
        if is_all_warmup:
            return "wsd: the warm-up leaves no epoch for the constant learning rate or the decay"
        return f"wsd: constant through epoch {train.epochs_before_decay:g}, then decaying (1 - sqrt) to {end}"
    return f"cosine to {end}" if name == "cosine" else name


class Schedule:
    """Sets the optimiser's learning rates before each update, by the number of updates that moved the weights."""

    def __init__(self, scheduler: Scheduler, optimizer: Optimizer, total: int) -> None:
        """`total`: number of updates after which the learning rate stays as it is."""
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._total = total
        self._last_rate: float | Tensor = 0.0
        """Learning rate of the last update, in the group that is reported"""
        # Reports have the learning rate of one group: the first that TRAIN.LAYER_DECAY does not scale. If all are
        # scaled, it is the first group, and its scale is undone.
        scales = [float(group.get(SCALE, 1.0)) for group in optimizer.param_groups]
        self._reported_group = scales.index(1.0) if 1.0 in scales else 0
        self._reported_scale = scales[self._reported_group]
        self.restore(0)  # sets the learning rates of the first update

    def _set_rates(self, update: int) -> list[float]:
        """Set and return the learning rates of all groups after `update` updates that moved the weights."""
        self._scheduler.step_update(min(update, self._total))
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def advance(self, stepped: bool | Tensor) -> None:
        """Set the learning rates for the next update. `stepped`: whether the last one moved the weights."""
        self._moved += int(stepped)
        self._apply()

    def _apply(self) -> None:
        """Set the learning rates for the next update, and keep the reported one of the last update."""
        self._last_rate = self._optimizer.param_groups[self._reported_group]["lr"]
        self._scheduler.step_update(self._moved)

    def last_rate(self) -> float | Tensor:
        """Return the learning rate of the last update, before layer-wise factors; a tensor if it is on the device."""
        return self._last_rate if self._reported_scale == 1.0 else self._last_rate / self._reported_scale

    def rate_at(self, stepped: int) -> float:
        """Return the learning rate after `stepped` updates that moved the weights, for messages.

        The learning rates of the optimiser stay as they are.
        """
        groups = self._optimizer.param_groups
        current_rates = [group["lr"] for group in groups]
        rates_then = self._set_rates(stepped)
        for group, current_rate in zip(groups, current_rates, strict=True):  # undo what that has set
            group["lr"] = current_rate
        return rates_then[self._reported_group] / self._reported_scale

    @property
    def stepped(self) -> int:
        """Number of updates that moved the weights."""
        return self._moved

    def restore(self, stepped: int) -> None:
        self._moved = stepped
        self._apply()


TABLE_UPDATES = 10_000
"""Number of updates whose learning rates are copied to the device at a time"""


class DeviceSchedule(Schedule):
    """Schedule for fp16 on a GPU, where only the device knows which updates moved the weights.

    The device counts these updates, and takes the learning rates from a table. So the host need not wait for it.
    """

    def __init__(self, scheduler: Scheduler, optimizer: Optimizer, total: int, device: torch.device) -> None:
        self._device = device
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(scheduler, optimizer, total)

    def _fill_table(self, first: int) -> None:
        """Copy the learning rates of the next updates, from number `first` on, to a table on the device.

        The table has a row per update and a column per group. Each group's learning rate becomes a new tensor, zero
        until `_apply` copies a number of the table into it.
        """
        rows = [self._set_rates(update) for update in range(first, first + TABLE_UPDATES)]
        self._table = torch.tensor(rows, dtype=torch.float32, device=self._device)
        self._first = first
        self._rows_left = TABLE_UPDATES - 1  # the caller uses the first row at once
        for group in self._optimizer.param_groups:  # after the scheduler, which has set numbers on the host
            group["lr"] = torch.zeros((), device=self._device)

    def advance(self, stepped: bool | Tensor) -> None:
        """Count an update on the device, and set the learning rates for the next one."""
        self._count += stepped
        self._rows_left -= 1  # an update that was skipped needs no new row, but only the device knows
        if self._rows_left == 0:
            # Filling the table waits for the device, once in thousands of updates. It clears the learning rate of the
            # last update, which `_apply` keeps for reports: so that is put back.
            last_rate = self._optimizer.param_groups[self._reported_group]["lr"]
            self._fill_table(int(self._count))
            self._optimizer.param_groups[self._reported_group]["lr"].copy_(last_rate)
        self._apply()

    def _apply(self) -> None:
        self._last_rate = self._optimizer.param_groups[self._reported_group]["lr"].clone()
        row = self._table.index_select(0, (self._count - self._first).reshape(1))[0]
        # One call for all groups: with layer decay there are many.
        torch._foreach_copy_([group["lr"] for group in self._optimizer.param_groups], list(row.unbind()))

    @property
    def stepped(self) -> int:
        """Number of updates that moved the weights. Reading it waits for the device, so it is for saving only."""
        return int(self._count)

    def restore(self, stepped: int) -> None:
        self._count.fill_(stepped)
        self._fill_table(stepped)  # makes new tensors: loading the optimiser replaced them
        self._apply()
