"""The sets of weights that a run may keep, and their names in files, metrics, flags and words."""

from __future__ import annotations

from typing import NamedTuple


class WeightSet(NamedTuple):
    name: str
    """In -weights, and in meta.json's thresholds"""
    prefix: str
    """Of its metrics in metrics.jsonl and meta.json"""
    file: str
    """In a checkpoint"""
    label: str
    """In words for users"""


PLAIN = WeightSet("model", "", "model.safetensors", "plain")
AVERAGE = WeightSet("ema", "ema_", "ema.safetensors", "EMA")
SETS = (PLAIN, AVERAGE)
