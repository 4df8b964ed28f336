"""The sizes of the model and the preprocessing that pretrained weights were trained with.

Their run says both; their file, their timm name or timm's description of the model the preprocessing."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import timm

from models.build import is_timm_name, sizes_in
from models.build import resolve as timm_base
from models.sizes import RESIZED, given_sizes
from models.weights.find import local_weights, model_of_run
from utils.config import Loaded
from utils.config.keys import value_of
from utils.config.kinds import AUTO, one_line
from utils.config.read import Entry
from utils.config.words import choices
from utils.errors import UserError
from vitamp.files import read_json
from vitamp.meta import META, Input, check_fields, unchecked_meta
from vitamp.weights import preprocessing_in, read_header

INTERPOLATION, CROP_MODE = "DATA.INTERPOLATION", "DATA.CROP_MODE"
FIELDS = {
    "image_size": "DATA.IMAGE_SIZE",
    "crop_pct": "DATA.CROP_PCT",
    "crop_mode": CROP_MODE,
    "interpolation": INTERPOLATION,
    "mean": "DATA.IMAGENET_MEAN",
    "std": "DATA.IMAGENET_STD",
}
"""Field of a checkpoint's meta.json, and of a header of weights -> setting."""
COLOURS = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
TIMMS_CONFIG = "config.json"
"""File beside the weights in a folder that timm saved for the hub."""


Preprocessing = tuple[dict[str, Any], str]
"""Known values by setting, and where they are written."""


def with_sizes(loaded: Loaded, source: str) -> Loaded:
    """Take the sizes of a run's model where the settings leave them open."""
    file, mine, own, theirs = local_weights(source), loaded.config.MODEL, {}, {}
    with contextlib.suppress(UserError, ValueError):  # the build reports what is wrong
        if file and (run := model_of_run(file)):
            own, theirs = sizes_in(mine), sizes_in(run)
    # With a MODEL.NAME, timm resizes patches and windows to those of the name.
    kept = () if loaded.is_default("MODEL.NAME") else RESIZED
    taken = {
        f"MODEL.{key}": Entry(value, str(file))
        for key, value in theirs.items()
        if own.keys() == theirs.keys() and own[key] != value  # other keys: another kind of model
        if getattr(mine, key) == AUTO or (getattr(mine, key) is None and key not in kept)
    }
    words = f"Open in the settings, so as in {file}: {_in_words({key: one.value for key, one in taken.items()})}"
    return loaded.with_values(taken, [words]) if taken else loaded


def with_preprocessing(loaded: Loaded, source: str) -> Loaded:
    """Take the preprocessing of the weights where the settings leave it open, and note where theirs differs."""
    known, model = preprocessing_of(source), loaded.config.MODEL
    if known is None:  # the best guess: that of timm's own weights for the model, unless its sizes are the user's
        name, is_label = timm_base(model, sizes_given := bool(given_sizes(model)))
        if not (is_label and sizes_given):
            known = _of_timms_name(name, f"timm's {name} (MODEL.NAME; {source} does not say its own)")
    unset = [key for key in FIELDS.values() if loaded.is_default(key) or value_of(loaded.config, key) == AUTO]
    if known is None:
        now = _in_words({key: value_of(loaded.config, key) for key in FIELDS.values()})
        warning = (
            f"MODEL.PRETRAINED {source}: the preprocessing of its training images is unknown; this run uses {now}. "
            "Other values than those of its training cost accuracy: set them if you know them"
        )
        return replace(loaded, warnings=(*loaded.warnings, warning))
    theirs, where = known
    if loaded.config.DATA.IMAGE_CHANNELS == 1:  # as the first convolution of the weights gets the sum over colours
        theirs = theirs | {key: (sum(theirs[key]) / len(theirs[key]),) for key in COLOURS if theirs.get(key)}
    taken, notes = {key: value for key, value in theirs.items() if key in unset}, []
    for key in (INTERPOLATION, CROP_MODE):
        if key in taken and taken[key] not in choices(key):
            mine, unsupported = value_of(loaded.config, key), taken.pop(key)
            notes.append(f"{key} {mine} is used; {where} has {unsupported}, which is not supported")
    if taken:
        notes.insert(0, f"Preprocessing of {where}: {_in_words(taken)}")
    for key in (key for key in theirs if key not in unset):
        mine = value_of(loaded.config, key)
        same = {*mine} == {*theirs[key]} if key in COLOURS and len({*mine}) == 1 else mine == theirs[key]
        if not same:  # one number for all colours equals that number for each
            notes.append(f"{loaded.sources[key]}: {key} {one_line(mine)} is used; {where} has {one_line(theirs[key])}")
    return loaded.with_values({key: Entry(value, where) for key, value in taken.items()}, notes)


def preprocessing_of(source: str) -> Preprocessing | None:
    """The preprocessing that MODEL.PRETRAINED (a run, a checkpoint, a file, or a timm name) itself says, or None."""
    file = local_weights(source)
    if file is None:
        return _of_timms_name(source, f"timm's {source}")
    meta, config = file.with_name(META), file.with_name(TIMMS_CONFIG)
    if meta.is_file():
        return _of_fields(unchecked_meta(file.parent).get("input"), meta)
    if fields := preprocessing_in(read_header(file)):
        return _of_fields(fields, file)
    if config.is_file():
        return _of_fields(read_json(config).get("pretrained_cfg"), config)
    name = next((name for name in (file.stem, file.name.partition(".")[0]) if is_timm_name(name)), None)
    return _of_timms_name(name, f"timm's {name} (recognised by the name of {file})") if name else None


def _of_fields(fields: Any, where: Path | str) -> Preprocessing | None:
    """From our meta.json, the header of weights that checkpoint.py or export.py wrote, or timm's description of its."""
    if not isinstance(fields, dict):
        return None
    size = fields.get("input_size")  # timm's
    if isinstance(size, list | tuple) and len(size) == 3 and size[1] == size[2]:
        fields = {**fields, "image_size": size[1]}
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    check_fields(Input, known, Path(where))
    if not known:
        return None
    values = {name: tuple(map(float, value)) if isinstance(value, list) else value for name, value in known.items()}
    return {FIELDS[name]: value for name, value in values.items()}, str(where)


def _of_timms_name(name: str, where: str) -> Preprocessing | None:
    cfg = timm.get_pretrained_cfg(name)
    return None if cfg is None else _of_fields(asdict(cfg), where)


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {one_line(value)}" for key, value in values.items())
