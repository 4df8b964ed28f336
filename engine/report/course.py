"""The course of a run by its metrics.jsonl, as its pictures show it: epoch means, the best validation, resumes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
Points = list[tuple[float, float]]
EMA_PREFIX = "ema_"


class Course:
    """Points over epochs; over updates until the first epoch is whole."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._ends: list[tuple[float, float]] = [(0.0, 0.0)]
        """(update, epoch) of each epoch's end"""
        for line in self.of("epoch"):
            if line["update"] > self._ends[-1][0] and line["epoch"] > self._ends[-1][1]:
                self._ends.append((float(line["update"]), float(line["epoch"])))

    @property
    def by_epoch(self) -> bool:
        return len(self._ends) > 1

    def of(self, event: str) -> list[Line]:
        return [line for line in self._lines if line.get("event") == event]

    def place(self, update: float, by_epoch: bool | None = None) -> float:
        """Where an update is on the axis: an epoch's last one at the epoch's number."""
        if not (self.by_epoch if by_epoch is None else by_epoch):
            return float(update)
        after = min(max(bisect_left(self._ends, (float(update), 0.0)), 1), len(self._ends) - 1)
        (u0, e0), (u1, e1) = self._ends[after - 1], self._ends[after]
        return e0 + (update - u0) * (e1 - e0) / (u1 - u0)

    def points(self, event: str, key: str, by_epoch: bool | None = None) -> Points:
        """What is no number is left out."""
        found = [(line.get("update"), line.get(key, line.get("perf", {}).get(key))) for line in self.of(event)]
        known = [(update, float(value)) for update, value in found if update is not None and value is not None]
        return [(self.place(update, by_epoch), value) for update, value in known if math.isfinite(value)]

    def trained(self, key: str, by_epoch: bool | None = None) -> Points:
        """Means of whole epochs, which compare with validations; single updates where there are none."""
        return self.points("epoch" if (self.by_epoch if by_epoch is None else by_epoch) else "train", key, by_epoch)

    def best(self, key: str, by_epoch: bool | None = None) -> Points:
        """The validation of the highest top-1, of the model or its EMA: one point, or none."""
        found = [
            (line[f"{prefix}acc1"], line["update"], line.get(f"{prefix}{key}"))
            for line in self.of("val")
            for prefix in ("", EMA_PREFIX)
            if line.get(f"{prefix}acc1") is not None
        ]
        _, update, value = max(found, key=lambda one: one[0], default=(None, 0, None))
        return [] if value is None else [(self.place(update, by_epoch), float(value))]

    def resumes(self, by_epoch: bool | None = None) -> list[float]:
        return [self.place(line["update"], by_epoch) for line in self.of("run") if line.get("what") == "resume"]

    def skips(self, by_epoch: bool | None = None) -> Points:
        """Where updates were skipped since the report before, at the scale of then."""
        found: Points = []
        before = 0
        for line in self.of("train"):
            if (line.get("skipped") or 0) > before and line.get("scale"):
                found.append((self.place(line["update"], by_epoch), float(line["scale"])))
            before = line.get("skipped") or before
        return found
