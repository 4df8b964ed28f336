"""Figure of three or more runs: the metric of each contender with its interval, and its runs as dots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.common.comparison.judged import Judged
from tools.common.comparison.of_runs import Contenders, contenders_of
from tools.common.comparison.verdict import interval, unit
from tools.common.report_page.charts import Style, labelled, round_numbers
from utils.intervals import Interval, wilson

LEAST_RUNS = 3
"""Runs of each contender, from which on their spread gives the interval"""


class Dot(NamedTuple):
    x: float
    title: str


class Row(NamedTuple):
    """One contender. Positions are percent of the figure's width."""

    name: str
    text: str
    """Its metric"""
    mean: float
    band: tuple[float, float] | None
    """Start and width of its interval"""
    dots: list[Dot]
    best: bool
    hue: str
    """Colour of its runs in the curves, as a CSS class"""


@dataclass(frozen=True)
class Figure:
    heading: str
    caption: str
    rows: list[Row]
    ticks: list[tuple[float, str]]


class _Contender(NamedTuple):
    name: str
    values: dict[str, float]
    """By seed or fold"""
    at: Interval | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())


def figure_of(folders: Sequence[Path], styles: Sequence[Style]) -> Figure | None:
    """`styles`: of each run. None where the runs cannot be compared, or only two can."""
    found = contenders_of(folders)
    if isinstance(found, str) or sum(map(len, found.runs.values())) < LEAST_RUNS:
        return None
    rows, kind = _contenders(found)
    if len(rows) < 2:
        return None
    judged, hues = found.judged, {folder: style.hue for folder, style in zip(folders, styles, strict=True)}
    ends = [end for row in rows for end in (*row.values.values(), *(row.at or ()))]
    margin = (max(ends) - min(ends)) * 0.04 or 0.5
    low, high = min(ends) - margin, max(ends) + margin

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    best = (max if judged.metric.higher else min)(rows, key=lambda row: row.mean)
    drawn = [
        Row(
            row.name,
            _text(row, judged),
            place(row.mean),
            (place(row.at.low), round(place(row.at.high) - place(row.at.low), 2)) if row.at else None,
            [Dot(place(value), f"{which}: {judged.metric.number(value)}") for which, value in row.values.items()],
            row is best,
            Style(hues[found.folders[row.name]]).css,
        )
        for row in rows
    ]
    every = [metrics for runs in found.runs.values() for metrics in runs.values()]
    caption = f"Dots: {unit(every)}s, after the last epoch{judged.whose}. {kind}".strip()
    ticks = [(place(tick), text) for tick, text in labelled(round_numbers(low, high, 5))]
    heading = f"{judged.words[0].upper()}{judged.words[1:]} of each setting{' (%)' if judged.metric.percent else ''}"
    return Figure(heading, caption, drawn, ticks)


def _contenders(found: Contenders) -> tuple[list[_Contender], str]:
    """Contenders that have a value, and the kind of their intervals in words."""
    judged, rows = found.judged, []
    every = [metrics for runs in found.runs.values() for metrics in runs.values()]
    by = unit(every)
    measured = {
        name: {f"{by} {number}": judged.of(run) for number, run in found.runs[name].items()} for name in found.names
    }
    values = {
        name: known
        for name, of_runs in measured.items()
        if (known := {which: value for which, value in of_runs.items() if value is not None})
    }
    by_runs = all(len(of_runs) >= LEAST_RUNS for of_runs in values.values())
    images = next((row["validation_images"] for row in every if row.get("validation_images")), None)
    by_images = not by_runs and judged.metric.counts_images and bool(images)
    for name, of_runs in values.items():
        at = None
        if by_runs:
            at = _of_runs(list(of_runs.values()), judged)
        elif by_images and images:
            at = wilson(statistics.fmean(of_runs.values()), images)
        rows.append(_Contender(name, of_runs, at))
    if by_runs:
        return rows, f"Lines: mean and its 95 % interval over the {by}s."
    if by_images:
        return rows, f"Lines: mean, and 95 % interval of one run on {images:,} images."
    return rows, "Lines: mean."


def _of_runs(values: list[float], judged: Judged) -> Interval:
    """Student's interval of the mean."""
    found = interval(values, 1)
    low, high = found.low or 0.0, found.high or 0.0
    return Interval(max(low, 0.0), min(high, 100.0)) if judged.metric.percent else Interval(low, high)


def _text(row: _Contender, judged: Judged) -> str:
    spread = statistics.stdev(row.values.values()) if len(row.values) > 1 else None
    mean = judged.metric.number_in_table(row.mean)
    return mean if spread is None else f"{mean} ± {judged.metric.number_in_table(spread)}"
