"""Settings of a measurement, as its results record them."""

from __future__ import annotations

from typing import Any

from utils.config import Config
from utils.config.keys import default_of, settings, value_of

PATHS = ("SAVE", "OUTPUT", "TAG", "DATA.CACHE", "DATA.DATA_PATH")
"""Settings that name places and do not change what is measured."""


def non_defaults(config: Config) -> dict[str, Any]:
    """Settings that differ from their defaults."""
    keys = [key for key in settings() if key not in PATHS]
    return {key: str(value_of(config, key)) for key in keys if value_of(config, key) != default_of(key)}
