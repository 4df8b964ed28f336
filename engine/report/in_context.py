"""A validation metric in context: how far chance may have moved it, and what guessing would reach."""

from __future__ import annotations

from utils.intervals import wilson
from utils.record.tasks import Metric, always_guessing
from utils.text import counted


def in_context(metric: Metric, value: float | None, images: int, largest_class: float | None) -> str:
    """One line for the end of a run; '' if there is nothing to say. `largest_class`: its share in percent."""
    parts = []
    if metric.counts_images and value is not None:
        interval = wilson(value, images).words()
        parts.append(f"{metric.words} {metric.number(value)} on {counted(images, 'image')}: 95 % interval {interval}")
    if largest_class is not None:
        parts.append(always_guessing(largest_class))
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}." if words else ""
