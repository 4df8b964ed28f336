"""What is read of a run's saved settings: a resumed run keeps the values that its data and weights gave it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.keys import AUTO_BY_DATA, DATASET, EPOCHS, IMAGE_SIZE, WARMUP, absolute, nested, settings, value_of
from utils.config.kinds import AUTO, folded, is_no_value
from utils.config.read import Entry, read_files
from utils.config.schema import Config
from utils.errors import UserError
from utils.log import warn_once
from utils.record.run_folder import CONFIG, start_of
from vitamp.checkpoints import CHECKPOINTS, checkpoints_at, checkpoints_in, run_folder_of
from vitamp.meta import unchecked_meta

FROM_WEIGHTS = (
    *(IMAGE_SIZE, "DATA.CROP_PCT", "DATA.CROP_MODE", "DATA.INTERPOLATION"),
    *("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"),
    *("MODEL.EMBED_DIM", "MODEL.DEPTH", "MODEL.NUM_HEADS", "MODEL.MLP_RATIO", "MODEL.QKV_BIAS"),
    *("MODEL.PATCH_SIZE", "MODEL.STAGE_DEPTHS", "MODEL.WINDOW_SIZE", "MODEL.POOL", "MODEL.INIT_VALUES"),
)
"""Settings that a new run takes from its pretrained weights, and a resumed one from itself, if they are not set."""


def known_settings(saved: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The saved settings of a run that this version has; a run of an earlier version may have others."""
    if gone := [key for key in saved if key not in settings()]:
        warn_once(without_words(where, gone), logging.INFO)
    start = start_of(run_folder_of(where))
    return {key: absolute(key, value, start) for key, value in saved.items() if key in settings()}


def without_words(where: object, gone: Iterable[str]) -> str:
    """A line about a run's settings that this version does not have."""
    return f"{where} is of another version of vitamp; its settings that this version does not have: {', '.join(gone)}"


def resolved_by_run(given: Mapping[str, Entry], kept: Iterable[str] | None = ()) -> dict[str, Entry]:
    """The resumed run's data set, preprocessing and model, for settings that are open now.

    And its values of `kept`; None: of all other settings. The data may have grown by a class since, and the weights may
    be gone. Nothing, if the run's settings cannot be read, which loading reports later.
    """
    resume, output = (given[key].value if key in given else None for key in ("MODEL.RESUME", "OUTPUT"))
    name = output if resume == AUTO else resume
    if not isinstance(name, str) or not name:
        return {}
    path = Path(os.path.expanduser(name))
    if resume == AUTO and not checkpoints_in(path / CHECKPOINTS):  # it starts anew, perhaps from other weights
        return {}
    folder, run = path.parent if path.is_file() else path, run_folder_of(path)
    try:
        values = unchecked_meta(folder).get("settings")
        if values is None and run is not None and (run / CONFIG).is_file():
            values = {key: entry.value for key, entry in read_files(str(run / CONFIG))[-1].entries.items()}
        elif values is None:
            values = unchecked_meta(checkpoints_at(path)[-1]).get("settings")
        start = start_of(run)
        known = {key: absolute(key, value, start) for key, value in (values or {}).items() if key in settings()}
        saved = Config.model_validate(nested(known))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return {}
    keys = [key for key in (DATASET, *FROM_WEIGHTS) if key not in given or is_no_value(str(given[key].value))]
    keys += [key for key in AUTO_BY_DATA if key in given and folded(given[key].value) == AUTO]
    if EPOCHS in given and folded(given[EPOCHS].value) == AUTO:
        keys += (EPOCHS, WARMUP)
    keys += known.keys() - {"USE", *given} if kept is None else kept  # code needs consent
    values = {key: value_of(saved, key) for key in keys if known}
    found = values if kept is None else {key: value for key, value in values.items() if value != AUTO}
    return {key: Entry(value, f"run in {run or folder}") for key, value in found.items()}
