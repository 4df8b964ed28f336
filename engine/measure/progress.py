"""How far a run is: where it stands, how much is left, and its best validation so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.measure.meters import Means
from utils.better_weights import best_prefix, metric_words
from utils.config import Config
from utils.log import log


@dataclass
class Position:
    """Where a run stands. `epoch` and `step` are those of the next update: epochs from 1, steps (done in it) from 0."""

    epoch: int = 1
    step: int = 0
    update: int = 0
    validated: int = 0
    """The update after which was validated last: a run may be stopped in the middle of a validation."""


def updates_left(config: Config, position: Position, per_epoch: int) -> int:
    """How many updates the plan still has. `update` alone does not say: epochs before may have had more or fewer."""
    planned = (config.TRAIN.NUM_EPOCHS - position.epoch + 1) * per_epoch - position.step
    limit = config.TRAIN.MAX_UPDATES
    return planned if limit is None else min(planned, limit - position.update)


@dataclass
class Best:
    """The best figure so far, what it is and of which weights, and for how many validations nothing was better."""

    figure: float | None = None
    kind: str = "acc1"
    """acc1, acc5 or loss; ema_acc1 and so on where the average had it."""
    update: int = 0
    epoch: int = 0
    stale: int = 0

    @property
    def by(self) -> str:
        return self.kind.removeprefix("ema_")

    def is_beaten_by(self, figure: float) -> bool:
        if self.figure is None:
            return math.isfinite(figure)
        return figure < self.figure if self.by == "loss" else figure > self.figure

    def words(self) -> str:
        if self.figure is None:
            return "no figure yet"
        average = "EMA " if self.kind.startswith("ema_") else ""
        return f"{average}{metric_words(self.by, self.figure)} (epoch {self.epoch})"

    def record(self) -> dict[str, Any] | None:
        """For meta.json: which weights were the best at which checkpoint."""
        if self.figure is None:
            return None
        return {"kind": self.kind, "figure": self.figure, "update": self.update, "epoch": self.epoch}


def best_by(figures: dict[str, Means], by: str, position: Position) -> Best:
    """The better of what a validation of the model and of its EMA gave."""
    prefix = best_prefix({f"{name}{by}": getattr(means, by) for name, means in figures.items()}, by) or ""
    return Best(getattr(figures[prefix], by), f"{prefix}{by}", position.update, position.epoch)


def start_of_best(best: Best, by: str) -> Best:
    """What a resumed run has to beat: nothing, where another figure decides now."""
    if best.by == by:
        return best
    if best.figure is not None:
        log.info("SAVE_BEST_BY is %s now: the best so far, %s, does not count.", by, best.words())
    return Best(kind=by)


def clock(seconds: float) -> str:
    """3725.4 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def seconds_of(text: str) -> float:
    """'01:30:00' -> 5400.0; the form was checked with the config."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds
