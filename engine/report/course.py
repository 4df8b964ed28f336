"""Points of a run's curves, read from its metrics.jsonl: epoch means, validations, the best one, resumes, skips."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from utils.record.tasks import TaskKind, task_of
from utils.record.weight_sets import SETS

Line = dict[str, Any]
Points = list[tuple[float, float]]


class Course:
    """Metrics of a run over epochs; over updates until the first epoch is complete."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._ends: list[tuple[float, float]] = [(0.0, 0.0)]
        """(update, epoch) at the end of each epoch"""
        for line in self.of("epoch"):
            if line["update"] > self._ends[-1][0] and line["epoch"] > self._ends[-1][1]:
                self._ends.append((float(line["update"]), float(line["epoch"])))

    @property
    def by_epoch(self) -> bool:
        return len(self._ends) > 1

    def of(self, event: str) -> list[Line]:
        return [line for line in self._lines if line.get("event") == event]

    def place(self, update: float, by_epoch: bool | None = None) -> float:
        """Position of an update on the axis; the last update of an epoch is at the epoch's number."""
        if not (self.by_epoch if by_epoch is None else by_epoch):
            return float(update)
        after = min(max(bisect_left(self._ends, (float(update), 0.0)), 1), len(self._ends) - 1)
        (u0, e0), (u1, e1) = self._ends[after - 1], self._ends[after]
        return e0 + (update - u0) * (e1 - e0) / (u1 - u0)

    def points(self, event: str, key: str, by_epoch: bool | None = None) -> Points:
        """(position, value) of each line that has a finite value."""
        pairs = [(line.get("update"), line.get(key, line.get("perf", {}).get(key))) for line in self.of(event)]
        known = [(update, float(value)) for update, value in pairs if update is not None and value is not None]
        return [(self.place(update, by_epoch), value) for update, value in known if math.isfinite(value)]

    def trained(self, key: str, by_epoch: bool | None = None) -> Points:
        """Training metric: means of epochs, comparable with validations; single updates until the first epoch ends."""
        return self.points("epoch" if (self.by_epoch if by_epoch is None else by_epoch) else "train", key, by_epoch)

    @property
    def task(self) -> TaskKind:
        """The task, whose best metric curves show, and find the best validation by."""
        return task_of(self.of("val"))

    def best(self, key: str, by_epoch: bool | None = None) -> Points:
        """Validation with the best value of the task's best metric, of any of the weights: one point, or none."""
        metric = self.task.best.name
        candidates = [
            (line[f"{which.prefix}{metric}"], line["update"], line.get(f"{which.prefix}{key}"))
            for line in self.of("val")
            for which in SETS
            if line.get(f"{which.prefix}{metric}") is not None
        ]
        _, update, value = max(candidates, key=lambda one: one[0], default=(None, 0, None))
        return [] if value is None else [(self.place(update, by_epoch), float(value))]

    def resumes(self, by_epoch: bool | None = None) -> list[float]:
        """Positions where the run was resumed."""
        return [self.place(line["update"], by_epoch) for line in self.of("run") if line.get("what") == "resume"]

    def skips(self, by_epoch: bool | None = None) -> Points:
        """(position, loss scale) of each report that has more skipped updates than the one before."""
        points: Points = []
        before = 0
        for line in self.of("train"):
            if (line.get("skipped") or 0) > before and line.get("scale"):
                points.append((self.place(line["update"], by_epoch), float(line["scale"])))
            before = line.get("skipped") or before
        return points
