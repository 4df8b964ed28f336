"""The settings of a measurement in words."""

from __future__ import annotations

from typing import Any

from utils.config import Config
from utils.config.keys import default_of, settings, value_of

PLACES = ("SAVE", "OUTPUT", "TAG", "DATA.CACHE", "DATA.DATA_PATH")
"""Settings that say where things lie, and nothing of what is measured."""


def told(config: Config) -> dict[str, Any]:
    """What tells these settings from the defaults."""
    keys = [key for key in settings() if key not in PLACES]
    return {key: str(value_of(config, key)) for key in keys if value_of(config, key) != default_of(key)}
