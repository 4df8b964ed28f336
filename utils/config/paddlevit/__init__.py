"""PaddleViT's files: keys that have one value here, and its model families besides ViT, DeiT and Swin."""

import math
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

    def differing_sizes(self, model: str | None, sizes: Mapping[str, Entry]) -> list[str]:
        """List the keys of `sizes` for which timm's model has another value; all keys if `model` is None."""
        model_sizes = self.models.get(model or "", {})
        return [key for key, entry in sizes.items() if _plain(entry.value) != _plain(model_sizes.get(key))]

    def pop_sizes(self, layers: Sequence[Layer]) -> dict[str, Entry]:
        """Remove the sizes of the model from all layers, because the name of a timm model decides its sizes.

        Returns the sizes that have a value, by key without `MODEL.`; the last layer with a key counts.
        """
        size_keys: set[str] = set()
        for model_sizes in self.models.values():
            size_keys.update(model_sizes)
        sizes = dict[str, Entry]()
        for layer in layers:
            for key in list(layer.entries):
                short_key = key.removeprefix("MODEL.")
                short_key = self.renamed.get(short_key, short_key)
                if key.startswith("MODEL.") and short_key in size_keys:
                    sizes[short_key] = layer.entries.pop(key)
        return {key: entry for key, entry in sizes.items() if not is_no_value(str(entry.value))}

    def choose_model(self, name: Entry, sizes: Mapping[str, Entry], typed: bool) -> tuple[str | None, list[str]]:
        """Choose timm's model by the name and the sizes in PaddleViT's file.

        The model of this name is chosen if it has these sizes, else the model of the most similar name that has them.
        Returns its name in timm (None if the name is unknown, and no sizes are given), and lines for the log: one if
        the sizes decided. If no model has the sizes, this is a UserError.

        sizes: MODEL key, without `MODEL.` -> entry
        typed: whether the name is on the command line: then the sizes never choose another model
        """
        asked_model = self.timm_name(str(name.value))
        differing_keys = self.differing_sizes(asked_model, sizes)
        if not differing_keys:
            return asked_model, []

        size_texts = [f"MODEL.{key} {sizes[key].value}".replace("'", "") for key in differing_keys]
        models_of_sizes = [model for model in self.models if not self.differing_sizes(model, sizes)]
        # The sizes decide, so any similarity of the names is enough.
        model = None if typed else closest(str(name.value), models_of_sizes, cutoff=0.0)
        if model:
            reason = f"it has the file's {', '.join(size_texts)}"
            return model, [f"{name.source}: timm's {model} is taken for {name.value}: {reason}"]

        timms_sizes = self.models.get(asked_model or "", {})
        compared_sizes = [
            f"{text} (timm's: {one_line(timms_sizes.get(key))})"
            for text, key in zip(size_texts, differing_keys, strict=True)
        ]
        if asked_model:
            why = f"timm's {asked_model}, whose sizes cannot be changed"
        else:
            why = f"none of timm's {self.title}"
        raise UserError(
            f"{sizes[differing_keys[0]].source}: {', '.join(compared_sizes)}: MODEL.NAME {name.value} is {why}; leave "
            "the keys out, or name another model"
        )


@cache
def _tables() -> dict[str, Any]:
    """Read families.yaml, whose comments describe its tables: `ours`, `families` and `defaults`."""
    # libyaml's loader takes 30 ms, the one in Python 240 ms; both build plain values only.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@cache
def resizable_families() -> dict[str, dict[str, Any]]:
    """TYPE -> defaults, of the families whose sizes are settings."""
    return {word: _with_tuples(values) for word, values in _tables()["ours"].items()}


def defaults_of(family_name: str) -> Mapping[str, Any]:
    """Return the defaults of a model family by key; empty for an unknown family.

    family_name: MODEL.TYPE in lower case
    """
    family = families().get(family_name)
    return family.defaults if family else resizable_families().get(family_name, {})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


@cache
def families() -> dict[str, Family]:
    """TYPE in lower case -> family, for all families but the resizable ones."""
    family_by_type = {}
    for type_word, facts in _tables()["families"].items():
        table = dict(facts)
        common_sizes = table.pop("sizes", {})
        other_type_words = table.pop("also", ())
        models = {name: common_sizes | sizes for name, sizes in table.pop("models", {}).items()}
        defaults = _with_tuples(_tables()["defaults"] | table.pop("defaults", {}))
        family = Family(models=models, defaults=defaults, **table)
        for word in (type_word, *other_type_words):
            family_by_type[word] = family
    return family_by_type


def translate(layers: Sequence[Layer]) -> list[str]:
    """Translate PaddleViT's keys and values in all layers to settings of vitamp; return lines for the log.

    Model families whose sizes are settings, such as ViT and Swin, keep them. For all other families, PaddleViT's
    name is replaced by timm's, and the sizes, which timm's name decides, are removed.

    layers: from weak to strong; the last is the command line. Their entries are changed.
    """
    for layer in layers:
        _convert_old_entries(layer)
    # The settings before the changes below: later steps only change or remove the sizes, the name and the image size.
    given = merged(layers)
    notes = _remove_sizes_of_absent_families(layers, given)
    family = families().get(type_of(given))
    name = given.get(NAME)
    if family is None or not family.models:
        return notes + _name_distilled_model(layers, given)
    if name is None:
        raise UserError(f"{given[TYPE].source}: {NAME} is not set; timm has {', '.join(family.models)}")

    sizes = family.pop_sizes(layers)
    model, notes_on_choice = family.choose_model(name, sizes, typed=NAME in layers[-1].entries)
    if model is None:  # The name is not of this family, and no sizes tell which model it means.
        return notes
    notes += notes_on_choice
    for layer in layers:
        if NAME in layer.entries:
            layer.entries[NAME] = Entry(model, layer.entries[NAME].source)

    models_image = sizes.get(family.image)
    if models_image is not None:
        notes += _set_image_size_of_model(layers, given, models_image, model)
    renamed = f" is timm's {model}" if str(name.value) != model else ""
    restated = f"; the file restates its sizes ({', '.join(sizes)})" if sizes else ""
    if (renamed or restated) and not notes_on_choice:
        notes.append(f"MODEL.NAME {name.value}{renamed}{restated}")
    return notes


def _set_image_size_of_model(
    layers: Sequence[Layer], given: Mapping[str, Entry], models_image: Entry, model: str
) -> list[str]:
    """Set DATA.IMAGE_SIZE to the size that the model takes, if a file has another; return lines for the log.

    PaddleViT's files may have a smaller size, because its models enlarge images. A size on the command line stays.

    given: the settings of all layers
    models_image: entry of the model's sizes whose value begins with the image size
    """
    size = given.get(IMAGE_SIZE)
    models_size = models_image.value[0]
    if size is None or str(size.value) == models_size or IMAGE_SIZE in layers[-1].entries:
        return []
    strongest_layer = next(layer for layer in reversed(layers) if IMAGE_SIZE in layer.entries)
    strongest_layer.entries[IMAGE_SIZE] = Entry(models_size, models_image.source)
    return [f"{models_image.source}: images of {models_size} pixels, the size that timm's {model} takes"]


def _convert_old_entries(layer: Layer) -> None:
    """Remove the keys that change nothing, and convert values that only older files have."""
    entries = layer.entries
    for key in [key for key in entries if key in FIXED]:
        entry = entries[key]
        possible_value, why = FIXED[key]
        value = str(entry.value).strip().casefold()
        if not is_no_value(value) and value != possible_value:
            if layer.kind is Kind.RUN:  # a run of an earlier version, of which loading says what is gone
                continue
            layer.problems.append(f"{entry.source}: {key} {entry.value} is not possible: {why}; leave the key out")
        del entries[key]

    # The width of the MLP becomes a multiple of the width of the tokens.
    width = as_integer(entries[WIDTH].value) if WIDTH in entries else None
    mlp_width = as_integer(entries["MODEL.MLP_DIM"].value) if "MODEL.MLP_DIM" in entries else None
    if isinstance(width, int) and isinstance(mlp_width, int) and width:
        ratio = mlp_width / width
        if int(width * ratio) < mlp_width:  # as timm computes it: rounding may miss the number by one
            ratio = math.nextafter(ratio, math.inf)
        layer.set("MODEL.MLP_RATIO", ratio, entries.pop("MODEL.MLP_DIM").source)
    if GRAD_CLIP in entries and folded(entries[GRAD_CLIP].value) == "false":
        entries[GRAD_CLIP] = Entry(None, entries[GRAD_CLIP].source)

    # Masked autoencoders: one TYPE for both of PaddleViT's; a decoder means pre-training.
    if type_of(entries) in ("pretrain", "finetune"):
        entries[TYPE] = Entry("mae", entries[TYPE].source)
    if type_of(entries) == "mae":
        if "MODEL.DECODER.DEPTH" in entries:
            entries.setdefault("MODEL.MAE_PRETRAIN", Entry("true", entries["MODEL.DECODER.DEPTH"].source))
        pool = entries.pop("MODEL.GLOBAL_POOL", None)
        if pool is not None:
            entries["MODEL.POOL"] = Entry("mean" if folded(pool.value) == "true" else None, pool.source)


def _remove_sizes_of_absent_families(layers: Sequence[Layer], given: Mapping[str, Entry]) -> list[str]:
    """Remove the sizes in files of families that timm lacks, if another layer names a model; return lines for the log.

    If no other layer names one, this is a UserError, whatever MODEL.TYPE the command line gives.

    given: the settings of all layers
    """
    notes = []
    for layer in layers:
        family = families().get(type_of(layer.entries))
        name = given.get(NAME)
        if family is None or family.models:  # a family whose sizes are settings, or that timm has
            continue
        is_name_of_this_file = name is layer.entries.get(NAME)
        if name is None or is_name_of_this_file:
            raise UserError(
                f"{layer.entries[TYPE].source}: timm has no {family.title}. To train one by this file, name one that "
                "registers the model too: -use FILE -model NAME (docs/own_code.md)"
            )
        for key in [key for key in layer.entries if key.startswith("MODEL.")]:
            if key in (TYPE, *FROM_WEIGHTS) or key not in settings():
                del layer.entries[key]
        notes.append(f"{layer.name}: its sizes of {family.title} are left out: MODEL.NAME {name.value} has its own")
    return notes


def _name_distilled_model(layers: Sequence[Layer], given: Mapping[str, Entry]) -> list[str]:
    """Name timm's distilled DeiT in a file of PaddleViT that trains with distillation; return lines for the log.

    Such a file names the plain DeiT: PaddleViT's scripts for distillation add the token and its classifier.

    layers: the layer that gives the name is changed
    given: the settings of all layers
    """
    distilled_by = given.get(DISTILLED_BY)
    name = given.get(NAME)
    if type_of(given) != "deit" or distilled_by is None or name is None:
        return []
    if folded(distilled_by.value) not in ("hard", "soft"):
        return []
    layer = next(layer for layer in layers if layer.entries.get(NAME) is name)
    model = re.sub("^(deit_[a-z]+)(_patch)", r"\1_distilled\2", str(name.value))
    is_of_paddlevit = WIDTH in layer.entries  # Only PaddleViT's files restate the sizes of a model.
    # A run of an earlier version keeps its model.
    if model == name.value or not is_of_paddlevit or layer.kind is Kind.RUN:
        return []
    layer.entries[NAME] = Entry(model, name.source)
    source = distilled_by.source
    return [f"{source}: MODEL.NAME {name.value} is timm's {model}, with token and classifier for {DISTILLED_BY}"]


def _plain(value: object) -> object:
    """Convert a value for comparison: `4`, 4 and 4.0 are the same, `ReLU` and relu too, tuples are lists."""
    value = parse_text(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    word = str(value).strip().casefold()
    try:
        return float(word)
    except ValueError:
        return word
