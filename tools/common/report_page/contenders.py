"""Figure of three or more runs: the metric of each contender with its interval, and its runs as dots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.common.comparison.runs import contenders_of
from tools.common.comparison.verdict import Judged, interval, unit
from tools.common.report_page.charts import Style, labelled, round_numbers
from utils.intervals import Interval, wilson

LEAST_RUNS = 3
"""Runs of each contender, from which on their spread gives the interval"""


def figure_of(folders: Sequence[Path], styles: Sequence[Style]) -> dict[str, Any] | None:
    """What templates/contenders.html draws. Positions are percent of its width.

    `styles`: of each run. None where the runs cannot be compared, or only two can.
    """
    found = contenders_of(folders)
    if isinstance(found, str) or sum(map(len, found.runs.values())) < LEAST_RUNS:
        return None
    judged, hues = found.judged, {folder: style.hue for folder, style in zip(folders, styles, strict=True)}
    every = [metrics for runs in found.runs.values() for metrics in runs.values()]
    by = unit(every)
    values: dict[str, dict[str, float]] = {}  # of each contender by seed or fold, where they are known
    for name in found.names:
        of_runs = {f"{by} {number}": judged.of(run) for number, run in found.runs[name].items()}
        if known := {which: value for which, value in of_runs.items() if value is not None}:
            values[name] = known
    if len(values) < 2:
        return None
    means = {name: statistics.fmean(of_runs.values()) for name, of_runs in values.items()}
    images = next((row["validation_images"] for row in every if row.get("validation_images")), None)
    intervals: dict[str, Interval] = {}
    kind = "Lines: mean."
    if all(len(of_runs) >= LEAST_RUNS for of_runs in values.values()):
        kind = f"Lines: mean and its 95 % interval over the {by}s."
        intervals = {name: _of_runs(list(of_runs.values()), judged) for name, of_runs in values.items()}
    elif judged.metric.counts_images and images:
        kind = f"Lines: mean, and 95 % interval of one run on {images:,} images."
        intervals = {name: wilson(mean, images) for name, mean in means.items()}
    ends = [end for name, of_runs in values.items() for end in (*of_runs.values(), *intervals.get(name, ()))]
    margin = (max(ends) - min(ends)) * 0.04 or 0.5
    low, high = min(ends) - margin, max(ends) + margin

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    best = (max if judged.metric.higher else min)(means, key=lambda name: means[name])
    rows = []
    for name, of_runs in values.items():
        at, spread = intervals.get(name), list(of_runs.values())
        text = judged.metric.number_in_table(means[name])
        if len(spread) > 1:
            text += f" ± {judged.metric.number_in_table(statistics.stdev(spread))}"
        dots = [{"x": place(one), "title": f"{which}: {judged.metric.number(one)}"} for which, one in of_runs.items()]
        rows.append(
            {
                "name": name,
                "text": text,
                "mean": place(means[name]),
                "band": (place(at.low), round(place(at.high) - place(at.low), 2)) if at else None,
                "dots": dots,
                "best": name == best,
                "hue": Style(hues[found.folders[name]]).css,
            }
        )
    return {
        "heading": f"{judged.words[0].upper()}{judged.words[1:]} of each setting{' (%)' * judged.metric.percent}",
        "caption": f"Dots: {by}s, after the last epoch{judged.whose}. {kind}",
        "rows": rows,
        "ticks": [(place(tick), text) for tick, text in labelled(round_numbers(low, high, 5))],
    }


def _of_runs(values: list[float], judged: Judged) -> Interval:
    """Student's interval of the mean."""
    found = interval(values, 1)
    low, high = found.low or 0.0, found.high or 0.0
    return Interval(max(low, 0.0), min(high, 100.0)) if judged.metric.percent else Interval(low, high)
