"""What families.yaml says of PaddleViT's model families, and the MODEL section of its files turned into ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from utils.config.keys import default_of
from utils.config.kinds import is_no_value, one_line, parse_text
from utils.config.read import Entry, Layer
from utils.errors import UserError, either

FILE = Path(__file__).with_name("families.yaml")


@dataclass(frozen=True)
class Family:
    """A family of PaddleViT that timm has."""

    title: str
    models: Mapping[str, Mapping[str, Any]]
    """timm's name -> value of each MODEL key that only restates the model's sizes"""
    defaults: Mapping[str, Any]
    """Setting -> the family's default"""
    names: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    """MODEL key whose first number is the image size"""

    @property
    def size_keys(self) -> frozenset[str]:
        """The MODEL keys that restate sizes."""
        return frozenset(key for sizes in self.models.values() for key in sizes)

    def timm_name(self, name: str) -> str | None:
        """The timm model that PaddleViT's NAME means; None if it is none of this family's."""
        name = name.strip().casefold()
        for pattern, replacement in self.names:
            if name in self.models:
                break
            name = re.sub(pattern, replacement, name)
        return name if name in self.models else None


class Missing(NamedTuple):
    """A family of PaddleViT that timm lacks."""

    title: str
    nearest: str
    """The most similar timm model."""


@cache
def families() -> dict[str, Family]:
    """TYPE in small letters -> family."""
    tables = _read()
    found = {}
    for word, table in tables["families"].items():
        common = table.pop("sizes", {})
        also = table.pop("also", ())
        models = {name: {**common, **sizes} for name, sizes in table.pop("models").items()}
        own = table.pop("defaults")
        defaults = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in {**tables["defaults"], **own}.items()
        }
        names = tuple((pattern, replacement) for pattern, replacement in table.pop("names", ()))
        found |= dict.fromkeys((word, *also), Family(models=models, defaults=defaults, names=names, **table))
    return found


@cache
def missing() -> dict[str, Missing]:
    """TYPE in small letters -> family that timm lacks."""
    return {word: Missing(*row) for word, row in _read()["missing"].items()}


def _read() -> dict[str, Any]:
    # libyaml's loader takes 30 ms, the one in Python 240 ms; both build plain values only.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


TYPE, NAME, IMAGE_SIZE = "MODEL.TYPE", "MODEL.NAME", "DATA.IMAGE_SIZE"
_SIZES = ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS", "STAGE_DEPTHS")
SIZES_OF_OURS = frozenset(f"MODEL.{key}" for key in _SIZES)
MOST_NAMES = 6
"""Models named in a message."""


def refuse_missing(family: Missing, layers: Sequence[Layer]) -> None:
    """UserError in one line, if the settings describe a model of a family that timm lacks."""
    kind = _last(layers, TYPE)
    keys = [leaf for layer in layers for unknown in layer.unknown for leaf in unknown.leaves]
    keys += [
        key for layer in layers for key, entry in layer.entries.items() if key in SIZES_OF_OURS and not _is_empty(entry)
    ]
    if kind is None or not keys:
        return
    keys = [key.removeprefix("MODEL.") for key in dict.fromkeys(keys)]
    raise UserError(
        f"{kind.source}: MODEL.TYPE {kind.value}: timm has no {family.title}; its nearest model is {family.nearest}. "
        f"To train that one, set MODEL.NAME to it, and leave out MODEL.TYPE and {_some(keys)}"
    )


def translate(family: Family, layers: Sequence[Layer]) -> list[str]:
    """Change the layers' entries to vitamp's settings; returns lines for the log."""
    sizes = {key: entry for layer in layers for key, entry in _take_sizes(family, layer).items()}
    for layer in layers:  # settings of ours that PaddleViT calls by another name
        for unknown in list(layer.unknown):
            if ours := family.renamed.get(unknown.key.removeprefix("MODEL.")):
                layer.unknown.remove(unknown)
                for entry in unknown.leaves.values():
                    layer.set(ours, entry.value, entry.source)
    image = _image_size(family, layers, sizes)
    name = _last(layers, NAME)
    if not sizes and name is None:
        raise UserError(f"{_where(layers)}: MODEL.NAME is not set; timm has {_some(list(family.models))}")
    built = _model_of(family, name, sizes, _image_text(family, layers))
    if built is None:
        return image
    layer = next((layer for layer in reversed(layers) if NAME in layer.entries), layers[-1])
    layer.entries[NAME] = Entry(built, name.source if name else layer.name)
    return [*image, *_note(family, name, built, sizes)]


def _take_sizes(family: Family, layer: Layer) -> dict[str, Entry]:
    """Remove the keys that restate sizes from a layer; returns those with a value."""
    taken: dict[str, Entry] = {}
    for key in [key for key in layer.entries if key.removeprefix("MODEL.") in family.size_keys]:
        if key.startswith("MODEL."):
            taken[key.removeprefix("MODEL.")] = layer.entries.pop(key)
    for unknown in list(layer.unknown):
        mine = [key for key in unknown.leaves if key.removeprefix("MODEL.") in family.size_keys]
        taken |= {key.removeprefix("MODEL."): unknown.leaves.pop(key) for key in mine}
        if mine:
            layer.unknown.remove(unknown)
            layer.unknown += [unknown.leaf(key) for key in unknown.leaves]
    return {key: entry for key, entry in taken.items() if not _is_empty(entry)}


def _image_size(family: Family, layers: Sequence[Layer], sizes: Mapping[str, Entry]) -> list[str]:
    """DATA.IMAGE_SIZE of a family whose files give the size that the model computes with in another key."""
    entry = sizes.get(family.image)
    if entry is None or not isinstance(entry.value, list | tuple):
        return []
    layer = next(layer for layer in layers if entry.source.startswith(layer.name))
    before, size = layer.entries.get(IMAGE_SIZE), str(entry.value[0])
    if before is None or str(before.value) == size:
        return []
    layer.entries[IMAGE_SIZE] = Entry(size, entry.source)
    return [
        f"{entry.source}: images of {size} pixels: PaddleViT loads {before.value} and enlarges them in the model "
        f"(MODEL.{family.image}), timm's {family.title} takes {size}"
    ]


def _model_of(family: Family, name: Entry | None, sizes: Mapping[str, Entry], image: str) -> str | None:
    """The timm model that the file describes; None if NAME alone says it, and is not one of the family's."""
    named = family.timm_name(str(name.value)) if name else None
    fits = [model for model in family.models if not list(_differing(family, model, sizes))]
    if not sizes or named in fits:
        return named
    if named and name and not _in_one_file(name, sizes):
        raise UserError(_contradiction(family, name, named, sizes))
    at_size = [model for model in fits if model.endswith(f"_{image}")]
    if len(fits) == 1 or len(at_size) == 1:
        return (at_size if len(at_size) == 1 else fits)[0]
    if named and name and not fits:
        raise UserError(_contradiction(family, name, named, sizes))
    given = ", ".join(f"{key} {_text(entry)}" for key, entry in sizes.items())
    some = next(iter(sizes.values())).source
    if fits:
        raise UserError(f"{some}: MODEL.NAME is not set, and these sizes ({given}) are those of {either(fits)}")
    raise UserError(
        f"{some}: timm has no {family.title} of these sizes ({given}); it has {_some(list(family.models))}: set "
        "MODEL.NAME to one of them, and leave the sizes out"
    )


def _contradiction(family: Family, name: Entry, named: str, sizes: Mapping[str, Entry]) -> str:
    """One line with the sizes that differ from those of the model that NAME means."""
    differing = list(_differing(family, named, sizes))
    has = family.models[named]
    words = ", ".join(f"MODEL.{key} {_text(sizes[key])} (timm's: {one_line(_as_tuple(has[key]))})" for key in differing)
    return (
        f"{sizes[differing[0]].source}: {words}: MODEL.NAME {name.value} is timm's {named}, whose sizes cannot be "
        "changed; leave the keys out, or name another model"
    )


def _note(family: Family, name: Entry | None, built: str, sizes: Mapping[str, Entry]) -> Iterator[str]:
    """One line on the model that is built, and on keys that changed nothing."""
    given = str(name.value) if name else ""
    same = f"; the file restates its sizes ({', '.join(sizes)})" if sizes else ""
    if name and family.timm_name(given) not in (None, built):
        yield (
            f"{name.source}: MODEL.NAME {given} is not the {family.title} that the file describes: its sizes are those "
            f"of timm's {built}, which is built"
        )
    elif given != built:
        label = f"MODEL.NAME {given}" if name else f"MODEL.NAME is not set; the {family.title} of these sizes"
        yield f"{label} is timm's {built}{same}"
    elif sizes:
        yield f"MODEL.NAME {given}{same}"


def _differing(family: Family, model: str, sizes: Mapping[str, Entry]) -> Iterator[str]:
    """The keys whose value is not the model's; a key of another model in the family always differs."""
    has = family.models[model]
    yield from (key for key, entry in sizes.items() if key not in has or _plain(entry.value) != _plain(has[key]))


def _in_one_file(name: Entry, sizes: Mapping[str, Entry]) -> bool:
    """Whether NAME and the sizes were written together, so that NAME may be a slip of the file."""
    file = name.source.rpartition(":")[0]
    return bool(file) and all(entry.source.rpartition(":")[0] == file for entry in sizes.values())


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


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _text(entry: Entry) -> str:
    return str(entry.value).replace("'", "")


def _is_empty(entry: Entry) -> bool:
    return entry.value is None or is_no_value(entry.value)


def _last(layers: Sequence[Layer], key: str) -> Entry | None:
    return next((layer.entries[key] for layer in reversed(layers) if key in layer.entries), None)


def _image_text(family: Family, layers: Sequence[Layer]) -> str:
    entry = _last(layers, IMAGE_SIZE)
    return str(entry.value if entry else family.defaults.get(IMAGE_SIZE, default_of(IMAGE_SIZE)))


def _where(layers: Sequence[Layer]) -> str:
    kind = _last(layers, TYPE)
    return f"{kind.source}: MODEL.TYPE {kind.value}" if kind else layers[-1].name


def _some(words: Sequence[str]) -> str:
    """The first words of a list, and how many more there are."""
    more = len(words) - MOST_NAMES
    return ", ".join(words[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
