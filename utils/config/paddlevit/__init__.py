"""PaddleViT's files: keys that have one value here, and its model families besides ViT, DeiT and Swin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from utils.config.kinds import is_no_value, one_line, parse_text
from utils.config.read import TYPE, Entry, Layer, type_of
from utils.errors import UserError
from utils.record.run_folder import is_of_user

FILE = Path(__file__).with_name("families.yaml")
NAME, IMAGE_SIZE = "MODEL.NAME", "DATA.IMAGE_SIZE"
_NORMALISED = "true", "masked pre-training always normalises the pixels of each patch"
FIXED: dict[str, tuple[str, str]] = {
    "LOCAL_RANK": ("0", "the launcher numbers the processes"),
    "MODEL.ATTN_HEAD_SIZE": ("", "heads divide EMBED_DIM evenly"),
    "MODEL.QK_SCALE": ("", "attention is scaled by the size of a head"),
    "MODEL.APE": ("false", "Swin has relative positions alone"),
    "MODEL.PATCH_NORM": ("true", "Swin always normalises the embedded patches"),
    "MODEL.NORM_PIX_LOSS": _NORMALISED,
    "TRAIN.NORMALIZE_TARGET": _NORMALISED,
}
"""Keys that change nothing -> the value that they may have besides none, and why no other."""


@dataclass(frozen=True)
class Family:
    """A family of PaddleViT that timm has."""

    title: str
    models: Mapping[str, Mapping[str, Any]]
    """timm's name -> value of each MODEL key that only restates the model's sizes"""
    defaults: Mapping[str, Any]
    """Setting -> the family's default"""
    names: Sequence[Sequence[str]] = ()
    image: str = ""
    """MODEL key whose first number is the image size"""

    def timm_name(self, name: str) -> str | None:
        """The timm model that PaddleViT's NAME means; None if it is none of this family's."""
        name = name.strip().casefold()
        for pattern, replacement in self.names:
            if name in self.models:
                break
            name = re.sub(pattern, replacement, name)
        return name if name in self.models else None


@cache
def families() -> dict[str, Family]:
    """TYPE in small letters -> family."""
    # libyaml's loader takes 30 ms, the one in Python 240 ms; both build plain values only.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text(encoding="utf-8"))
    try:
        tables = loader.get_single_data()
    finally:
        loader.dispose()
    found = {}
    for word, table in tables["families"].items():
        common, also = table.pop("sizes", {}), table.pop("also", ())
        models = {name: {**common, **sizes} for name, sizes in table.pop("models").items()}
        values = {**tables["defaults"], **table.pop("defaults")}
        defaults = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        found |= dict.fromkeys((word, *also), Family(models=models, defaults=defaults, **table))
    return found


def translate(layers: Sequence[Layer]) -> list[str]:
    """Change the layers' entries to vitamp's settings; returns lines for the log."""
    for layer in layers:
        for key in FIXED.keys() & layer.entries.keys():
            entry, (possible, why) = layer.entries[key], FIXED[key]
            value = str(entry.value).strip().casefold()
            if not (is_no_value(value) or value == possible):
                if not is_of_user(f"{layer.name}:"):  # a run of an earlier version, of which loading says what is gone
                    continue
                layer.problems.append(f"{entry.source}: {key} {entry.value} is not possible: {why}; leave the key out")
            del layer.entries[key]
    given = {key: entry for layer in layers for key, entry in layer.entries.items()}
    family = families().get(type_of(given))
    if family is None:
        return []
    name = given.get(NAME)
    if name is None:
        raise UserError(f"{given[TYPE].source}: {NAME} is not set; timm has {', '.join(family.models)}")
    named = family.timm_name(str(name.value))
    if named is None:
        return []
    has, sizes = family.models[named], dict[str, Entry]()
    for layer in layers:
        for key in [key for key in layer.entries if key.startswith("MODEL.")]:
            short = key.removeprefix("MODEL.")
            if short in has:
                sizes[short] = layer.entries.pop(key)
        if NAME in layer.entries:
            layer.entries[NAME] = Entry(named, layer.entries[NAME].source)
    sizes = {key: entry for key, entry in sizes.items() if entry.value is not None and not is_no_value(entry.value)}
    if differing := [key for key, entry in sizes.items() if _plain(entry.value) != _plain(has[key])]:
        given_sizes = {key: str(sizes[key].value).replace("'", "") for key in differing}
        words = ", ".join(f"MODEL.{key} {one} (timm's: {one_line(has[key])})" for key, one in given_sizes.items())
        raise UserError(
            f"{sizes[differing[0]].source}: {words}: MODEL.NAME {name.value} is timm's {named}, whose sizes cannot be "
            "changed; leave the keys out, or name another model"
        )
    notes, size, image = [], given.get(IMAGE_SIZE), sizes.get(family.image)
    if size is not None and image is not None and str(size.value) != image.value[0]:
        # PaddleViT loads smaller images and enlarges them in the model.
        layer = next(layer for layer in reversed(layers) if IMAGE_SIZE in layer.entries)
        if layer is not layers[-1]:  # the command line
            layer.entries[IMAGE_SIZE] = Entry(image.value[0], image.source)
            notes.append(f"{image.source}: images of {image.value[0]} pixels, the size that timm's {named} takes")
    words = [f"MODEL.NAME {name.value}" + (f" is timm's {named}" if str(name.value) != named else "")]
    words += [f"the file restates its sizes ({', '.join(sizes)})"] if sizes else []
    return [*notes, "; ".join(words)] if str(name.value) != named or sizes else notes


def _plain(value: object) -> object:
    """A value for comparison: `4`, 4 and 4.0 are the same, `ReLU` and relu too, tuples are lists."""
    value = parse_text(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    word = str(value).strip().casefold()
    try:
        return float(word)
    except ValueError:
        return word
