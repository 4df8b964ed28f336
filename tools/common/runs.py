"""Metrics of a run, computed from its metrics.jsonl, however often the run was resumed."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from utils.line_file import parse_json_lines, read_json_lines
from utils.record.tasks import Metric
from utils.record.weight_sets import SETS

TAIL = 2**16
"""Bytes at the end of the file that hold at least one whole line."""
Lines = list[dict[str, Any]]


def read_lines(folder: Path) -> Lines:
    return read_json_lines(folder / "metrics.jsonl")


def last_line(folder: Path) -> dict[str, Any]:
    """The last whole line, without reading a long file; empty if there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    return next(reversed(parse_json_lines(tail)), {})


def is_end(line: dict[str, Any]) -> bool:
    """Whether a line says that the run finished."""
    return line.get("event") == "run" and line.get("what") == "end"


def is_start(line: dict[str, Any]) -> bool:
    return line.get("event") == "run" and line.get("what") in ("start", "resume")


@dataclass(frozen=True)
class BestMetric:
    """The best validation by one metric."""

    percent: float
    epoch: int
    weights: str
    """The mark of the better ones."""


@dataclass(frozen=True)
class RunMetrics:
    """Speed, memory, time and accuracy of a run."""

    lines: Lines

    def of(self, event: str) -> Lines:
        return [line for line in self.lines if line.get("event") == event]

    @cached_property
    def starts(self) -> list[Lines]:
        """The lines since each start or resume; each has a clock of its own."""
        starts: list[Lines] = [[]]
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
        return [value for lines in self.starts for value in _perf(lines, event, metric)[1:]]

    @property
    def peak_memory_gb(self) -> float | None:
        return max(_perf(self.lines, "train", "peak_memory_gb"), default=None)

    @property
    def seconds(self) -> float:
        """Training time: from each start to its last line with a time, added up."""
        return sum(
            max([*_perf(lines, "train", "seconds"), *_perf(lines, "run", "seconds")], default=0.0)
            for lines in self.starts
        )

    def best(self, metric: Metric) -> BestMetric | None:
        """Best of all validations, of any of the weights, as the run itself computes it. `metric`: in percent."""
        validations = [
            BestMetric(line[f"{which.prefix}{metric.name}"], line["epoch"], which.mark)
            for line in self.of("val")
            for which in SETS
            if line.get(f"{which.prefix}{metric.name}") is not None
        ]
        return max(validations, key=lambda best: best.percent, default=None)

    def last(self, metric: Metric) -> float | None:
        """Of the plain weights in the last validation."""
        validations = self.of("val")
        return validations[-1][metric.name] if validations else None

    @property
    def skipped(self) -> int:
        """Updates skipped by loss scaling."""
        reports = self.of("train")
        return reports[-1]["skipped"] if reports else 0


def _perf(lines: Lines, event: str, metric: str) -> list[float]:
    """A metric in all lines of a kind that have it."""
    values = [line.get("perf", {}).get(metric) for line in lines if line.get("event") == event]
    return [value for value in values if value]
