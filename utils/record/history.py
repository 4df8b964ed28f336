"""Reads and writes metrics.jsonl, and computes from it a run's speed, time, best validation, and points of curves."""

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
from vitamp.metrics import LOSS, METRICS, SETS, Metric, TaskKind, WeightSet, metric_named, rank, set_of, task_of

METRICS_FILE = "metrics.jsonl"
TAIL = 2**16
"""Bytes at the end of the file that hold at least one whole line."""
Line = dict[str, Any]


class MetricsFile(LineFile):
    """The metrics.jsonl of a run that is training, to which it adds lines."""

    def __init__(self, folder: Path, repeats: Callable[[Line], bool]) -> None:
        """Open the file of a new or resumed run, and remove lines that a resumed run will write again.

        A last line that a killed run left incomplete is removed, too.

        repeats: whether the run will write a line again
        """
        path = folder / METRICS_FILE
        if path.exists():
            remaining: list[str] = []
            for text in _lines_of_text(path):
                parsed_lines = _parsed([text])  # none or one
                if parsed_lines and not repeats(parsed_lines[0]):
                    remaining.append(f"{text}\n")
            write_atomically(path, "".join(remaining))
        super().__init__(path)


def read_lines(folder: Path) -> list[Line]:
    """Read the complete lines of a run's metrics.jsonl; empty if there is no file. The run may still be writing."""
    try:
        return _parsed(_lines_of_text(folder / METRICS_FILE))
    except OSError:
        return []


def last_line(folder: Path) -> Line:
    """Read the last complete line of a run's metrics.jsonl without reading a long file; empty if there is none."""
    try:
        with open(folder / METRICS_FILE, "rb", opener=only_regular) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    lines = _parsed(tail.splitlines())
    return lines[-1] if lines else {}


def is_start(line: Line) -> bool:
    """Whether a line tells that the run was started or resumed."""
    return line.get("event") == "run" and line.get("what") in ("start", "resume")


def is_end(line: Line) -> bool:
    """Whether a line tells that the run finished."""
    return line.get("event") == "run" and line.get("what") == "end"


def _lines_of_text(path: Path) -> list[str]:
    return read_regular(path).decode("utf-8", "replace").splitlines()


def _parsed(texts: list[str]) -> list[Line]:
    """Parse lines of text; lines that are no JSON object are skipped."""
    values: list[Any] = []
    for text in texts:
        with contextlib.suppress(ValueError):
            values.append(parse_json(text))
    return [value for value in values if isinstance(value, dict)]


def plain(value: Any) -> Any:
    """Replace NaN and infinity by None, also inside dicts and lists, because JSON has neither."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


Points = list[tuple[float, float]]
"""(position on the axis, value) of each point of a curve."""


FIELDS_WITHOUT_METRIC = ("event", "epoch", "update", "perf")
"""Fields of a validation's line that are no metrics."""


class BestValidation(NamedTuple):
    """The best validation of a run by some metric."""

    value: float
    which: WeightSet
    """The set of weights (plain or EMA) with the best value."""
    line: Line

    def rank(self, by: Metric) -> tuple[float, float]:
        """A key that is higher for a better validation, by the metric `by`."""
        return rank(self.value, self.line.get(f"{self.which.prefix}{LOSS.name}"), by)


class History:
    """All lines of a run, however often it was resumed, and what they tell.

    Positions on an axis count epochs if `by_epoch` is True, and updates if it is False. If it is None, they count
    epochs once the first epoch is complete.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    @classmethod
    def of_run(cls, folder: Path) -> History:
        return cls(read_lines(folder))

    def of(self, event: str) -> list[Line]:
        """The lines with this event."""
        return [line for line in self.lines if line.get("event") == event]

    @cached_property
    def starts(self) -> list[list[Line]]:
        """The lines from each start or resume to the next, in which seconds count from that start."""
        starts: list[list[Line]] = [[]]
        for line in self.lines:
            if is_start(line):
                starts.append([])
            starts[-1].append(line)
        return [lines for lines in starts if lines]

    @property
    def images_per_second(self) -> float | None:
        """The median speed of training; None if no line has a speed."""
        speeds = self.speeds
        return statistics.median(speeds) if speeds else None

    @property
    def speeds(self) -> list[float]:
        """Images per second of the reports, without the first one after each start, which includes the warm-up.

        If there are no others, these are returned.
        """
        return self._warm("train", "images_per_second") or _perf(self.lines, "train", "images_per_second")

    @property
    def speed_includes_start(self) -> bool:
        """Whether the run is so short that its speed includes the warm-up."""
        return not self._warm("train", "images_per_second")

    @property
    def seconds_per_epoch(self) -> float | None:
        """The median time of an epoch, without the first one after each start if there are others; None if unknown."""
        seconds = self._warm("epoch", "seconds") or _perf(self.lines, "epoch", "seconds")
        return statistics.median(seconds) if seconds else None

    def _warm(self, event: str, metric: str) -> list[float]:
        """A performance metric in all lines with this event, except the first one after each start."""
        values: list[float] = []
        for lines in self.starts:
            values += _perf(lines, event, metric)[1:]
        return values

    @property
    def peak_memory_gb(self) -> float | None:
        return max(_perf(self.lines, "train", "peak_memory_gb"), default=None)

    @property
    def seconds(self) -> float:
        """Training time in seconds: the sum, over all starts, of the time until the last line that has a time."""
        total = 0.0
        for lines in self.starts:
            total += max(_perf(lines, "train", "seconds") + _perf(lines, "run", "seconds"), default=0.0)
        return total

    @property
    def skipped(self) -> int:
        """Number of updates that loss scaling skipped."""
        return max((line.get("skipped") or 0 for line in self.of("train")), default=0)

    @property
    def task(self) -> TaskKind:
        """The task, whose best metric curves show."""
        return task_of(self.of("val"))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the task, and the metrics of the user's own code in validations."""
        own_metrics: dict[str, Metric] = {}
        for line in self.of("val"):
            for field in line:
                _, name = set_of(field)  # the set of weights, and the name without its prefix
                if name not in METRICS and name not in FIELDS_WITHOUT_METRIC:
                    own_metrics[name] = metric_named(name)
        return self.task.metrics + tuple(own_metrics.values())

    def best(self, metric: Metric) -> BestValidation | None:
        """Find the best of all validations and sets of weights by a metric; None if no validation has the metric.

        Of equal ones, that with the lower loss is returned, as for the best checkpoint of the run.
        """
        validations: list[BestValidation] = []
        for line in self.of("val"):
            for which in SETS:
                value = line.get(f"{which.prefix}{metric.name}")
                if value is not None:
                    validations.append(BestValidation(value, which, line))
        return max(validations, key=lambda validation: validation.rank(metric), default=None)

    def last(self, metric: Metric) -> dict[WeightSet, float]:
        """A metric in the last validation: set of weights -> value, without sets that have no value."""
        validations = self.of("val")
        if not validations:
            return {}
        values = {which: validations[-1].get(f"{which.prefix}{metric.name}") for which in SETS}
        return {which: value for which, value in values.items() if value is not None}

    def _counts_epochs(self, by_epoch: bool | None) -> bool:
        """Whether positions count epochs; `by_epoch` None: as the class's docstring explains."""
        return self.by_epoch if by_epoch is None else by_epoch

    @cached_property
    def _epoch_ends(self) -> Points:
        """(update, epoch) at the end of each epoch, after (0, 0); both numbers rise."""
        ends = [(0.0, 0.0)]
        for line in self.of("epoch"):
            last_update, last_epoch = ends[-1]
            # A resumed run may repeat an epoch; its lines are skipped.
            if line["update"] > last_update and line["epoch"] > last_epoch:
                ends.append((float(line["update"]), float(line["epoch"])))
        return ends

    @property
    def by_epoch(self) -> bool:
        """Whether the first epoch is complete, so that positions count epochs by default."""
        return len(self._epoch_ends) > 1

    def place(self, update: float, by_epoch: bool | None = None) -> float:
        """Return the position of an update on the axis of a curve.

        On an axis of epochs, the last update of epoch 3 is at 3.0. Other updates are interpolated between the ends of
        the epochs around them, or extrapolated from the last two ends.

        by_epoch: whether the axis counts epochs, not updates; None: it does once the first epoch is complete
        """
        if not self._counts_epochs(by_epoch):
            return float(update)
        ends = self._epoch_ends  # (update, epoch) of each end, after (0, 0)
        first_end_after = bisect_left(ends, (float(update), 0.0))
        after = min(max(first_end_after, 1), len(ends) - 1)
        update_before, epoch_before = ends[after - 1]
        update_after, epoch_after = ends[after]
        epochs = (update - update_before) * (epoch_after - epoch_before) / (update_after - update_before)
        return epoch_before + epochs

    def points(self, event: str, key: str, by_epoch: bool | None = None) -> Points:
        """The curve of a field, or performance metric, over the lines with this event that have a finite value."""
        points: Points = []
        for line in self.of(event):
            update = line.get("update")
            value = line.get(key, line.get("perf", {}).get(key))
            if update is not None and value is not None and math.isfinite(float(value)):
                points.append((self.place(update, by_epoch), float(value)))
        return points

    def trained(self, key: str, by_epoch: bool | None = None) -> Points:
        """The curve of a training metric: its means over epochs, which compare with validations.

        If positions count updates, it has the values of the reports instead.
        """
        event = "epoch" if self._counts_epochs(by_epoch) else "train"
        return self.points(event, key, by_epoch)

    def best_point(self, key: str, by: Metric, by_epoch: bool | None = None) -> Points:
        """The point of a metric in the validation that is best by the metric `by`: a list of one point, or empty."""
        best = self.best(by)
        if best is None:
            return []
        value = best.line.get(f"{best.which.prefix}{key}")
        return [] if value is None else [(self.place(best.line["update"], by_epoch), float(value))]

    def resumes(self, by_epoch: bool | None = None) -> list[float]:
        """Positions where the run was resumed."""
        return [self.place(line["update"], by_epoch) for line in self.of("run") if line.get("what") == "resume"]

    def skips(self, by_epoch: bool | None = None) -> Points:
        """List (position, loss scale) of each report with more skipped updates than the report before it.

        A report has the number of skipped updates since the run began.
        """
        points: Points = []
        skipped_before = 0
        reports = self.of("train")
        # A run that resumes another run, but in a new folder, continues that run's count. So its first report may count
        # updates that the other run skipped.
        if reports and self.lines[0].get("what") == "resume":
            skipped_before = reports[0].get("skipped") or 0
        for report in reports:
            skipped = report.get("skipped") or 0
            if skipped > skipped_before and report.get("scale"):
                points.append((self.place(report["update"], by_epoch), float(report["scale"])))
            if skipped > 0:  # A report may lack the number.
                skipped_before = skipped
        return points


def _perf(lines: Sequence[Line], event: str, metric: str) -> list[float]:
    """A performance metric in all lines with this event that have a value of it other than 0."""
    values = [line.get("perf", {}).get(metric) for line in lines if line.get("event") == event]
    return [value for value in values if value]
