"""Short table at the end of a training on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.measure.bottleneck import Tally, shown_rate
from engine.measure.progress import Best, clock
from engine.task.base import Metrics
from utils.config import Config
from utils.record.tasks import LOSS, metric_named
from utils.record.weight_sets import PLAIN, WeightSet
from utils.terminal import Looks, terminal_width

BOLD = "1"
IN_FULL = ("copies", "run", "next")
"""Rows with something to be copied"""


def summary(
    config: Config,
    best: Best,
    doubts: tuple[str, str],
    last: Mapping[WeightSet, Metrics],
    seconds: float,
    tally: Tally,
    folder: Path,
    commands: Mapping[str, str],
    paused: bool,
    looks: Looks,
) -> str:
    """`doubts`: the best metric in context, and copies in its validation split. `last`: of the last validation.

    `tally`: of the training here.
    """
    by = {metric.name: metric for metric in (metric_named(best.by), config.task.best, LOSS)}
    metrics = [
        f"{which.marked(metric.words)} {metric.number(means.value(metric.name))}"
        for which, means in last.items()
        for metric in by.values()
        if which == PLAIN or metric.name == best.by
    ]
    first, *others = commands
    rows = [
        ("best", best.words() if best.figure is not None else ""),
        *(("", part) for part in doubts[0].removesuffix(".").split("; ")),
        ("copies", doubts[1]),
        ("last", ", ".join(metrics)),
        ("speed", f"{shown_rate(tally.images / tally.seconds)} images/s in training" if tally.images else ""),
        ("run", f"{folder}"),
        ("next", commands["resume" if paused else first]),
        ("", "" if paused else f"log.txt has the commands to {', '.join(others)}"),
    ]
    lines = [looks.coloured(f"{'Paused' if paused else 'Done'} after {clock(seconds)}", BOLD)]
    for name, words in rows:
        line = f"  {name:<6} {words}"
        if words:
            lines.append(line if name in IN_FULL else looks.shortened(line, terminal_width()))
    return "\n".join(["", *lines])
