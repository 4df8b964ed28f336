"""Position of a run, updates left, and the best validation so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.task.base import Metrics
from utils.config import Config
from utils.log import log
from vitamp.metrics import ONE_LABEL, PLAIN, WeightSet, best_set, metric_named, set_of


@dataclass
class Position:
    """Position of a run between two updates."""

    epoch: int = 1
    """Epoch of the next update, from 1."""
    step: int = 0
    """Updates done in this epoch."""
    update: int = 0
    """Updates done in the run."""
    validated: int = 0
    """Value of `update` at the last complete validation: a run may be stopped during one."""


def updates_left(config: Config, position: Position, per_epoch: int) -> int:
    """Number of updates left. `update` alone is not enough: earlier epochs may have had more or fewer updates."""
    planned = (config.TRAIN.NUM_EPOCHS - position.epoch + 1) * per_epoch - position.step
    limit = config.TRAIN.MAX_UPDATES
    return planned if limit is None else min(planned, limit - position.update)


@dataclass
class Best:
    """The best validation so far."""

    figure: float | None = None
    """Value of the metric."""
    kind: str = ONE_LABEL.best.name
    """Value of SAVE_BEST_BY, with the prefix of the better weights."""
    update: int = 0
    epoch: int = 0
    stale: int = 0
    """Validations since then without improvement."""

    @property
    def by(self) -> str:
        return set_of(self.kind)[1]

    def is_beaten_by(self, figure: float) -> bool:
        if self.figure is None:
            return math.isfinite(figure)
        return figure > self.figure if metric_named(self.by).higher else figure < self.figure

    def words(self) -> str:
        if self.figure is None:
            return "no validation yet"
        which, by = set_of(self.kind)
        metric = metric_named(by)
        return f"{which.marked(metric.words)} {metric.number(self.figure)} (epoch {self.epoch})"

    def record(self) -> dict[str, Any] | None:
        """Entry for meta.json."""
        if self.figure is None:
            return None
        return {"kind": self.kind, "figure": self.figure, "update": self.update, "epoch": self.epoch}


def best_of_validation(figures: Mapping[WeightSet, Metrics], by: str, position: Position) -> Best:
    """The best weights of one validation."""
    values = {which: means.value(by) for which, means in figures.items()}
    which = best_set(values, metric_named(by)) or PLAIN
    return Best(values[which], f"{which.prefix}{by}", position.update, position.epoch)


def resumed_best(best: Best, by: str) -> Best:
    """Best validation of the resumed run; none if SAVE_BEST_BY has changed."""
    if best.by == by:
        return best
    if best.figure is not None:
        log.info("SAVE_BEST_BY is now %s: the best so far, %s, is ignored.", by, best.words())
    return Best(kind=by)


def clock(seconds: float) -> str:
    """Format seconds: 3725.4 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def seconds_of(text: str) -> float:
    """Parse hours, minutes and seconds: '01:30:00' -> 5400.0. The config has checked the format."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds
