"""Settings that only the data and the pretrained weights know: layout, number of classes, preprocessing.

Each process resolves them for itself, before anything is built; config.yaml stores the result. A resumed run has them
from its checkpoint instead (utils/config/resumed.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm

from datasets import count_classes, recognise, source_of
from engine.evaluated_data import settings_for_evaluation
from models import local_weights
from models.names import is_timm_name
from utils.config import Config, Loaded
from utils.config.keys import choices, value_of
from utils.config.kinds import AUTO
from utils.config.read import Entry
from utils.config.values import one_line
from utils.errors import UserError
from utils.files import read_json
from utils.record.checkpoints import META
from utils.record.chosen import Chosen, chosen_at
from utils.record.meta import Input, check_fields
from utils.record.resumed_run import resumed_run
from utils.record.weights_file import read_header

CLASSES, DATASET = "MODEL.NUM_CLASSES", "DATA.DATASET"
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


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing that weights were trained with, and where that is written."""

    values: dict[str, Any]
    """By setting; without those that are not known."""
    where: str


def resolve(loaded: Loaded) -> Loaded:
    """The settings with a number for `auto` classes, the layout of DATA_PATH, and the preprocessing of the weights.

    For an evaluation also with the split to evaluate.
    """
    return _with_part(_with_preprocessing(_with_classes(_with_dataset(loaded))))


def _with_dataset(loaded: Loaded) -> Loaded:
    place = loaded.config.DATA.DATA_PATH
    found = recognise(place) if place is not None and loaded.is_default(DATASET) else None
    if found is None:
        return loaded
    name, what = found
    note = f"{DATASET} {name}: {what}"
    return loaded.with_values({DATASET: Entry(name, f"recognised in {place}")}, [note])


def _with_classes(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.MODEL.NUM_CLASSES != AUTO:
        return loaded
    try:
        number = count_classes(config.DATA, train=True)
    except UserError:
        if not config.EVAL:
            raise
        number = count_classes(config.DATA, train=False)  # an evaluation needs no training split
    number = max(number, 1)  # the check of the data reports negative labels, with their lines
    name = source_of(config.DATA)
    note = f"{CLASSES} {number}: classes of {name}"
    if number == 1 and not config.DATA.MULTI_LABEL:
        note += ". With one class there is nothing to learn: is DATA.DATA_PATH the folder that holds the class folders?"
    return loaded.with_values({CLASSES: Entry(number, f"classes of {name}")}, [note])


def _with_preprocessing(loaded: Loaded) -> Loaded:
    """Take the preprocessing of MODEL.PRETRAINED where the user set none, and note where theirs differs."""
    source = loaded.config.MODEL.PRETRAINED
    resumes = loaded.config.MODEL.RESUME not in (None, AUTO) or resumed_run(loaded.config) is not None
    if source is None or resumes:
        return loaded if source is None else loaded.with_values({}, _other_crop_mode(loaded, source))
    known = preprocessing_of(source)
    unset = [key for key in FIELDS.values() if loaded.is_default(key)]
    if known is None or not known.values:
        now = _in_words({key: value_of(loaded.config, key) for key in FIELDS.values()})
        note = f"MODEL.PRETRAINED {source}: the preprocessing of its training images is unknown; this run uses {now}"
        return loaded.with_values({}, [note])
    theirs = _for_channels(known.values, loaded.config.DATA.IMAGE_CHANNELS)
    taken, notes = {key: value for key, value in theirs.items() if key in unset}, []
    for key in (INTERPOLATION, CROP_MODE):
        if key in taken and taken[key] not in choices(key):
            mine, unsupported = value_of(loaded.config, key), taken.pop(key)
            notes.append(f"{key} {mine} is used; {known.where} has {unsupported}, which is not supported")
    if taken:
        notes.insert(0, f"Preprocessing of {known.where}: {_in_words(taken)}")
    for key in (key for key in theirs if key not in unset):
        mine = value_of(loaded.config, key)
        if not _same(mine, theirs[key]):
            notes.append(
                f"{loaded.sources[key]}: {key} {one_line(mine)} is used; {known.where} has {one_line(theirs[key])}"
            )
    return loaded.with_values({key: Entry(value, known.where) for key, value in taken.items()}, notes)


def _other_crop_mode(loaded: Loaded, source: str) -> list[str]:
    """A note if timm's weights, with which a resumed run began, have another crop mode: older runs did not take it."""
    mine, cfg = loaded.config.DATA.CROP_MODE, timm.get_pretrained_cfg(source) if is_timm_name(source) else None
    if cfg is None or cfg.crop_mode == mine:
        return []
    return [f"{CROP_MODE} {mine} is used, as in the resumed run; timm's {source} has {cfg.crop_mode}"]


def _with_part(loaded: Loaded) -> Loaded:
    if not loaded.config.EVAL:
        return loaded
    given = {key for key, source in loaded.sources.items() if source.startswith("-") or source == "command line"}
    found, notes = settings_for_evaluation(loaded.config, _evaluated(loaded.config), given)
    return loaded.with_values({key: Entry(value, "the evaluated data") for key, value in found.items()}, notes)


def _evaluated(config: Config) -> Chosen | None:
    """The weights that -eval evaluates; None if nothing is known of their training."""
    wanted, source = config.MODEL.RESUME, config.MODEL.PRETRAINED
    try:
        if run := resumed_run(config):
            return chosen_at(run)
        if wanted not in (None, AUTO):
            return chosen_at(Path(str(wanted)))
        file = local_weights(source) if source else None
        return chosen_at(file) if file else None
    except UserError:  # loading the weights reports it, if it is one
        return None


def preprocessing_of(source: str) -> Preprocessing | None:
    """The preprocessing of MODEL.PRETRAINED: a run, a checkpoint, a file, or a timm name; None if it is not known."""
    file = local_weights(source)
    if file is None:
        return _of_timms_name(source, f"timm's {source}")
    meta, config = file.with_name(META), file.with_name(TIMMS_CONFIG)
    if meta.is_file():
        return _of_fields(read_json(meta).get("input"), meta)
    if (header := read_header(file)) and (fields := header if "timm_name" in header else header.get("input")):
        return _of_fields(fields, file)
    if config.is_file():
        return _of_timm(read_json(config).get("pretrained_cfg"), config)
    name = next((name for name in (file.stem, file.name.partition(".")[0]) if is_timm_name(name)), None)
    return _of_timms_name(name, f"timm's {name} (recognised by the name of {file})") if name else None


def _of_timm(cfg: Any, where: Path | str) -> Preprocessing | None:
    """From timm's description of its weights, as a dict."""
    if not isinstance(cfg, dict):
        return None
    size = cfg.get("input_size")
    if isinstance(size, list | tuple) and len(size) == 3 and size[1] == size[2]:
        cfg = {**cfg, "image_size": size[1]}
    return _of_fields(cfg, where)


def _of_fields(fields: Any, where: Path | str) -> Preprocessing | None:
    """From our meta.json, or from the header of weights that scripts/checkpoint.py or scripts/export.py wrote."""
    if not isinstance(fields, dict):
        return None
    known = {name: _as_json(fields[name]) for name in FIELDS if fields.get(name) is not None}
    check_fields(Input, known, Path(where))
    return Preprocessing({FIELDS[name]: _as_setting(value) for name, value in known.items()}, str(where))


def _of_timms_name(name: str, where: str) -> Preprocessing | None:
    cfg = timm.get_pretrained_cfg(name)
    return None if cfg is None else _of_timm(asdict(cfg), where)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_setting(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list) else value


def _for_channels(values: dict[str, Any], channels: int) -> dict[str, Any]:
    """For grey images, the mean over colours, as the first convolution of the weights gets the sum over colours."""
    if channels != 1:
        return values
    return values | {key: (sum(values[key]) / len(values[key]),) for key in COLOURS if values.get(key)}


def _same(mine: Any, theirs: Any) -> bool:
    """Whether two values are equal; one number for all colours equals that number for each."""
    if isinstance(mine, tuple) and len(set(mine)) == len(set(theirs)) == 1:
        return mine[0] == theirs[0]
    return mine == theirs


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {one_line(value)}" for key, value in values.items())
