"""PaddleViT's files: keys that have one value here, and its model families besides ViT, DeiT and Swin."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from utils.config.keys import settings
from utils.config.kinds import as_integer, folded, is_no_value, one_line, parse_text
from utils.config.read import TYPE, Entry, Kind, Layer, merged, type_of
from utils.config.resumed import FROM_WEIGHTS
from utils.errors import UserError, closest

FILE = Path(__file__).with_name("families.yaml")
NAME = "MODEL.NAME"
IMAGE_SIZE = "DATA.IMAGE_SIZE"
WIDTH = "MODEL.EMBED_DIM"
GRAD_CLIP = "TRAIN.GRAD_CLIP"
DISTILLED_BY = "TRAIN.DISTILLATION_TYPE"
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
    """A family of PaddleViT; timm lacks those without models."""

    title: str
    models: Mapping[str, Mapping[str, Any]]
    """timm's name -> value of each MODEL key that only restates the model's sizes"""
    defaults: Mapping[str, Any]
    """Setting -> the family's default"""
    names: Sequence[Sequence[str]] = ()
    image: str = ""
    """MODEL key whose first number is the image size"""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older MODEL key -> the one in `models`"""

    def timm_name(self, name: str) -> str | None:
        """The timm model that PaddleViT's NAME means; None if it is none of this family's."""
        name = name.strip().casefold()
        for pattern, replacement in self.names:
            if name in self.models:
                break
            name = re.sub(pattern, replacement, name)
        return name if name in self.models else None

    def differing(self, model: str | None, sizes: Mapping[str, Entry]) -> list[str]:
        """The keys of sizes that timm's model has not; all if there is no model."""
        has = self.models.get(model or "", {})
        return [key for key, entry in sizes.items() if _plain(entry.value) != _plain(has.get(key))]

    def sizes_in(self, layers: Sequence[Layer]) -> dict[str, Entry]:
        """Take the entries that restate a model's sizes out of the layers; those with a value are returned."""
        known: set[str] = set()
        for model in self.models.values():
            known.update(model)
        found = dict[str, Entry]()
        for layer in layers:
            for key in list(layer.entries):
                short = key.removeprefix("MODEL.")
                short = self.renamed.get(short, short)
                if key.startswith("MODEL.") and short in known:
                    found[short] = layer.entries.pop(key)
        return {key: entry for key, entry in found.items() if not is_no_value(str(entry.value))}

    def model_of(self, name: Entry, sizes: Mapping[str, Entry], typed: bool) -> tuple[str | None, list[str]]:
        """The timm model of a name and sizes, and a line where it is that of the sizes. `typed`: the name counts."""
        asked = self.timm_name(str(name.value))
        differing = self.differing(asked, sizes)
        if not differing:
            return asked, []
        words = [f"MODEL.{key} {sizes[key].value}".replace("'", "") for key in differing]
        equal = [model for model in self.models if not self.differing(model, sizes)]
        named = None if typed else closest(str(name.value), equal, cutoff=0.0)
        if named:
            has = f"it has the file's {', '.join(words)}"
            return named, [f"{name.source}: timm's {named} is taken for {name.value}: {has}"]
        timms = self.models.get(asked or "", {})
        words = [f"{one} (timm's: {one_line(timms.get(key))})" for one, key in zip(words, differing, strict=True)]
        why = f"timm's {asked}, whose sizes cannot be changed" if asked else f"none of timm's {self.title}"
        raise UserError(
            f"{sizes[differing[0]].source}: {', '.join(words)}: MODEL.NAME {name.value} is {why}; leave the keys "
            "out, or name another model"
        )


@cache
def _tables() -> dict[str, Any]:
    # libyaml's loader takes 30 ms, the one in Python 240 ms; both build plain values only.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@cache
def ours() -> dict[str, dict[str, Any]]:
    """TYPE -> defaults, of the families whose sizes are settings."""
    return {word: _with_tuples(values) for word, values in _tables()["ours"].items()}


def defaults_of(kind: str) -> Mapping[str, Any]:
    """Of a family, by its TYPE in small letters; empty for an unknown one."""
    family = families().get(kind)
    return family.defaults if family else ours().get(kind, {})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


@cache
def families() -> dict[str, Family]:
    """TYPE in small letters -> family, but for `ours`."""
    found = {}
    for word, given in _tables()["families"].items():
        table = dict(given)
        common = table.pop("sizes", {})
        also = table.pop("also", ())
        models = {name: common | sizes for name, sizes in table.pop("models", {}).items()}
        defaults = _with_tuples(_tables()["defaults"] | table.pop("defaults", {}))
        family = Family(models=models, defaults=defaults, **table)
        for one in (word, *also):
            found[one] = family
    return found


def translate(layers: Sequence[Layer]) -> list[str]:
    """Change the layers' entries to vitamp's settings; returns lines for the log."""
    for layer in layers:
        _update(layer)
    given = merged(layers)
    notes = _without_absent(layers, given)
    family = families().get(type_of(given))
    name = given.get(NAME)
    if family is None or not family.models:
        return notes + _distilled(layers, given)
    if name is None:
        raise UserError(f"{given[TYPE].source}: {NAME} is not set; timm has {', '.join(family.models)}")
    sizes = family.sizes_in(layers)
    model, of_sizes = family.model_of(name, sizes, typed=NAME in layers[-1].entries)
    if model is None:
        return notes
    notes += of_sizes
    for layer in layers:
        if NAME in layer.entries:
            layer.entries[NAME] = Entry(model, layer.entries[NAME].source)
    image = sizes.get(family.image)
    if image is not None:
        notes += _enlarged(layers, given, image, model)
    renamed = f" is timm's {model}" if str(name.value) != model else ""
    restated = f"; the file restates its sizes ({', '.join(sizes)})" if sizes else ""
    if (renamed or restated) and not of_sizes:
        notes.append(f"MODEL.NAME {name.value}{renamed}{restated}")
    return notes


def _enlarged(layers: Sequence[Layer], given: Mapping[str, Entry], image: Entry, model: str) -> list[str]:
    """Take the model's image size where a file has a smaller one: PaddleViT enlarges smaller images in the model."""
    size = given.get(IMAGE_SIZE)
    if size is None or str(size.value) == image.value[0] or IMAGE_SIZE in layers[-1].entries:
        return []
    layer = next(layer for layer in reversed(layers) if IMAGE_SIZE in layer.entries)
    layer.entries[IMAGE_SIZE] = Entry(image.value[0], image.source)
    return [f"{image.source}: images of {image.value[0]} pixels, the size that timm's {model} takes"]


def _update(layer: Layer) -> None:
    """Remove the keys that change nothing, and convert values that only older files have."""
    entries = layer.entries
    for key in [key for key in entries if key in FIXED]:
        entry = entries[key]
        possible, why = FIXED[key]
        value = str(entry.value).strip().casefold()
        if not is_no_value(value) and value != possible:
            if layer.kind is Kind.RUN:  # a run of an earlier version, of which loading says what is gone
                continue
            layer.problems.append(f"{entry.source}: {key} {entry.value} is not possible: {why}; leave the key out")
        del entries[key]
    width = as_integer(entries[WIDTH].value) if WIDTH in entries else None
    hidden = as_integer(entries["MODEL.MLP_DIM"].value) if "MODEL.MLP_DIM" in entries else None
    if isinstance(width, int) and isinstance(hidden, int) and width:
        layer.set("MODEL.MLP_RATIO", hidden / width, entries.pop("MODEL.MLP_DIM").source)
    if GRAD_CLIP in entries and folded(entries[GRAD_CLIP].value) == "false":
        entries[GRAD_CLIP] = Entry(None, entries[GRAD_CLIP].source)
    if type_of(entries) in ("pretrain", "finetune"):
        entries[TYPE] = Entry("mae", entries[TYPE].source)
    if type_of(entries) == "mae":
        if "MODEL.DECODER.DEPTH" in entries:
            entries.setdefault("MODEL.MAE_PRETRAIN", Entry("true", entries["MODEL.DECODER.DEPTH"].source))
        pool = entries.pop("MODEL.GLOBAL_POOL", None)
        if pool is not None:
            entries["MODEL.POOL"] = Entry("mean" if folded(pool.value) == "true" else None, pool.source)


def _without_absent(layers: Sequence[Layer], given: Mapping[str, Entry]) -> list[str]:
    """Refuse a file of a family that timm lacks, whatever TYPE the command line gives, or leave out its sizes."""
    notes = []
    for layer in layers:
        family = families().get(type_of(layer.entries))
        name = given.get(NAME)
        if family is None or family.models:
            continue
        if name is None or name is layer.entries.get(NAME):
            raise UserError(
                f"{layer.entries[TYPE].source}: timm has no {family.title}. To train one by this file, name one that "
                "registers the model too: -use FILE -model NAME (docs/own_code.md)"
            )
        for key in [key for key in layer.entries if key.startswith("MODEL.")]:
            if key in (TYPE, *FROM_WEIGHTS) or key not in settings():
                del layer.entries[key]
        notes.append(f"{layer.name}: its sizes of {family.title} are left out: MODEL.NAME {name.value} has its own")
    return notes


def _distilled(layers: Sequence[Layer], given: Mapping[str, Entry]) -> list[str]:
    """PaddleViT's files of distilled DeiTs name plain ones: its scripts for distillation add token and classifier."""
    by = given.get(DISTILLED_BY)
    name = given.get(NAME)
    if type_of(given) != "deit" or by is None or name is None or folded(by.value) not in ("hard", "soft"):
        return []
    layer = next(layer for layer in layers if layer.entries.get(NAME) is name)
    named = re.sub("^(deit_[a-z]+)(_patch)", r"\1_distilled\2", str(name.value))
    # Files that are not PaddleViT's do not restate the sizes; a run of an earlier version keeps its model.
    if named == name.value or WIDTH not in layer.entries or layer.kind is Kind.RUN:
        return []
    layer.entries[NAME] = Entry(named, name.source)
    return [f"{by.source}: MODEL.NAME {name.value} is timm's {named}, with token and classifier for {DISTILLED_BY}"]


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
