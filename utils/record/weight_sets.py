"""The sets of weights that a run may keep, and their names in files, metrics, flags and words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.record.tasks import Metric


class WeightSet(NamedTuple):
    name: str
    """In -weights, and in meta.json's thresholds"""
    prefix: str
    """Of its metrics in metrics.jsonl and meta.json"""
    file: str
    """In a checkpoint"""
    label: str
    """In words for users"""
    words: str
    """The same as a noun"""
    setting: str = ""
    """Setting that makes a run keep it; none for the plain weights, which every run keeps"""

    @property
    def mark(self) -> str:
        """The label where plain weights need none, as in a chart's legend."""
        return self.label if self.prefix else ""

    def marked(self, what: str) -> str:
        """For example 'EMA top-1', and 'top-1' of the plain weights."""
        return f"{self.mark} {what}".lstrip()

    @property
    def described(self) -> str:
        return f"{self.label} ({self.setting})" if self.setting else self.label


PLAIN = WeightSet("model", "", "model.safetensors", "plain", "the model's weights")
AVERAGE = WeightSet("ema", "ema_", "ema.safetensors", "EMA", "the EMA", "TRAIN.MODEL_EMA")
SETS = (PLAIN, AVERAGE)
BETTER = "auto"
"""In -weights: the set that validated better"""
CHOICES = (BETTER, *(which.name for which in SETS))
"""Values of -weights"""
CHOICES_IN_WORDS = ", ".join(
    (f"{BETTER} (whichever validated better)", *(f"{which.name} ({which.label} weights)" for which in SETS))
)


def set_named(name: str) -> WeightSet:
    return next(which for which in SETS if which.name == name)


def set_of(metric: str) -> tuple[WeightSet, str]:
    """'ema_acc1' -> the EMA, 'acc1'."""
    which = next((one for one in SETS if one.prefix and metric.startswith(one.prefix)), PLAIN)
    return which, metric.removeprefix(which.prefix)


def best_set(values: Mapping[WeightSet, Any], by: Metric) -> WeightSet | None:
    """The better weights by their values of the metric `by`; the first if they are equal, None without a value."""
    scores = {which: float(value if by.higher else -value) for which, value in values.items() if is_number(value)}
    return max(scores, key=lambda which: scores[which]) if scores else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
