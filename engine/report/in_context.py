"""A validation metric in context: how far chance may have moved it, and what guessing would reach."""

from __future__ import annotations

from typing import NamedTuple

from engine.measure.progress import Best
from utils.intervals import wilson
from utils.record.history import History
from utils.record.tasks import LOSS, TOP1, Metric, always_guessing, metric_named
from utils.text import counted

SAME = 1e-6
"""Percent within which two accuracies are equal"""


class Guess(NamedTuple):
    """Always guessing the largest class of the validation split."""

    name: str
    percent: float
    """Its top-1"""

    def against(self, top1: float | None) -> str:
        """'as good as' or 'worse than' it; '' for a better model, or where the top-1 is not known."""
        if top1 is None or not top1 <= self.percent + SAME:
            return ""
        return "worse than" if top1 < self.percent - SAME else "as good as"


def marks_of_best(guess: Guess | None, top1: float | None) -> tuple[str, ...]:
    """Words for the best epoch so far, the longest first. `top1`: of its better weights, in percent."""
    if guess is None or not (against := guess.against(top1)):
        return ("best",)
    sign = "<" if against == "worse than" else "="
    return f"best ({against} always guessing {guess.name})", f"best ({sign} guessing)"


def tied(best: Best, history: History) -> str:
    """One line for the end of a run in which SAVE_BEST_BY could not tell validations apart; otherwise ''."""
    metric = metric_named(best.by)
    validations = history.constant(metric)
    if validations < 2 or best.figure is None or best.stale != validations - 1:
        return ""
    other = history.task.best if metric == LOSS else LOSS
    return (
        f"{metric.words} was the same in all {validations} validations, so the first is kept as best; "
        f"SAVE_BEST_BY={other.name} judges by another metric"
    )


def in_context(metric: Metric, value: float | None, images: int, guess: Guess | None) -> str:
    """One line for the end of a run; '' if there is nothing to say."""
    parts = []
    if metric.counts_images and value is not None:
        interval = wilson(value, images).words()
        parts.append(f"{metric.words} {metric.number(value)} on {counted(images, 'image')}: 95 % interval {interval}")
    if guess is not None:
        against = guess.against(value) if metric == TOP1 else ""
        doubt = f": this model is {against} guessing" if against else ""
        parts.append(always_guessing(guess.percent) + doubt)
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}." if words else ""
