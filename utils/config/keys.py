"""Finds settings by their dotted keys, such as TRAIN.BASE_LR: their fields, older names, values and paths."""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from utils.config.fields import decided_by
from utils.config.schema import Config
from vitamp.checkpoints import NAMED, located

RENAMED = {
    "MODEL.IN_CHANNELS": "DATA.IMAGE_CHANNELS",
    "MODEL.ETA": "MODEL.INIT_VALUES",
    "MODEL.DROP_PATH": "MODEL.DROPPATH",
    "MODEL.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    "MODEL.NUM_LAYERS": "MODEL.DEPTH",
    "MODEL.MIXER.HIDDEN_SIZE": "MODEL.MIXER.EMBED_DIM",
    "MODEL.MIXER.NUM_LAYERS": "MODEL.MIXER.DEPTH",
}
"""Key in a file of any version of PaddleViT -> our key, or the key in utils/config/paddlevit/families.yaml."""
DATASET = "DATA.DATASET"
CLASSES = "MODEL.NUM_CLASSES"
NAME = "MODEL.NAME"
EPOCHS = "TRAIN.NUM_EPOCHS"
WARMUP = "TRAIN.WARMUP_EPOCHS"
IMAGE_SIZE = "DATA.IMAGE_SIZE"
PATCH_SIZE = "MODEL.PATCH_SIZE"
MEASURED = ("DATA.RANGE", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
"""Settings for which `auto` is measured on the pixels of the training split."""
CHANGE_DEFAULTS = ("DATA.MULTI_LABEL", "MODEL.MAE_PRETRAIN", "DATA.IMAGE_CHANNELS", "DATA.BITS")
"""Settings that change the defaults of others; see families.py."""
AUTO_BY_DATA = (CLASSES, IMAGE_SIZE, PATCH_SIZE, *MEASURED)
"""Settings for which engine/preflight.py replaces `auto` by a number, mostly from the data."""


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key and the field of every section and setting, each section before its settings."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if is_section(field):
            yield from _walk(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


@cache
def settings() -> dict[str, FieldInfo]:
    """All settings in the order of the schema: dotted key -> field. BASE is left out, because loading resolves it."""
    return {key: field for key, field in _walk(Config, "") if not is_section(field) and key != "BASE"}


def deciding(*results: str) -> tuple[str, ...]:
    """Return the keys of the settings on which these results depend.

    The keys are in the order of the results, and for each of these in the order of the schema.

    results: keys of DECIDES in fields.py, such as "split"
    """
    keys: list[str] = []
    for result in results:
        keys += [key for key, field in settings().items() if result in decided_by(field)]
    return tuple(keys)


@cache
def sections() -> dict[str, FieldInfo]:
    """Dotted name -> field of every section."""
    return {key: field for key, field in _walk(Config, "") if is_section(field)}


OF_ONE_START = deciding("one start")
"""Settings of one start, not of the run: a resume does not take them over."""
PREPROCESSING = deciding("input")
"""Settings that pretrained weights give, rather than a recipe for another model."""


def canonical(key: str) -> str:
    """Our key for a key of any version of PaddleViT, where our MODEL.* is also in MODEL.TRANS.* or MODEL.PARAMS.*."""
    in_model = re.sub(r"^MODEL\.(TRANS(\.ENCODER)?|PARAMS)(?=\.|$)", "MODEL", key)
    return RENAMED.get(in_model, in_model)


def value_of(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted key into nested sections, as the schema takes them."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *section_names, name = key.split(".")
        section = tree
        for section_name in section_names:
            section = section.setdefault(section_name, {})
        section[name] = value
    return tree


@cache
def default_of(key: str) -> Any:
    return value_of(_defaults(), key)


_defaults = cache(Config)


def values_by_key(config: Config) -> dict[str, Any]:
    return {key: value_of(config, key) for key in settings()}


def values_to_keep(config: Config) -> dict[str, Any]:
    """The settings of a run by dotted key, as a checkpoint saves them: absolute paths, and none of OF_ONE_START."""
    current_folder = os.getcwd()
    values = values_by_key(config)
    return {key: absolute(key, value, current_folder) for key, value in values.items() if key not in OF_ONE_START}


WITH_PATH = {
    **dict.fromkeys(("DATA.DATA_PATH", "DATA.EXCLUDE", "DATA.RELABEL", "DATA.CACHE", "MODEL.PRETRAINED", "USE"), ""),
    "DATA.DATASET": "hf:|csv:",
    "TRAIN.KNN": r"\w+=|(?=.*/)",  # a word alone may be the name of a data set
    "TRAIN.TEACHER_MODEL": r"([\w.]+=)?",
}
"""Settings that may have a path -> pattern of the prefix before the path, such as `csv:` in csv:list.csv."""


def with_checkpoint(key: str, value: Any) -> Any:
    """Replace RUN/best or RUN/last at the end of a setting by the checkpoint's folder; other values stay."""
    if not isinstance(value, str) or Path(value).name not in NAMED:
        return value
    prefix = re.match(WITH_PATH.get(key, ""), value)
    path_start = prefix.end() if prefix else 0
    return f"{value[:path_start]}{located(Path(os.path.expanduser(value[path_start:])))}"


def absolute(key: str, value: Any, folder: str) -> Any:
    """Make the path in a setting absolute, if it exists relative to `folder`.

    Other values stay: they may be the name of a timm model or a URL. If `folder` is '', every value stays.

    key: dotted key of the setting. WITH_PATH has the settings that may have a path, and the pattern of what may be
        before it in the value, such as `csv:`.
    """
    if key in WITH_PATH and isinstance(value, tuple | list):
        return type(value)(absolute(key, item, folder) for item in value)
    prefix = re.match(WITH_PATH[key], value) if key in WITH_PATH and isinstance(value, str) else None
    if not folder or prefix is None:
        return value
    path = os.path.expanduser(value[prefix.end() :])
    if not path:
        return value
    if os.path.isabs(path):
        return f"{prefix[0]}{path}"  # with ~ replaced by the home folder
    absolute_path = os.path.join(folder, path.removeprefix("./"))
    # PaddleViT leaves the ending .pdparams out.
    exists = os.path.exists(absolute_path) or os.path.exists(f"{absolute_path}.pdparams")
    return f"{prefix[0]}{absolute_path}" if exists else value
