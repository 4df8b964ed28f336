"""Writes a Config as YAML that loads back equal; shows sources, differences, and a hash of the settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from utils.config.keys import sections, settings, value_of
from utils.config.kinds import OneLine, one_line
from utils.config.schema import Config
from utils.passwords import redacted

if TYPE_CHECKING:
    from utils.config.load import Loaded


def to_yaml(config: Config) -> str:
    """The settings as YAML, section by section; loading it gives an equal Config."""
    return "".join(f"{line}\n" for line, _ in _lines(config))


def format_config(loaded: Loaded) -> str:
    """The settings as YAML with `# source` after each; the output of -print_config, without passwords of URLs."""
    lines = [(redacted(line), loaded.sources[key] if key else "") for line, key in _lines(loaded.config)]
    width = max(len(line) for line, source in lines if source and len(line) <= 60)
    return "".join(f"{line:<{width}}  # {source}\n" if source else f"{line}\n" for line, source in lines)


def _lines(config: Config) -> Iterator[tuple[str, str]]:
    """(line, its key; '' for a section's heading). Top-level settings come last, as in the schema."""
    shown: set[str] = set()
    for key in settings():
        *path, name = key.split(".")
        for depth in range(1, len(path) + 1):
            section = ".".join(path[:depth])
            if section in sections() and section not in shown:
                shown.add(section)
                yield "  " * (depth - 1) + path[depth - 1] + ":", ""
        pair = yaml.dump({name: value_of(config, key)}, Dumper=OneLine, width=float("inf"), allow_unicode=True)
        yield "  " * len(path) + pair.rstrip("\n"), key


def differences(old: Config, new: Config) -> list[str]:
    """'TRAIN.BASE_LR: 0.003 -> 0.001' for each setting that differs."""
    # -batch_size sets BATCH_SIZE_EVAL, too; null means the same.
    follows = all(config.DATA.BATCH_SIZE_EVAL in (None, config.DATA.BATCH_SIZE) for config in (old, new))
    keys = [key for key in settings() if not (follows and key == "DATA.BATCH_SIZE_EVAL")]
    pairs = ((key, value_of(old, key), value_of(new, key)) for key in keys)
    return [f"{key}: {one_line(one)} -> {one_line(other)}" for key, one, other in pairs if not _same(one, other)]


def _same(before: Any, after: Any) -> bool:
    """Whether two values are equal. A saved URL has no password."""
    return before == after or (isinstance(after, str) and redacted(after) == before)


def config_hash(config: Config) -> str:
    """SHA-256 of all settings: equal for equal settings, on every machine."""
    values = {key: value_of(config, key) for key in settings()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
