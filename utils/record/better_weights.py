"""Chooses among a checkpoint's sets of weights, by the validation metrics in its meta.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from utils.record.tasks import METRICS, ONE_LABEL, BestBy, Metric
from utils.record.weight_sets import BETTER, PLAIN, SETS, WeightSet, set_named, set_of


@dataclass(frozen=True)
class Choice:
    which: WeightSet
    words: str
    """Text for the log: "plain weights, top-1 95.00 %; EMA: 92.50 %"."""


def best_set(values: Mapping[WeightSet, Any], by: Metric) -> WeightSet | None:
    """The better weights by their values of the metric `by`; the first if they are equal, None without a value."""
    scores = {which: float(value if by.higher else -value) for which, value in values.items() if _is_number(value)}
    return max(scores, key=lambda which: scores[which]) if scores else None


def choose_weights(meta: Mapping[str, Any], available: Collection[WeightSet], wanted: str, reason: str = "") -> Choice:
    """Choose among the weights in the checkpoint, `available`, at least one.

    `wanted`: a value of -weights. `reason`: why, if not auto.
    """
    metrics, by = _metrics(meta), _deciding_metric(meta)
    values = {which: metrics[which.prefix + by.name] for which in SETS if which.prefix + by.name in metrics}
    which, why = _decide(meta, values, by, available) if wanted == BETTER else (set_named(wanted), reason)
    words = f"{which.label} weights" + (f" ({why})" if why else "")
    if which in values:
        words += f", {by.words} {by.number(values[which])}"
    for other, value in values.items():
        if other != which and other in available:
            words += f"; {other.label}: {by.number(value)}"
    return Choice(which, words)


def _decide(
    meta: Mapping[str, Any], values: Mapping[WeightSet, float], by: Metric, available: Collection[WeightSet]
) -> tuple[WeightSet, str]:
    """The better weights, and what was assumed if this checkpoint was not validated."""
    if len(available) == 1:
        return next(iter(available)), ""
    if (better := best_set(values, by)) is not None:
        return better, ""
    best = meta.get("best")
    if isinstance(best, Mapping) and isinstance(best.get("kind"), str):
        which, _ = set_of(best["kind"])
        return (
            which,
            f"chosen without metrics of this update: the run's best validation was that of its {which.label} weights",
        )
    return PLAIN, "by default: this checkpoint has no validation metrics"


def _metrics(meta: Mapping[str, Any]) -> dict[str, float]:
    metrics = meta.get("metrics")
    return {key: value for key, value in metrics.items() if _is_number(value)} if isinstance(metrics, Mapping) else {}


def _deciding_metric(meta: Mapping[str, Any]) -> Metric:
    """The run's SAVE_BEST_BY; its default if it is missing or unknown."""
    by = meta.get("settings", {}).get("SAVE_BEST_BY")  # of a foreign meta.json too
    return METRICS[by] if by in get_args(BestBy) else ONE_LABEL.best


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
