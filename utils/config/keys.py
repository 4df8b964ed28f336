"""All keys: their older names, descriptions of their types, and suggestions for a typo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from utils.config.schema import Config
from utils.errors import closest, either

# Names in earlier PaddleViT files -> the key of today.
RENAMED = {
    "MODEL.DROP_PATH": "MODEL.DROPPATH",
    "MODEL.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    "MODEL.NUM_LAYERS": "MODEL.DEPTH",
    "MODEL.IN_CHANNELS": "DATA.IMAGE_CHANNELS",
    "TRAIN.NORMALIZE_TARGET": "MODEL.NORM_PIX_LOSS",
}
# The first ViT files give the width of the MLP; with MODEL.EMBED_DIM beside it, it becomes MODEL.MLP_RATIO.
MLP_WIDTH = "MODEL.MLP_DIM"
FIXED = ("LOCAL_RANK", "MODEL.ATTN_HEAD_SIZE", "MODEL.QK_SCALE", "MODEL.APE", "MODEL.PATCH_NORM")
"""Keys of PaddleViT that have one value here: families.py checks and drops them."""
OWN_SETTINGS = "USE_SETTINGS"
"""The key for settings of the user's own code in runs before 0.3; they are in USE now."""
NESTED = ("MODEL.TRANS.ENCODER", "MODEL.TRANS")
OF_ONE_START = (*("OUTPUT", "TRAIN.LAST_EPOCH", "MODEL.RESUME", "MAX_TIME", "PROFILE", "EVAL", "DATA.PART", "NGPUS"),)
"""Settings of one start, not of the run: where it was, how it was launched, and for how long."""


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


@cache
def sections() -> dict[str, str]:
    """Dotted name of every section -> its description."""
    return {
        key: (field.annotation.__doc__ or field.description or "").strip()
        for key, field in _walk(Config, "")
        if is_section(field)
    }


def canonical(key: str) -> str:
    """The name of today of a key; MODEL.TRANS.* and MODEL.TRANS.ENCODER.* are older nestings of MODEL.*."""
    for outer in NESTED:
        if key == outer or key.startswith(outer + "."):
            key = "MODEL" + key.removeprefix(outer)
    return RENAMED.get(key, key)


def takes_text(key: str) -> bool:
    """Whether the value is text, kept as written (`TAG: 007`, `MAX_TIME: 12:00:00`)."""
    field = settings().get(key)
    return field is not None and field.annotation in (str, str | None)


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


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


def default_of(key: str) -> Any:
    return value_of(_defaults(), key)


def values_to_keep(config: Config) -> dict[str, Any]:
    """The settings of a run by dotted key, as saved in a checkpoint."""
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
    """A setting's type in words: 'whole number >= 1', 'auto, fp16 or bf16'."""
    return either(_kinds(_properties()[key]))


def choices(key: str) -> list[str]:
    """The words that a setting allows, if it allows only some."""
    entry = _properties()[key]
    return [word for kind in entry.get("anyOf", [entry]) for word in _words(kind)]


def _words(kind: dict[str, Any]) -> list[str]:
    return [str(word) for word in kind.get("enum", [kind["const"]] if "const" in kind else [])]


def _kinds(entry: dict[str, Any], words_of_kind: str = "") -> list[str]:
    """`words_of_kind`: its description in words, of a kind that has one."""
    if "anyOf" in entry:
        return [kind for part in entry["anyOf"] for kind in _kinds(part, part.get("description", ""))]
    if words_of_kind:
        return [words_of_kind]
    if words := _words(entry):
        return words
    kind = entry["type"]
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        return [_list_in_words(entry)]
    names = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
    return [names[kind] + _limits(entry)]


def _list_in_words(entry: dict[str, Any]) -> str:
    if "prefixItems" in entry:
        return "list of two numbers"
    item = entry["items"]
    if item["type"] == "array":
        return "list of lists of two numbers"
    if words := _words(item):
        return f"list of {either(words)}"
    names = {"integer": "whole numbers", "number": "numbers", "string": "names"}
    return f"list of {names[item['type']]}{_limits(item)}"


def _limits(entry: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[name]:g}" for name, sign in signs.items() if name in entry]
    return " " + " and ".join(limits) if limits else ""


def suggest(key: str) -> str:
    """' Did you mean DATA.BATCH_SIZE?' for an unknown key, searched in all sections; '' if none is close."""
    section, _, name = key.rpartition(".")
    known = [*settings(), *sections(), "BASE"]
    same_name = [k for k in known if _last(k) == name.upper()]
    if same_name:
        outermost = min(key.count(".") for key in same_name)
        return f" Did you mean {either([key for key in same_name if key.count('.') == outermost])}?"
    same_section = {_last(k): k for k in known if k.rpartition(".")[0] == canonical(section)}
    any_section = {_last(k): k for k in known}
    match = _closest(name, same_section) or closest(key, known) or _closest(name, any_section)
    return f" Did you mean {match}?" if match else ""


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _closest(name: str, keys: Mapping[str, str]) -> str | None:
    match = closest(name, keys)
    return keys[match] if match else None
