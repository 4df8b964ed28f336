"""Reads YAML files and command-line words into entries (key, value, source), which are not checked yet.

Values stay text, and the schema gives them their type: YAML's own guesses (`3e-3` is text, `12:00:00` is 43200, `1_0`
is 10) do not apply, and a value means the same in a file and on the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from utils.config.keys import absolute, canonical, sections, settings
from utils.config.kinds import as_names, is_no_value
from utils.errors import UserError, closest, either
from utils.program import ROOT, as_seen
from utils.record.run_folder import is_config_of_run, start_of
from vitamp.files import only_regular


class Kind(Enum):
    """What gives a setting its value."""

    DEFAULT = "the schema, or the model's family"
    RECIPE = "a file of configs/"
    OTHER_MODEL = "a file of configs/, for another model than MODEL.NAME"
    FILE = "a file of the user's"
    RUN = "what a run has saved, perhaps someone else's"
    FLAG = "a flag"
    WORD = "KEY=VALUE"
    TOOL = "a tool by itself"
    FOUND = "the data or the weights"


class Source(str):
    """Where a setting comes from, as messages say it: `configs/x.yaml:12`, `-batch_size` or `command line`."""

    kind: Kind

    def __new__(cls, words: str, kind: Kind) -> Source:
        source = super().__new__(cls, words)
        source.kind = kind
        return source

    @property
    def is_typed(self) -> bool:
        """Whether the setting is on the command line."""
        return self.kind in (Kind.FLAG, Kind.WORD)

    @property
    def is_open(self) -> bool:
        """Whether the weights' own value counts instead."""
        return self.kind in (Kind.DEFAULT, Kind.OTHER_MODEL)


NOT_SET = Source("default", Kind.DEFAULT)


@dataclass(frozen=True)
class Entry:
    value: Any
    source: Source


TYPE = "MODEL.TYPE"


def text_of(given: Mapping[str, Entry], key: str, default: str = "") -> str:
    """A value in small letters."""
    return str(given[key].value).strip().casefold() if key in given else default


def type_of(given: Mapping[str, Entry]) -> str:
    return text_of(given, TYPE, "vit")


@dataclass
class Layer:
    """The settings of one file, or of the words on the command line, and the problems found in it."""

    name: str
    kind: Kind
    entries: dict[str, Entry] = field(default_factory=dict)
    """By dotted key; also keys that are none of ours"""
    problems: list[str] = field(default_factory=list)
    own_words: list[str] = field(default_factory=list)
    """NAME.SETTING=VALUE of own code, beside those in USE"""

    def take_unknown(self) -> dict[str, Entry]:
        """Remove what is no setting: of a run by an earlier version, what is gone, or was a section."""
        gone: dict[str, Entry] = {}
        for key, entry in list(self.entries.items()):
            was_section = self.kind is Kind.RUN and entry.value == {}
            if key not in settings() or was_section:
                gone[key] = self.entries.pop(key)
        return gone

    def set(self, key: str, value: Any, source: Source) -> None:
        """Set a value. `AMP: true` turns the section on; no other section takes a value, and empty sets nothing."""
        key = canonical(key)
        if key in sections():
            if not value or is_no_value(value):
                return
            if key != "AMP" or not isinstance(value, str):
                inside = ", ".join(k.rpartition(".")[2] for k in settings() if k.rpartition(".")[0] == key)
                self.problems.append(f"{source}: {key} is a section, not a setting. Its keys: {inside}.")
                return
            key = "AMP.ENABLED"
        before = self.entries.get(key)
        if before is not None and before.value != value:
            self.problems.append(f"{source}: {key} is set twice: {before.source} has another value")
        self.entries[key] = Entry(value, source)


def merged(layers: Iterable[Layer]) -> dict[str, Entry]:
    """The entries of all layers; later ones override earlier ones."""
    entries: dict[str, Entry] = {}
    for layer in layers:
        entries |= layer.entries
    return entries


def read_recipe(cfg: str | None) -> tuple[list[Layer], list[str]]:
    """The layers of -cfg, a file or the name of a recipe that comes with vitamp, and lines for the log."""
    if cfg is None:
        return [], []
    path = Path(cfg)
    if path.is_file():
        return read_files(cfg), []
    # Files that begin with an underscore are parts of others.
    shipped = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml")) if not file.name.startswith("_")}
    if cfg in shipped:
        file = as_seen(shipped[cfg])
        return read_files(str(file)), [f"-cfg {cfg}: {file}, a recipe that comes with vitamp"]
    if not path.exists() and path.suffix in (".yaml", ".yml") and path.stem in shipped:
        raise UserError(f"{cfg}: no such file. Did you mean -cfg {path.stem}, a recipe that comes with vitamp?")
    if not path.exists() and path.name == cfg and not path.suffix:
        similar = difflib.get_close_matches(cfg, shipped)
        suggestion = f" Did you mean {either(similar)}?" if similar else ""
        where = f"The recipes are in {as_seen(ROOT / 'configs')}; {as_seen(ROOT / 'docs/recipes.md')} describes them."
        raise UserError(f"-cfg {cfg}: no such file, and no recipe of this name.{suggestion} {where}")
    return read_files(cfg), []


def _similar_file(path: Path) -> str:
    """' Did you mean configs/x.yaml?' for a file that cannot be read; '' if it exists, or no name is close."""
    if path.exists() or not path.parent.is_dir():
        return "" if path.exists() else f" The folder {path.parent} does not exist either."
    files = {entry.stem: entry.name for entry in path.parent.iterdir()}
    match = closest(path.stem, files)
    return f" Did you mean {path.parent / files[match]}?" if match else ""


def read_files(name: str, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of the file's BASE files and of the file itself; later ones override earlier ones."""
    path = Path(name)
    if path.resolve() in above:
        raise UserError(f"{name}: BASE leads back to this file; remove it from one of the BASE lists")
    if is_config_of_run(path):
        kind = Kind.RUN
    elif path.resolve().parent == ROOT / "configs":
        kind = Kind.RECIPE
    else:
        kind = Kind.FILE
    layer = Layer(name, kind)
    root = _compose(name)
    start = start_of(path.parent) if kind is Kind.RUN else ""
    if root is not None:
        for key, value, source in _leaves(root, "", layer):
            layer.set(key, absolute(key, value, start), source)
    given = layer.entries.pop("BASE", Entry((), NOT_SET)).value
    layers = list[Layer]()
    for base in as_names(given or ()):
        if base:
            layers += read_files(str(path.parent / str(base)), above + (path.resolve(),))
    layers.append(layer)
    return layers


def _compose(name: str) -> yaml.MappingNode | None:
    """The nodes of a YAML file; None for an empty one."""
    try:
        with open(name, "rb", opener=only_regular) as stream:
            # Composing creates no Python object, whatever tags the file contains.
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.{_similar_file(Path(name))}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = error.problem or error.context
        raise UserError(f"{name}{line}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not a YAML text file: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode | None):
        raise UserError(f"{name}:{root.start_mark.line + 1}: expected `KEY: value` lines")
    return root


DEEPEST = 3
"""Lists in lists that a setting may have, as SIZE_SCHEDULE; deeper ones would let a small file fill the memory."""


def _leaves(node: yaml.MappingNode, prefix: str, layer: Layer) -> Iterator[tuple[str, Any, Source]]:
    """(dotted key, value, source) of each setting in a mapping."""
    for name, value in node.value:
        source = Source(f"{layer.name}:{name.start_mark.line + 1}", layer.kind)
        if not isinstance(name, yaml.ScalarNode) or name.tag.endswith(":merge"):
            # Nested merges let a small file fill the memory.
            layer.problems.append(f"{source}: a key must be a plain word; instead of `<<`, build on files with BASE")
            continue
        key = prefix + name.value
        # Other programs' models have sections in MODEL. Deeper ones, or elsewhere, would let a small file fill the
        # memory, too.
        if isinstance(value, yaml.MappingNode) and (
            canonical(key) in sections() or (key.startswith("MODEL.") and key.count(".") < 3)
        ):
            yield from _leaves(value, f"{key}.", layer)
        else:
            yield key, _plain(value), source


def _plain(node: yaml.Node) -> Any:
    """The value as text, None, or a list of texts and lists."""
    if isinstance(node, yaml.MappingNode):
        return {}
    return None if node.tag.endswith(":null") else _text_of(node, DEEPEST)


def _text_of(node: yaml.Node, depth: int) -> Any:
    if isinstance(node, yaml.SequenceNode) and depth:
        return [_text_of(item, depth - 1) for item in node.value]
    return node.value if isinstance(node, yaml.ScalarNode) else []


def read_typed(flags: Mapping[str, tuple[Any, str]], words: Mapping[str, str]) -> Layer:
    """The layer of the command line. Each KEY=VALUE word is a YAML scalar or list, whose text is kept as written."""
    layer = Layer("command line", Kind.WORD)
    by = Source(layer.name, layer.kind)
    for key, raw in words.items():
        if not key.isupper():
            layer.own_words.append(f"{key}={raw}")
            continue
        field = settings().get(canonical(key))
        try:
            node = yaml.compose(raw, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            node = None
        value: Any = raw.strip()
        if isinstance(node, yaml.SequenceNode) and (field is None or field.annotation not in (str, str | None)):
            value = _plain(node)
        elif isinstance(node, yaml.ScalarNode) and node.style:  # without its quotes
            value = node.value
        if key == "BASE":
            layer.problems.append(f"{layer.name}: BASE belongs in a YAML file")
        else:
            layer.set(key, value, by)
    of_flags = {
        key: Entry(value, name if isinstance(name, Source) else Source(name, Kind.FLAG))
        for key, (value, name) in flags.items()
    }
    layer.entries = of_flags | layer.entries
    return layer
