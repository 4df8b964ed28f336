"""Chooses between a checkpoint's plain weights and their EMA, by the validation metrics in its meta.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Which = Literal["model", "ema"]
Wanted = Literal["auto", "model", "ema"]
BOTH: tuple[Which, ...] = ("model", "ema")
PREFIX: dict[Which, str] = {"model": "", "ema": "ema_"}
"""Prefix of their metrics in metrics.jsonl and meta.json."""
NAMES = {"acc1": "top-1", "acc5": "top-5", "map": "mAP"}
"""Names of the metrics in percent that SAVE_BEST_BY can decide by."""
LABELS: dict[Which, str] = {"model": "plain", "ema": "EMA"}


@dataclass(frozen=True)
class Choice:
    which: Which
    words: str
    """Text for the log: "plain weights, top-1 95.00 %; EMA: 92.50 %"."""


def best_prefix(metrics: Mapping[str, Any], by: str) -> str | None:
    """The prefix of the better weights, '' or 'ema_'; '' if they are equal, None without a metric."""
    values: list[tuple[str, Any]] = [(prefix, metrics.get(f"{prefix}{by}")) for prefix in PREFIX.values()]
    scores = {prefix: float(-value if by == "loss" else value) for prefix, value in values if _is_number(value)}
    return max(scores, key=lambda prefix: scores[prefix]) if scores else None


def choose_weights(meta: Mapping[str, Any], available: Collection[Which], wanted: Wanted, reason: str = "") -> Choice:
    """Choose among the weights in the checkpoint, `available`, at least one. `reason`: why `wanted`, if not auto."""
    metrics, by = _metrics(meta), _deciding_metric(meta)
    which, why = _decide(meta, metrics, by, available) if wanted == "auto" else (wanted, reason)
    words = f"{LABELS[which]} weights" + (f" ({why})" if why else "")
    if PREFIX[which] + by in metrics:
        words += f", {metric_words(by, metrics[PREFIX[which] + by])}"
    other: Which = "model" if which == "ema" else "ema"
    if other in available and PREFIX[other] + by in metrics:
        words += f"; {LABELS[other]}: {metric_words(by, metrics[PREFIX[other] + by], named=False)}"
    return Choice(which, words)


def metric_words(by: str, value: float, named: bool = True) -> str:
    name, number = ("loss", f"{value:.4f}") if by == "loss" else (NAMES[by], f"{value:.2f} %")
    return f"{name} {number}" if named else number


def _decide(
    meta: Mapping[str, Any], metrics: Mapping[str, float], by: str, available: Collection[Which]
) -> tuple[Which, str]:
    """The better weights, and what was assumed if this checkpoint was not validated."""
    if len(available) == 1:
        return next(iter(available)), ""
    if (prefix := best_prefix(metrics, by)) is not None:
        return _with_prefix(prefix), ""
    best = meta.get("best")
    if isinstance(best, Mapping) and isinstance(best.get("kind"), str):
        which = _with_prefix("ema_" if best["kind"].startswith("ema_") else "")
        return (
            which,
            f"chosen without metrics of this update: the run's best validation was that of its {LABELS[which]} weights",
        )
    return "model", "by default: this checkpoint has no validation metrics"


def _with_prefix(prefix: str) -> Which:
    return "ema" if prefix else "model"


def _metrics(meta: Mapping[str, Any]) -> dict[str, float]:
    metrics = meta.get("metrics")
    return {key: value for key, value in metrics.items() if _is_number(value)} if isinstance(metrics, Mapping) else {}


def _deciding_metric(meta: Mapping[str, Any]) -> str:
    """The run's SAVE_BEST_BY; acc1 if it is missing or unknown."""
    by = meta.get("settings", {}).get("SAVE_BEST_BY")  # of a foreign meta.json too
    return by if by in ("loss", *NAMES) else "acc1"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
