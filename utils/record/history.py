"""metrics.jsonl, and what a run measured, computed from it: speed, time, best validation, and points of curves."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from utils.standard_output import LineFile
from vitamp.files import only_regular, parse_json, read_regular, write_atomically
from vitamp.metrics import METRICS, SETS, Metric, TaskKind, WeightSet, metric_named, set_of, task_of

METRICS_FILE = "metrics.jsonl"
TAIL = 2**16
"""Bytes at the end of the file that hold at least one whole line."""
Line = dict[str, Any]


class MetricsFile(LineFile):
    """The lines that a run adds."""

    def __init__(self, folder: Path, repeats: Callable[[Line], bool]) -> None:
        """Remove the lines that the run `repeats`, and a last one that a killed run left incomplete."""
        path = folder / METRICS_FILE
        if path.exists():
            kept: list[str] = []
            for text in _texts(path):
                contents = _parsed([text])
                if contents and not repeats(contents[0]):
                    kept.append(f"{text}\n")
            write_atomically(path, "".join(kept))
        super().__init__(path)


def read_lines(folder: Path) -> list[Line]:
    """The whole lines of a run's file, which may be missing, or be written at this moment."""
    try:
        return _parsed(_texts(folder / METRICS_FILE))
    except OSError:
        return []


def last_line(folder: Path) -> Line:
    """The last whole line, without reading a long file; empty if there is none."""
    try:
        with open(folder / METRICS_FILE, "rb", opener=only_regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    return next(reversed(_parsed(tail.splitlines())), {})


def is_start(line: Line) -> bool:
    return line.get("event") == "run" and line.get("what") in ("start", "resume")


def is_end(line: Line) -> bool:
    """Whether a line says that the run finished."""
    return line.get("event") == "run" and line.get("what") == "end"


def _texts(path: Path) -> list[str]:
    return read_regular(path).decode("utf-8", "replace").splitlines()


def _parsed(texts: list[str]) -> list[Line]:
    """The JSON objects, one per line; other lines are skipped."""
    values: list[Any] = []
    for text in texts:
        with contextlib.suppress(ValueError):
            values.append(parse_json(text))
    return [value for value in values if isinstance(value, dict)]


def plain(value: Any) -> Any:
    """Replace NaN and infinity by null: JSON has neither."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Points = list[tuple[float, float]]


NO_METRICS = ("event", "epoch", "update", "perf")
"""Other fields of a validation's line"""


class BestValidation(NamedTuple):
    value: float
    which: WeightSet
    """The better weights"""
    line: Line


class History:
    """The lines of a run, however often it was resumed.

    Positions on an axis count epochs (`by_epoch`), or updates; by default epochs, once the first one is complete.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    @classmethod
    def of_run(cls, folder: Path) -> History:
        return cls(read_lines(folder))

    def of(self, event: str) -> list[Line]:
        return [line for line in self.lines if line.get("event") == event]

    @cached_property
    def starts(self) -> list[list[Line]]:
        """The lines since each start or resume; each has a clock of its own."""
        starts: list[list[Line]] = [[]]
        for line in self.lines:
            if is_start(line):
                starts.append([])
            starts[-1].append(line)
        return [lines for lines in starts if lines]

    @property
    def images_per_second(self) -> float | None:
        """Median over the reports; the first one after each start is left out, because it includes warming up."""
        speeds = self.speeds
        return statistics.median(speeds) if speeds else None

    @property
    def speeds(self) -> list[float]:
        return self._warm("train", "images_per_second") or _perf(self.lines, "train", "images_per_second")

    @property
    def speed_includes_start(self) -> bool:
        """Whether the run is so short that its speed includes warming up."""
        return not self._warm("train", "images_per_second")

    @property
    def seconds_per_epoch(self) -> float | None:
        seconds = self._warm("epoch", "seconds") or _perf(self.lines, "epoch", "seconds")
        return statistics.median(seconds) if seconds else None

    def _warm(self, event: str, metric: str) -> list[float]:
        """A metric in all lines of a kind except the first after each start."""
        values: list[float] = []
        for lines in self.starts:
            values += _perf(lines, event, metric)[1:]
        return values

    @property
    def peak_memory_gb(self) -> float | None:
        return max(_perf(self.lines, "train", "peak_memory_gb"), default=None)

    @property
    def seconds(self) -> float:
        """Training time: from each start to its last line with a time, added up."""
        total = 0.0
        for lines in self.starts:
            total += max(_perf(lines, "train", "seconds") + _perf(lines, "run", "seconds"), default=0.0)
        return total

    @property
    def skipped(self) -> int:
        """Updates skipped by loss scaling."""
        return max((line.get("skipped") or 0 for line in self.of("train")), default=0)

    @property
    def task(self) -> TaskKind:
        """The task, whose best metric curves show."""
        return task_of(self.of("val"))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the task, and the user's own ones of its validations."""
        own: dict[str, Metric] = {}
        for line in self.of("val"):
            for name in line:
                field = set_of(name)[1]
                if field not in METRICS and field not in NO_METRICS:
                    own[field] = metric_named(field)
        return self.task.metrics + tuple(own.values())

    def best(self, metric: Metric) -> BestValidation | None:
        """Best of all validations, of any of the weights, as the run itself computes it."""
        validations: list[BestValidation] = []
        for line in self.of("val"):
            for which in SETS:
                value = line.get(f"{which.prefix}{metric.name}")
                if value is not None:
                    validations.append(BestValidation(value, which, line))
        return max(validations, key=lambda best: best.value if metric.higher else -best.value, default=None)

    def last(self, metric: Metric) -> dict[WeightSet, float]:
        """Of each set of weights, in the last validation; without those that have no value."""
        validations = self.of("val")
        if not validations:
            return {}
        values = {which: validations[-1].get(f"{which.prefix}{metric.name}") for which in SETS}
        return {which: value for which, value in values.items() if value is not None}

    def _counts_epochs(self, by_epoch: bool | None) -> bool:
        return self.by_epoch if by_epoch is None else by_epoch

    @cached_property
    def _ends(self) -> Points:
        """(update, epoch) at the end of each epoch."""
        ends = [(0.0, 0.0)]
        for line in self.of("epoch"):
            if line["update"] > ends[-1][0] and line["epoch"] > ends[-1][1]:
                ends.append((float(line["update"]), float(line["epoch"])))
        return ends

    @property
    def by_epoch(self) -> bool:
        return len(self._ends) > 1

    def place(self, update: float, by_epoch: bool | None = None) -> float:
        """Position of an update on the axis; the last update of an epoch is at the epoch's number."""
        if not self._counts_epochs(by_epoch):
            return float(update)
        after = min(max(bisect_left(self._ends, (float(update), 0.0)), 1), len(self._ends) - 1)
        update_before, epoch_before = self._ends[after - 1]
        update_after, epoch_after = self._ends[after]
        part = (update - update_before) * (epoch_after - epoch_before) / (update_after - update_before)
        return epoch_before + part

    def points(self, event: str, key: str, by_epoch: bool | None = None) -> Points:
        """(position, value) of each line that has a finite value."""
        pairs = [(line.get("update"), line.get(key, line.get("perf", {}).get(key))) for line in self.of(event)]
        known = [(update, float(value)) for update, value in pairs if update is not None and value is not None]
        return [(self.place(update, by_epoch), value) for update, value in known if math.isfinite(value)]

    def trained(self, key: str, by_epoch: bool | None = None) -> Points:
        """Training metric: means of epochs, comparable with validations; single updates until the first epoch ends."""
        event = "epoch" if self._counts_epochs(by_epoch) else "train"
        return self.points(event, key, by_epoch)

    def best_point(self, key: str, by: Metric, by_epoch: bool | None = None) -> Points:
        """A metric in the best validation by the metric `by`: one point, or none."""
        best = self.best(by)
        if best is None:
            return []
        value = best.line.get(f"{best.which.prefix}{key}")
        return [] if value is None else [(self.place(best.line["update"], by_epoch), float(value))]

    def resumes(self, by_epoch: bool | None = None) -> list[float]:
        """Positions where the run was resumed."""
        return [self.place(line["update"], by_epoch) for line in self.of("run") if line.get("what") == "resume"]

    def skips(self, by_epoch: bool | None = None) -> Points:
        """(position, loss scale) of each report that has more skipped updates than the one before."""
        points: Points = []
        before = 0
        trained = self.of("train")
        if trained and self.lines[0].get("what") == "resume":  # of another run, whose skipped updates count on
            before = trained[0].get("skipped") or 0
        for line in trained:
            if (line.get("skipped") or 0) > before and line.get("scale"):
                points.append((self.place(line["update"], by_epoch), float(line["scale"])))
            before = line.get("skipped") or before
        return points


def _perf(lines: Sequence[Line], event: str, metric: str) -> list[float]:
    """A metric in all lines of a kind that have it."""
    values = [line.get("perf", {}).get(metric) for line in lines if line.get("event") == event]
    return [value for value in values if value]
