"""What -resume names, and what is read of a run's saved settings: it keeps those that its data and weights gave it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.keys import (
    AUTO_BY_DATA,
    DATASET,
    EPOCHS,
    IMAGE_SIZE,
    MEASURED,
    WARMUP,
    absolute,
    nested,
    settings,
    value_of,
)
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
    *MEASURED,
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


@dataclass(frozen=True)
class Resume:
    """What -resume names: a run, or a checkpoint; with `auto` the run in -output, which may not have begun."""

    place: Path
    auto: bool

    @property
    def folder(self) -> Path:
        return self.place.parent if self.place.is_file() else self.place

    @property
    def run(self) -> Path | None:
        """The run's folder; None for a checkpoint that is in none."""
        return self.place if self.auto else run_folder_of(self.place)

    @property
    def begins_anew(self) -> bool:
        return self.auto and not checkpoints_in(self.place / CHECKPOINTS)

    def saved_settings(self) -> Mapping[str, Any]:
        """Those of the checkpoint that is named, else of the run's config.yaml, else of its newest checkpoint."""
        values = unchecked_meta(self.folder).get("settings")
        if values is None and self.run is not None and (self.run / CONFIG).is_file():
            values = {key: entry.value for key, entry in read_files(str(self.run / CONFIG))[-1].entries.items()}
        elif values is None:
            values = unchecked_meta(checkpoints_at(self.place)[-1]).get("settings")
        start = start_of(self.run)
        return {key: absolute(key, value, start) for key, value in (values or {}).items()}


def resume_of(values: Mapping[str, Any]) -> Resume | None:
    """What settings by dotted key, checked or not, say to resume; None if nothing."""
    auto = values.get("MODEL.RESUME") == AUTO
    place = values.get("OUTPUT" if auto else "MODEL.RESUME")
    return Resume(Path(os.path.expanduser(place)), auto) if place and isinstance(place, str) else None


def resolved_by_run(given: Mapping[str, Entry], kept: Iterable[str] | None = ()) -> dict[str, Entry]:
    """The resumed run's data set, preprocessing and model, for settings that are open now.

    And its values of `kept`; None: of all other settings. The data may have grown by a class since, and the weights may
    be gone. Nothing, if the run's settings cannot be read, which loading reports later.
    """
    resume = resume_of({key: entry.value for key, entry in given.items()})
    if resume is None or resume.begins_anew:  # perhaps from other weights
        return {}
    try:
        known = {key: value for key, value in resume.saved_settings().items() if key in settings()}
        saved = Config.model_validate(nested(known))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return {}
    if not known:
        return {}
    texts = {key: str(entry.value) for key, entry in given.items()}
    keys = [key for key in (DATASET, *FROM_WEIGHTS) if is_no_value(texts.get(key, ""))]
    keys += [key for key in (*AUTO_BY_DATA, EPOCHS) if folded(texts.get(key)) == AUTO]
    if EPOCHS in keys:
        keys.append(WARMUP)
    if kept is None:
        keys += [key for key in known if key != "USE" and key not in given]  # code needs consent
    else:
        keys = [key for key in (*keys, *kept) if value_of(saved, key) != AUTO]
    return {key: Entry(value_of(saved, key), f"run in {resume.run or resume.folder}") for key in keys}
