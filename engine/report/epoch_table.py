"""Table of epochs on the terminal: its columns, as many as fit, and its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.measure.bottleneck import shown_rate
from engine.measure.progress import clock
from engine.task.base import Metrics
from utils.config import Config
from utils.record.tasks import KNN, LOSS, MACRO_F1, TOP5, Metric, metric_named
from utils.record.weight_sets import AVERAGE, PLAIN, WeightSet
from utils.terminal import Looks

GAP = "  "
BOLD, GREEN = "1", "1;32"
NOTHING = "-"


class Column(NamedTuple):
    name: str
    """Key of its cells, and its heading"""
    width: int
    rank: int
    """Where columns do not fit, those with the largest rank are left out"""

    @property
    def space(self) -> int:
        return max(self.width, len(self.name))


@dataclass
class Row:
    """Metrics of an epoch, or of its part before a validation."""

    place: str
    seconds: float = 0.0
    train_loss: float | None = None
    lr: float | None = None
    images_per_second: float | None = None
    skipped: int = 0
    """Updates in the epoch"""
    metrics: Mapping[WeightSet, Metrics] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    """Of the best epoch so far: words for it, the longest first. None is shown if none fits."""


class EpochTable:
    def __init__(self, config: Config, looks: Looks) -> None:
        self._looks = looks
        within = config.VALIDATE_EVERY_UPDATES is not None or config.TRAIN.MAX_UPDATES is not None
        self._shown = _shown_metrics(config)
        self._columns = [
            Column("epoch", len(f"{config.TRAIN.NUM_EPOCHS}") * 2 + 1 + 3 * within, 0),
            Column("time", 7, 6),
            Column("train loss", 7, 4),
            Column("val loss", 7, 3),
            *(Column(_heading(which, metric), 6, rank) for (which, metric), rank in self._shown.items()),
            Column("lr", 8, 8),
            Column("images/s", 7, 7),
        ]

    def columns(self, width: int) -> tuple[Column, ...]:
        """Those that fit into a line of so many characters."""
        chosen, room = list(self._columns), width - len(GAP + "best")
        while len(chosen) > 2 and sum(column.space + len(GAP) for column in chosen) - len(GAP) > room:
            chosen.remove(max(chosen, key=lambda column: column.rank))
        return tuple(chosen)

    def header(self, columns: tuple[Column, ...]) -> str:
        return self._looks.coloured(GAP.join(column.name.rjust(column.space) for column in columns), BOLD)

    def row(self, row: Row, columns: tuple[Column, ...], width: int) -> str:
        cells = self._cells(row)
        text = GAP.join(cells[column.name].rjust(column.space) for column in columns)
        room, skipped = width - len(text) - len(GAP), f"{row.skipped:,} skipped" if row.skipped else ""
        mark = next((mark for mark in row.marks if len(mark) <= room), "")
        if mark and skipped and len(f"{mark}, {skipped}") > room:
            skipped = ""
        notes = [self._looks.coloured(mark, GREEN) if mark == "best" else mark, skipped]
        notes = [note for note in notes if note]
        return f"{text}{GAP}{', '.join(notes)}" if notes else text

    def _cells(self, row: Row) -> dict[str, str]:
        plain = row.metrics.get(PLAIN)
        cells = {
            "epoch": row.place,
            "time": clock(row.seconds),
            "train loss": number_of(LOSS, row.train_loss),
            "val loss": number_of(LOSS, plain and plain.loss),
            "lr": NOTHING if row.lr is None else f"{row.lr:.2e}",
            "images/s": NOTHING if row.images_per_second is None else shown_rate(row.images_per_second),
        }
        for which, metric in self._shown:
            means = row.metrics.get(which)
            cells[_heading(which, metric)] = number_of(metric, means and means.value(metric.name))
        return cells


def _shown_metrics(config: Config) -> dict[tuple[WeightSet, Metric], int]:
    """Validation metrics of the table, with the ranks of their columns."""
    main = config.task.best
    by = metric_named(config.SAVE_BEST_BY)
    shown = {(PLAIN, main): 1}
    if by not in (main, LOSS):
        shown[PLAIN, by] = 2
    for metric in (KNN,) * config.measures_knn + tuple(map(metric_named, config.VALIDATE_METRICS)):
        shown[PLAIN, metric] = 2
    if config.TRAIN.MODEL_EMA:
        shown[AVERAGE, main if by == LOSS else by] = 2
    if TOP5 in config.task.metrics and by != TOP5 and (config.MODEL.NUM_CLASSES or 0) > 10:
        shown[PLAIN, TOP5] = 9
    if MACRO_F1 in config.task.metrics and by != MACRO_F1:
        shown[PLAIN, MACRO_F1] = 10
    return shown


def _heading(which: WeightSet, metric: Metric) -> str:
    return f"{which.marked(metric.words)} %" if metric.percent else which.marked(metric.words)


def number_of(metric: Metric, value: float | None) -> str:
    return NOTHING if value is None or math.isnan(value) else metric.number_in_table(value)
