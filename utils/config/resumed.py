"""A resumed run keeps the defaults that it started with, and the values that its data and weights gave it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.families import of_type
from utils.config.keys import default_of, nested, settings, value_of
from utils.config.kinds import AUTO, folded
from utils.config.read import Entry, read_files
from utils.config.retired import without_retired
from utils.config.schema import Config
from utils.config.values import one_line
from utils.errors import UserError
from utils.record.meta import unchecked_meta
from utils.record.run_folder import CONFIG, run_folder_of

FORMER: dict[str, Any] = {
    "TRAIN.OPTIMIZER.EPS": 1e-8,
    "TRAIN.OPTIMIZER.BETAS": (0.9, 0.999),
    "TRAIN.OPTIMIZER.MOMENTUM": 0.9,
    "DATA.LABEL_SPLIT": "sets",
    "DATA.THRESHOLD_IMAGES": 1,
    "DATA.LAST_BATCH_WEIGHT": "full",
    "DATA.LISTING": 1,
    "DATA.BACKGROUND": "drop",
    "DIST.FSDP_NO_SYNC": True,
    "LOG_STYLE": "paddlevit",
}
"""Defaults of earlier versions that have changed since. A run that is older than a setting behaved like this, too."""
CLIPPED = "TRAIN.WARMUP_EPOCHS"
RESUME, OUTPUT, PRETRAINED, EVAL = "MODEL.RESUME", "OUTPUT", "MODEL.PRETRAINED", "EVAL"
DATASET, CLASSES = "DATA.DATASET", "MODEL.NUM_CLASSES"
IMAGE_SIZE, PATCH_SIZE = "DATA.IMAGE_SIZE", "MODEL.PATCH_SIZE"
AUTO_BY_DATA = (CLASSES, IMAGE_SIZE, PATCH_SIZE)
"""Settings for which engine/resolve.py replaces `auto` by a number, mostly from the data."""
FROM_WEIGHTS = (
    *(IMAGE_SIZE, "DATA.CROP_PCT", "DATA.CROP_MODE", "DATA.INTERPOLATION"),
    *("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"),
)
"""Settings that a new run takes from its pretrained weights if they are not set; see engine/resolve.py."""


def read_saved(values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The saved settings of a run in today's terms: without retired ones, with former defaults for newer ones."""
    return {**FORMER, **without_retired(values, where)}


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


def former_defaults(given: Mapping[str, Entry], defaults: Mapping[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    """The resumed run's settings that were defaults when it started and are not now, and a note for the log.

    A setting that the run was given then, and is not given now, is not among them: it gets its default. An evaluation
    of a run's weights (-eval -pretrained) takes the settings of FORMER alone: for others, the run need not be its own.
    """
    loaded, keys = _resumed_settings(given), settings()
    if loaded is None and EVAL in given and folded(str(given[EVAL].value)) == "true" and PRETRAINED in given:
        loaded, keys = _settings_of_run(given[PRETRAINED].value, None), FORMER
    if loaded is None:
        return {}, []
    saved, where = loaded
    kept: dict[str, Entry] = {}
    for key in keys:
        if key in given or value_of(saved, key) == (now := defaults.get(key, default_of(key))):
            continue
        for former in _possible_defaults(key, saved.MODEL.TYPE):
            if former != now and value_of(saved, key) in (former, _clipped(key, former, saved)):
                kept[key] = Entry(former, f"default of the run in {where}")
                break
    if not kept:
        return {}, []
    words = (f"{key} {one_line(kept[key].value)} ({one_line(defaults.get(key, default_of(key)))} now)" for key in kept)
    return kept, [f"The run keeps the defaults it started with, although they have changed since: {', '.join(words)}"]


def _possible_defaults(key: str, family: str) -> list[Any]:
    """The defaults that a key may have had: its family's, the schema's, an earlier version's."""
    defaults = [(of_type(family) or {}).get(key, default_of(key)), default_of(key)]
    return [*defaults, FORMER[key]] if key in FORMER else defaults


def _clipped(key: str, value: Any, saved: Config) -> Any:
    """The value as an earlier version saved it, with the warm-up clipped to the length of the run."""
    return min(value, float(saved.TRAIN.NUM_EPOCHS)) if key == CLIPPED else value


def _resumed_settings(given: Mapping[str, Entry]) -> tuple[Config, Path] | None:
    return _settings_of_run(*(given[key].value if key in given else None for key in (RESUME, OUTPUT)))


def _settings_of_run(resume: Any, output: Any) -> tuple[Config, Path] | None:
    """The settings saved in the run of -resume, and where; None if they cannot be read, which loading reports later."""
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
        return (Config.model_validate(nested({**FORMER, **known})), run or folder) if known else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return None
