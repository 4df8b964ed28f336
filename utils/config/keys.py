"""The keys there are, their older spellings, what each takes in words, and the nearest one to a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from utils.config.schema import Config

# Spellings of earlier PaddleViT files and the key each means today.
RENAMED = {
    "MODEL.DROP_PATH": "MODEL.DROPPATH",
    "MODEL.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    "MODEL.NUM_LAYERS": "MODEL.DEPTH",
    "MODEL.IN_CHANNELS": "DATA.IMAGE_CHANNELS",
}
# The first ViT files gave the MLP's width itself; it becomes MODEL.MLP_RATIO with the width beside it.
MLP_WIDTH = "MODEL.MLP_DIM"
NESTED = "MODEL.TRANS"
OF_ONE_START = (
    *("OUTPUT", "TRAIN.LAST_EPOCH", "MODEL.RESUME", "MAX_TIME", "PROFILE", "EVAL", "NGPUS"),
    *("DIST.HOST", "DIST.PORT", "DIST.RANK", "DIST.WORLD_SIZE"),
)
"""These belong to one start of a run, not to the run: where it lay, who started it, and for how long."""


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if is_section(field):
            yield from _walk(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


@cache
def settings() -> dict[str, FieldInfo]:
    """Dotted key -> field of every setting, in the order of the schema. BASE is spent in loading and not among them."""
    return {key: field for key, field in _walk(Config, "") if not is_section(field) and key != "BASE"}


@cache
def sections() -> dict[str, str]:
    """Dotted name -> what it is about, of every section."""
    return {
        key: (field.annotation.__doc__ or field.description or "").strip()
        for key, field in _walk(Config, "")
        if is_section(field)
    }


def canonical(key: str) -> str:
    """Today's name of a key; the older nesting MODEL.TRANS.* is flat now."""
    if key == NESTED or key.startswith(NESTED + "."):
        key = "MODEL" + key.removeprefix(NESTED)
    return RENAMED.get(key, key)


def takes_text(key: str) -> bool:
    """Is the value text, to be kept letter by letter (`TAG: 007`, `MAX_TIME: 12:00:00`)?"""
    field = settings().get(key)
    return field is not None and field.annotation in (str, str | None)


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as sections in one another, the way the schema takes them."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def default_of(key: str) -> Any:
    return value_of(_defaults(), key)


def values_to_keep(config: Config) -> dict[str, Any]:
    """The settings of a run, by dotted key, as a checkpoint keeps them."""
    return {key: value_of(config, key) for key in settings() if key not in OF_ONE_START}


@cache
def _defaults() -> Config:
    return Config()


@cache
def _properties() -> dict[str, dict[str, Any]]:
    schema = Config.model_json_schema()

    def walk(model: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, entry in model["properties"].items():
            yield prefix + name, entry
            if "$ref" in entry:
                yield from walk(schema["$defs"][entry["$ref"].rsplit("/", 1)[1]], f"{prefix}{name}.")

    return dict(walk(schema, ""))


def allowed(key: str) -> str:
    """What a setting takes, in words: 'whole number >= 1', 'auto, fp16 or bf16'."""
    return _either(_kinds(_properties()[key]))


def choices(key: str) -> list[str]:
    """The words a setting takes, where it takes one of a few."""
    entry = _properties()[key]
    return [word for kind in entry.get("anyOf", [entry]) for word in _words(kind)]


def _words(kind: dict[str, Any]) -> list[str]:
    return [str(word) for word in kind.get("enum", [kind["const"]] if "const" in kind else [])]


def _kinds(entry: dict[str, Any]) -> list[str]:
    if "anyOf" in entry:
        return [kind for part in entry["anyOf"] for kind in _kinds(part)]
    if words := _words(entry):
        return words
    kind = entry["type"]
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        return [_row_in_words(entry)]
    names = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
    return [names[kind] + _limits(entry)]


def _row_in_words(entry: dict[str, Any]) -> str:
    if "prefixItems" in entry:
        return "list of two numbers"
    item = entry["items"]
    if item["type"] == "array":
        return "list of lists of two numbers"
    names = {"integer": "whole numbers", "number": "numbers", "string": "names"}
    return f"list of {names[item['type']]}{_limits(item)}"


def _limits(entry: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[name]:g}" for name, sign in signs.items() if name in entry]
    return " " + " and ".join(limits) if limits else ""


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def suggest(key: str) -> str:
    """' Did you mean DATA.BATCH_SIZE?' for a key that does not exist, looking through all sections."""
    section, _, name = key.rpartition(".")
    known = [*settings(), *sections(), "BASE"]
    same_name = [k for k in known if _last(k) == name.upper()]
    if same_name:
        return f" Did you mean {_either(same_name)}?"
    beside = {_last(k): k for k in known if k.rpartition(".")[0] == canonical(section)}
    found = (
        _closest(name, beside) or _closest(key, {k: k for k in known}) or _closest(name, {_last(k): k for k in known})
    )
    return f" Did you mean {found}?" if found else ""


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _closest(word: str, keys: dict[str, str]) -> str | None:
    folded = {spelling.casefold(): key for spelling, key in keys.items()}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None
