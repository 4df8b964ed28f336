"""What is read of a run's saved settings: a resumed run keeps the values that its data and weights gave it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.keys import OWN_SETTINGS, nested, settings, value_of
from utils.config.kinds import AUTO, folded
from utils.config.read import Entry, read_files
from utils.config.schema import Config
from utils.errors import UserError
from utils.log import warn_once
from utils.record.run_folder import CONFIG
from vitamp.checkpoints import run_folder_of
from vitamp.meta import unchecked_meta

NEW = "SPEED"
"""A setting that every run has since version 0.3"""
RESUME, OUTPUT = "MODEL.RESUME", "OUTPUT"
DATASET, CLASSES = "DATA.DATASET", "MODEL.NUM_CLASSES"
IMAGE_SIZE, PATCH_SIZE = "DATA.IMAGE_SIZE", "MODEL.PATCH_SIZE"
AUTO_BY_DATA = (CLASSES, IMAGE_SIZE, PATCH_SIZE)
"""Settings for which engine/preflight.py replaces `auto` by a number, mostly from the data."""
FROM_WEIGHTS = (
    *(IMAGE_SIZE, "DATA.CROP_PCT", "DATA.CROP_MODE", "DATA.INTERPOLATION"),
    *("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"),
)
"""Settings that a new run takes from its pretrained weights if they are not set; see engine/preflight.py."""


def known_settings(saved: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The saved settings of a run that this version has; a run of an earlier version may have others."""
    if former := saved.get(OWN_SETTINGS):
        saved = {**saved, "USE": [*saved.get("USE", ()), *former]}
    gone = [key for key in saved if key not in settings() and key != OWN_SETTINGS]
    if gone:
        warn_once(without_words(where, gone), logging.INFO)
    return {key: value for key, value in saved.items() if key in settings()}


def without_words(where: object, gone: Iterable[str]) -> str:
    """A line about a run's settings that this version does not have."""
    return f"{where} is of another version of vitamp; its settings that this version does not have: {', '.join(gone)}"


def is_of_earlier_version(saved: Mapping[str, Any]) -> bool:
    """Whether a run's settings are those of a version before 0.3, which may have split the images otherwise."""
    return NEW not in saved


def resolved_by_run(given: Mapping[str, Entry]) -> dict[str, Entry]:
    """The values that the resumed run got from its data and weights, for settings that would look them up now.

    The data may have grown by a class since, and the weights may be gone.
    """
    loaded = _resumed_settings(given)
    if loaded is None:
        return {}
    saved, where = loaded
    keys = [key for key in (DATASET, *(FROM_WEIGHTS if saved.MODEL.PRETRAINED else ())) if key not in given]
    keys += [key for key in AUTO_BY_DATA if key in given and folded(given[key].value) == AUTO]
    values = {key: value_of(saved, key) for key in keys}
    return {key: Entry(value, f"run in {where}") for key, value in values.items() if value != AUTO}


def _resumed_settings(given: Mapping[str, Entry]) -> tuple[Config, Path] | None:
    """The settings saved in the run of -resume, and where; None if they cannot be read, which loading reports later."""
    resume, output = (given[key].value if key in given else None for key in (RESUME, OUTPUT))
    name = output if resume == AUTO else resume
    if not isinstance(name, str) or not name:
        return None
    path = Path(name).expanduser()
    folder = path.parent if path.is_file() else path
    run = run_folder_of(path)
    try:
        values = unchecked_meta(folder).get("settings")
        if values is None and run is not None and (run / CONFIG).is_file():
            values = {key: e.value for key, e in read_files(str(run / CONFIG))[-1].entries.items()}
        known = {key: value for key, value in (values or {}).items() if key in settings()}
        return (Config.model_validate(nested(known)), run or folder) if known else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return None
