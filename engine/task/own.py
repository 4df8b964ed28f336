"""Metrics of the user's own (VALIDATE_METRICS), computed on rank 0 from the probabilities and labels of all images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from datasets import Batch
from engine.task.base import Metrics, Tally, Task
from engine.task.gathered import Gathered
from utils.distributed.world import World, broadcast
from utils.errors import AllRanksError
from utils.own.execute import OwnCodeError, own_lines
from utils.own.registry import own_named


class WithOwnMetrics(Tally):
    """A tally of the program, and the metrics of `task.own_metrics`."""

    def __init__(self, tally: Tally, task: Task, samples: int, device: torch.device) -> None:
        self._tally, self._task = tally, task
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._tally.add(logits, batch)
        labels = batch.labels.reshape(len(logits), -1).to(logits.dtype)
        self._table.add(torch.cat((self._task.probabilities(logits), labels), dim=1), batch.indices)

    def metrics(self, world: World) -> Metrics:
        metrics, rows = self._tally.metrics(world), self._table.on_rank_0(world)
        found = broadcast(self._computed(rows) if world.first else None, world)
        if isinstance(found, str):
            raise AllRanksError(f"{found}\n")
        return replace(metrics, more={**metrics.more, **found})

    def _computed(self, rows: Tensor) -> dict[str, float] | str:
        """The metrics; or the error, which all ranks raise."""
        classes = self._task.classes
        probabilities, labels = rows[:, :classes], rows[:, classes:].long()
        try:
            return measured(self._task.own_metrics, probabilities, labels[:, 0] if labels.shape[1] == 1 else labels)
        except OwnCodeError as error:
            return str(error)


def measured(names: tuple[str, ...], probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """The registered metrics of these names. OwnCodeError, with the user's line, if one fails."""
    return {name: _value(name, probabilities.clone(), labels.clone()) for name in names}


def _value(name: str, probabilities: Tensor, labels: Tensor) -> float:
    own = own_named("metric", name)
    assert own is not None  # checked with the settings
    try:
        made: Any = own.made()
        if hasattr(made, "update") and hasattr(made, "compute"):
            made.update(probabilities, labels)
            value = made.compute()
        else:
            value = made(probabilities, labels)
    except Exception as error:
        raise OwnCodeError(own_lines(error) or f"{own.file}: metric {name}: {error}") from None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OwnCodeError(f"{own.file}: metric {name} returned {what}; it must return one number.") from None
