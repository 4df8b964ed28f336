"""The schedule where only the device knows which updates moved the weights: fp16 on a GPU."""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from timm.scheduler.scheduler import Scheduler
from torch import Tensor
from torch.optim import Optimizer

from engine.optim.schedule import Schedule

TABLE_UPDATES = 10_000
"""Updates whose learning rates are on the device at a time."""


class DeviceSchedule(Schedule):
    """Count and learning rates are on the device, and the host does not wait for them."""

    def __init__(self, scheduler: Scheduler, optimizer: Optimizer, total: int, device: torch.device) -> None:
        self._device, self._count = device, torch.zeros((), dtype=torch.int64, device=device)
        self._first = self._left = 0
        self._table: Tensor | None = None
        super().__init__(scheduler, optimizer, total)

    def _fill_table(self, first: int) -> None:
        """Copy the rates of the next updates, from `first` on, to the device, before it needs them."""
        rows = [self._rates(update) for update in range(first, first + TABLE_UPDATES)]
        self._table = torch.tensor(rows, dtype=torch.float32, device=self._device)
        self._first, self._left = first, TABLE_UPDATES - 1
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros((), device=self._device)

    def advance(self, stepped: bool | Tensor) -> None:
        self._count += stepped
        self._left -= 1
        if self._left == 0:  # waits for the device, once in thousands of updates
            rate = self._optimizer.param_groups[self._reported]["lr"]
            self._fill_table(int(self._count))
            self._optimizer.param_groups[self._reported]["lr"].copy_(rate)
        self._apply()

    def _apply(self) -> None:
        if self._table is None:
            self._fill_table(0)
        assert self._table is not None
        self._last = self._optimizer.param_groups[self._reported]["lr"].clone()
        row = self._table.index_select(0, (self._count - self._first).reshape(1))[0]
        # One call for all groups: with layer decay there are many.
        torch._foreach_copy_([group["lr"] for group in self._optimizer.param_groups], list(row.unbind()))

    @property
    def stepped(self) -> int:
        """It waits for the device, so it is for saving only."""
        return int(self._count)

    def restore(self, stepped: int) -> None:
        self._count.fill_(stepped)
        self._fill_table(stepped)  # makes new tensors: loading the optimiser replaced them
        self._apply()
