"""All keys: their settings, older names and values."""

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
"""Name in a file of PaddleViT, of any year -> the key here, or in utils/config/paddlevit/families.yaml."""
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
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if is_section(field):
            yield from _walk(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


@cache
def settings() -> dict[str, FieldInfo]:
    """Dotted key -> field of every setting, in the order of the schema, without BASE, which loading resolves."""
    return {key: field for key, field in _walk(Config, "") if not is_section(field) and key != "BASE"}


def deciding(*what: str) -> tuple[str, ...]:
    """The settings that decide this, in words of DECIDES: by word, then in the order of the schema."""
    return tuple(key for word in what for key, field in settings().items() if word in decided_by(field))


@cache
def sections() -> dict[str, FieldInfo]:
    """Dotted name -> field of every section."""
    return {key: field for key, field in _walk(Config, "") if is_section(field)}


OF_ONE_START = deciding("one start")
"""Settings of one start, not of the run."""
PREPROCESSING = deciding("input")
"""Settings that pretrained weights give, rather than a recipe for another model."""


def canonical(key: str) -> str:
    """The name of today of a key; MODEL.TRANS.*, MODEL.TRANS.ENCODER.* and MODEL.PARAMS.* were MODEL.*."""
    key = re.sub(r"^MODEL\.(TRANS(\.ENCODER)?|PARAMS)(?=\.|$)", "MODEL", key)
    return RENAMED.get(key, key)


def value_of(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key -> nested sections, as the schema takes them."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


@cache
def default_of(key: str) -> Any:
    return value_of(_defaults(), key)


_defaults = cache(Config)


def values_by_key(config: Config) -> dict[str, Any]:
    return {key: value_of(config, key) for key in settings()}


def values_to_keep(config: Config) -> dict[str, Any]:
    """The settings of a run by dotted key, as saved in a checkpoint: its paths hold from every folder."""
    here = os.getcwd()
    values = values_by_key(config)
    return {key: absolute(key, value, here) for key, value in values.items() if key not in OF_ONE_START}


WITH_PATH = {
    **dict.fromkeys(("DATA.DATA_PATH", "DATA.EXCLUDE", "DATA.RELABEL", "DATA.CACHE", "MODEL.PRETRAINED", "USE"), ""),
    "DATA.DATASET": "hf:|csv:",
    "TRAIN.KNN": r"\w+=|(?=.*/)",  # a word alone may be the name of a data set
    "TRAIN.TEACHER_MODEL": r"([\w.]+=)?",
}
"""Settings that may have a path -> pattern of what is before it"""


def with_checkpoint(key: str, value: Any) -> Any:
    """A setting with the checkpoint that it calls RUN/best or RUN/last."""
    if not isinstance(value, str) or Path(value).name not in NAMED:
        return value
    before = re.match(WITH_PATH.get(key, ""), value)
    begin = before.end() if before else 0
    return f"{value[:begin]}{located(Path(os.path.expanduser(value[begin:])))}"


def absolute(key: str, value: Any, folder: str) -> Any:
    """A setting, its path absolute if it exists in `folder`; a name of timm's or a URL stays. `folder` '': as it is."""
    if key in WITH_PATH and isinstance(value, tuple | list):
        return type(value)(absolute(key, one, folder) for one in value)
    before = re.match(WITH_PATH[key], value) if key in WITH_PATH and isinstance(value, str) else None
    if not folder or before is None:
        return value
    path = os.path.expanduser(value[before.end() :])
    if not path:
        return value
    place = path if os.path.isabs(path) else os.path.join(folder, path.removeprefix("./"))
    there = os.path.exists(place) or os.path.exists(f"{place}.pdparams")  # PaddleViT leaves the ending out
    return f"{before[0]}{place}" if there or place == path else value
