"""A resumed run keeps the defaults it began with, whatever they are by now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.families import FAMILIES
from utils.config.keys import default_of, nested, settings, value_of
from utils.config.read import Entry, read_files
from utils.config.schema import Config
from utils.config.write import one_line
from utils.errors import UserError
from utils.run_folder import run_of

FORMER: dict[str, Any] = {
    "TRAIN.OPTIMIZER.EPS": 1e-8,
    "TRAIN.OPTIMIZER.BETAS": (0.9, 0.999),
    "TRAIN.OPTIMIZER.MOMENTUM": 0.9,
}
"""Defaults of earlier versions that are others now."""
CLIPPED = "TRAIN.WARMUP_EPOCHS"
RESUME, OUTPUT = "MODEL.RESUME", "OUTPUT"


def kept_defaults(given: Mapping[str, Entry], defaults: Mapping[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    """Settings that were a default when the run that is resumed began, and have another one now; and a note of them.

    A setting that the run was given, and is not given now, is none of these: it goes back to its default.
    """
    found = _settings_of_run(*(given[key].value if key in given else None for key in (RESUME, OUTPUT)))
    if found is None:
        return {}, []
    saved, where = found
    kept: dict[str, Entry] = {}
    for key in settings():
        if key in given or value_of(saved, key) == (now := defaults.get(key, default_of(key))):
            continue
        for former in _formers(key, saved.MODEL.TYPE):
            if former != now and value_of(saved, key) in (former, _clipped(key, former, saved)):
                kept[key] = Entry(former, f"default of the run in {where}")
                break
    if not kept:
        return {}, []
    words = (f"{key} {one_line(kept[key].value)} ({one_line(defaults.get(key, default_of(key)))} now)" for key in kept)
    return kept, [f"The resumed run keeps its own defaults where today's are others: {', '.join(words)}"]


def _formers(key: str, family: str) -> list[Any]:
    """What the default of a key may have been: by its family, by the schema, or of an earlier version."""
    former = [FAMILIES.get(family, {}).get(key, default_of(key)), default_of(key)]
    return [*former, FORMER[key]] if key in FORMER else former


def _clipped(key: str, value: Any, saved: Config) -> Any:
    """As an earlier version saved it: a warm-up clipped to the run."""
    return min(value, float(saved.TRAIN.NUM_EPOCHS)) if key == CLIPPED else value


def _settings_of_run(resume: Any, output: Any) -> tuple[Config, Path] | None:
    """The settings saved with what -resume names, as far as they can be read: whoever loads it says what is wrong."""
    place = output if resume == "auto" else resume
    if not isinstance(place, str) or not place:
        return None
    path = Path(place).expanduser()
    meta = (path.parent if path.is_file() else path) / "meta.json"
    run = run_of(path)
    try:
        values = json.loads(meta.read_text(encoding="utf-8"))["settings"] if meta.is_file() else None
        if values is None and run is not None and (run / "config.yaml").is_file():
            values = {key: e.value for key, e in read_files(str(run / "config.yaml"))[-1].entries.items()}
        known = {key: value for key, value in (values or {}).items() if key in settings()}
        return (Config.model_validate(nested(known)), run or meta.parent) if known else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return None
