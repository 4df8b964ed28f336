"""Which of a checkpoint's weights to use: the plain ones or their EMA, by the validation recorded in its meta.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Which = Literal["model", "ema"]
Wanted = Literal["auto", "model", "ema"]
BOTH: tuple[Which, ...] = ("model", "ema")
PREFIX: dict[Which, str] = {"model": "", "ema": "ema_"}
"""Of the metrics, as metrics.jsonl and meta.json name them."""
SHORT: dict[Which, str] = {"model": "plain", "ema": "EMA"}


@dataclass(frozen=True)
class Choice:
    which: Which
    words: str
    """For the log: "plain weights, top-1 95.00 %; EMA: 92.50 %"."""


def best_prefix(metrics: Mapping[str, Any], by: str) -> str | None:
    """The prefix of the better weights, '' or 'ema_'; None without a metric. Equal ones: plain."""
    known: list[tuple[str, Any]] = [(prefix, metrics.get(f"{prefix}{by}")) for prefix in PREFIX.values()]
    scores = {prefix: float(-value if by == "loss" else value) for prefix, value in known if _is_number(value)}
    return max(scores, key=lambda prefix: scores[prefix]) if scores else None


def choose_weights(meta: Mapping[str, Any], there: Collection[Which], wanted: Wanted, reason: str = "") -> Choice:
    """`there`: the weights that the checkpoint has, at least one. `reason`: what `wanted` follows from, if not auto."""
    metrics, by = _metrics(meta), _by(meta)
    which, why = _decide(meta, metrics, by, there) if wanted == "auto" else (wanted, reason)
    words = f"{SHORT[which]} weights" + (f" ({why})" if why else "")
    if PREFIX[which] + by in metrics:
        words += f", {metric_words(by, metrics[PREFIX[which] + by])}"
    other: Which = "model" if which == "ema" else "ema"
    if other in there and PREFIX[other] + by in metrics:
        words += f"; {SHORT[other]}: {metric_words(by, metrics[PREFIX[other] + by], named=False)}"
    return Choice(which, words)


def metric_words(by: str, value: float, named: bool = True) -> str:
    name, number = ("loss", f"{value:.4f}") if by == "loss" else (f"top-{by[3:]}", f"{value:.2f} %")
    return f"{name} {number}" if named else number


def _decide(
    meta: Mapping[str, Any], metrics: Mapping[str, float], by: str, there: Collection[Which]
) -> tuple[Which, str]:
    """The better weights, and what this assumes where it was not measured."""
    if len(there) == 1:
        return next(iter(there)), ""
    if (prefix := best_prefix(metrics, by)) is not None:
        return _of_prefix(prefix), ""
    best = meta.get("best")
    if isinstance(best, Mapping) and isinstance(best.get("kind"), str):
        which = _of_prefix("ema_" if best["kind"].startswith("ema_") else "")
        return which, f"assumed: not validated at this update; the run's best were its {SHORT[which]} weights"
    return "model", "assumed: this checkpoint has no validation metrics"


def _of_prefix(prefix: str) -> Which:
    return "ema" if prefix else "model"


def _metrics(meta: Mapping[str, Any]) -> dict[str, float]:
    found = meta.get("metrics")
    return {key: value for key, value in found.items() if _is_number(value)} if isinstance(found, Mapping) else {}


def _by(meta: Mapping[str, Any]) -> str:
    """The metric that decides: SAVE_BEST_BY of the run, which older checkpoints keep in their settings or nowhere."""
    settings = meta.get("settings")
    by = settings.get("SAVE_BEST_BY") if isinstance(settings, Mapping) else None
    return by if by in ("acc1", "acc5", "loss") else "acc1"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
