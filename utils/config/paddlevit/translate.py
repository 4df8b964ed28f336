"""Turns the MODEL section of a PaddleViT file into ours: timm's NAME, without the sizes that it implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from utils.config.keys import default_of
from utils.config.paddlevit.table import Family, Missing
from utils.config.read import Entry, Layer
from utils.config.values import is_no_value, one_line, parse_text
from utils.errors import UserError, either

TYPE, NAME, IMAGE_SIZE = "MODEL.TYPE", "MODEL.NAME", "DATA.IMAGE_SIZE"
SIZES_OF_OURS = frozenset({"PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS", "STAGE_DEPTHS"})
MOST_NAMES = 6
"""Models named in a message."""


def refuse_missing(family: Missing, layers: Sequence[Layer]) -> None:
    """UserError in one line, if the settings describe a model of a family that timm lacks."""
    kind = _last(layers, TYPE)
    keys = [leaf for layer in layers for unknown in layer.unknown for leaf in unknown.leaves]
    keys += [key for layer in layers for key, entry in layer.entries.items() if _is_size(key, entry)]
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
    for layer in layers:
        _rename(family, layer)
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


def _rename(family: Family, layer: Layer) -> None:
    """Set the settings of ours that PaddleViT calls by another name."""
    for unknown in list(layer.unknown):
        ours = family.renamed.get(unknown.key.removeprefix("MODEL."))
        if ours:
            layer.unknown.remove(unknown)
            for entry in unknown.leaves.values():
                layer.set(ours, entry.value, entry.source)


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


def _is_size(key: str, entry: Entry) -> bool:
    return key.removeprefix("MODEL.") in SIZES_OF_OURS and key.startswith("MODEL.") and not _is_empty(entry)


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
