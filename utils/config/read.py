"""Reads YAML files and command-line words into entries (key, value, source), which are not checked yet.

Values stay text, and the schema gives them their type: YAML's own guesses (`3e-3` is text, `12:00:00` is 43200, `1_0`
is 10) do not apply, and a value means the same in a file and on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from utils.config.keys import FIXED, MLP_WIDTH, OWN_SETTINGS, canonical, sections, settings, takes_text
from utils.config.kinds import as_names, is_no_value
from utils.errors import UserError, closest
from utils.record.run_folder import is_of_user
from vitamp.files import only_regular

PLAIN_TAGS = {"null", "bool", "int", "float", "str", "timestamp", "seq", "map", "value", "python/tuple"}


@dataclass(frozen=True)
class Entry:
    """A value and its source: `configs/x.yaml:12`, `-batch_size` or `command line`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Unknown:
    """A key that is none of ours."""

    key: str
    source: str
    leaves: dict[str, Entry]
    """The MODEL settings in it by dotted key, which may be those of another program's family of models"""

    def leaf(self, key: str) -> Unknown:
        """One of the leaves as an unknown key of its own."""
        return Unknown(key, self.leaves[key].source, {key: self.leaves[key]})


@dataclass
class Layer:
    """The settings of one file, or of the words on the command line, and the problems found in it."""

    name: str
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)

    def at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def set(self, key: str, value: Any, source: str) -> None:
        """Set a value; one key under two names must not have two values."""
        before = self.entries.get(key)
        if before is not None and before.value != value:
            self.problems.append(f"{source}: {key} is set twice: {before.source} has another value")
        self.entries[key] = Entry(value, source)

    def set_section(self, section: str, value: Any, source: str) -> None:
        """Set a section to one value: `AMP: true` turns it on; no other section takes one, and empty sets nothing."""
        if value is None or is_no_value(value):
            return
        if section == "AMP" and isinstance(value, str):
            self.set("AMP.ENABLED", value, source)
            return
        inside = ", ".join(k.rpartition(".")[2] for k in settings() if k.rpartition(".")[0] == section)
        self.problems.append(f"{source}: {section} is a section, not a setting. Its keys: {inside}.")


def read_files(cfg: str) -> list[Layer]:
    """The layers of the file's BASE files and of the file itself; later ones override earlier ones."""
    return _read_file(cfg, ())


def _read_file(name: str, above: tuple[Path, ...]) -> list[Layer]:
    path = Path(name)
    if path.resolve() in above:
        raise UserError(f"{name}: BASE leads back to this file; remove it from one of the BASE lists")
    layer = Layer(name)
    bases: list[str] = []
    root = _compose(name)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{layer.at(root)}: expected `KEY: value` lines")
    for key, node, source in _pairs(root, "", layer) if root is not None else ():
        if key == "BASE":
            bases = _base_names(node, source, layer)
        else:
            _take(key, node, source, layer)
    _mlp_ratio_from_width(layer)
    if own := layer.entries.pop(OWN_SETTINGS, None):
        files = layer.entries.get("USE", Entry((), own.source))
        layer.entries["USE"] = Entry([*as_names(files.value or ()), *as_names(own.value or ())], files.source)
    layers = []
    for base in bases:
        layers += _read_file(str(path.parent / base), (*above, path.resolve()))
    return [*layers, layer]


def _compose(name: str) -> yaml.Node | None:
    try:
        with open(name, "rb", opener=only_regular) as stream:
            # Composing creates no Python object, whatever tags the file contains.
            return yaml.compose(stream, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise UserError(f"{name}: no such file.{_similar_file(Path(name))}") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder; -cfg and BASE take a YAML file") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{name}: not a YAML text file in UTF-8: {reason}") from None
    except RecursionError:
        raise UserError(f"{name}: the YAML is nested too deeply for a settings file") from None


def _similar_file(path: Path) -> str:
    try:
        files = {entry.stem: entry.name for entry in path.parent.iterdir()}
    except FileNotFoundError:
        return f" The folder {path.parent} does not exist either."
    except OSError:  # not readable
        return ""
    match = closest(path.stem, files)
    return f" Did you mean {path.parent / files[match]}?" if match else ""


def _pairs(node: yaml.MappingNode, prefix: str, layer: Layer) -> Iterator[tuple[str, yaml.Node, str]]:
    """(dotted key as written, value, source) of a mapping; repeated and malformed keys become problems."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            layer.problems.append(f"{layer.at(key)}: a key must be a plain word")
        elif key.tag.endswith(":merge"):
            # Nested merges let a small file fill the memory; BASE does the same job.
            layer.problems.append(f"{layer.at(key)}: `<<` is not supported; build on other files with BASE")
        elif key.value in seen:
            layer.problems.append(f"{layer.at(key)}: {prefix}{key.value} was already set in line {seen[key.value]}")
        else:
            seen[key.value] = key.start_mark.line + 1
            yield prefix + key.value, value, layer.at(key)


def _take(key: str, node: yaml.Node, source: str, layer: Layer) -> None:
    """Add the setting or section `key` of a file to the layer."""
    today = canonical(key)
    if today in sections():
        if isinstance(node, yaml.MappingNode):
            for inner, value, place in _pairs(node, key + ".", layer):
                _take(inner, value, place, layer)
        else:
            layer.set_section(today, _plain(node, source, layer), source)
    elif today in settings() and isinstance(node, yaml.MappingNode) and not is_of_user(source):
        layer.unknown.append(Unknown(key, source, {}))  # TRAIN.KNN was a section before 0.3
    elif today in settings() or today in (*FIXED, MLP_WIDTH, OWN_SETTINGS):
        layer.set(today, _plain(node, source, layer), source)
    else:
        leaves = dict(_leaves(today, node, source, layer)) if today.startswith("MODEL.") else {}
        layer.unknown.append(Unknown(key, source, leaves))


def _leaves(key: str, node: yaml.Node, source: str, layer: Layer, deepest: int = 2) -> Iterator[tuple[str, Entry]]:
    """The settings in an unknown key. Sections in sections end at `deepest`: no family's file has deeper ones."""
    if isinstance(node, yaml.MappingNode) and deepest:
        for inner, value, place in _pairs(node, key + ".", layer):
            yield from _leaves(inner, value, place, layer, deepest - 1)
    else:
        yield key, Entry(_plain(node, source, layer), source)


def _plain(node: yaml.Node, source: str, layer: Layer) -> Any:
    """The value as text, None, or a list of texts or of lists of texts. No setting has a deeper value."""
    if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
        layer.problems.append(f"{source}: the tag {node.tag} is not allowed in a settings file")
        return None
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else node.value
    if isinstance(node, yaml.SequenceNode):
        return [
            [_text_of(inner) for inner in item.value] if isinstance(item, yaml.SequenceNode) else _text_of(item)
            for item in node.value
        ]
    return {}


def _text_of(node: yaml.Node) -> Any:
    return node.value if isinstance(node, yaml.ScalarNode) else []


def _base_names(node: yaml.Node, source: str, layer: Layer) -> list[str]:
    value = _plain(node, source, layer)
    names = [value] if isinstance(value, str | None) else value
    if not isinstance(names, list) or not all(isinstance(name, str | None) for name in names):
        layer.problems.append(f"{source}: BASE takes a list of files")
        return []
    return [name for name in names if name]


def _mlp_ratio_from_width(layer: Layer) -> None:
    width = layer.entries.pop(MLP_WIDTH, None)
    if width is None:
        return
    beside = layer.entries.get("MODEL.EMBED_DIM")
    try:
        ratio = float(width.value) / float(beside.value) if beside else None
    except (TypeError, ValueError, ZeroDivisionError):
        ratio = None
    if ratio is None:
        layer.problems.append(
            f"{width.source}: MODEL.MLP_DIM needs MODEL.EMBED_DIM in the same file, both as numbers; or use "
            "MODEL.MLP_RATIO"
        )
    else:
        layer.set("MODEL.MLP_RATIO", str(ratio), width.source)


def read_words(words: Mapping[str, str]) -> Layer:
    """The layer of KEY=VALUE words. Each value is a YAML scalar or list; text is kept as written."""
    layer = Layer("command line")
    for key, raw in words.items():
        today = canonical(key)
        value = _word(raw, takes_text(today), layer)
        if today in sections():
            layer.set_section(today, value, layer.name)
        elif today in settings() or today in FIXED:
            layer.set(today, value, layer.name)
        elif key == "BASE":
            layer.problems.append(f"{layer.name}: BASE belongs in a YAML file")
        else:
            leaves = {today: Entry(value, layer.name)} if today.startswith("MODEL.") else {}
            layer.unknown.append(Unknown(key, layer.name, leaves))
    return layer


def _word(raw: str, text: bool, layer: Layer) -> Any:
    try:
        node = yaml.compose(raw, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return raw
    if node is None:
        return raw.strip() or None
    if isinstance(node, yaml.ScalarNode):
        # Quotes are removed; an unquoted word keeps what YAML would read as a comment.
        return node.value if node.style else raw.strip()
    return raw if text else _plain(node, layer.name, layer)
