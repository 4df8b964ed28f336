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
    """The kind of place from which a setting comes."""

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
        """Whether the value gives way to the value that pretrained weights were trained with."""
        return self.kind in (Kind.DEFAULT, Kind.OTHER_MODEL)


NOT_SET = Source("default", Kind.DEFAULT)


@dataclass(frozen=True)
class Entry:
    value: Any
    source: Source


TYPE = "MODEL.TYPE"


def text_of(given: Mapping[str, Entry], key: str, default: str = "") -> str:
    """The value of a setting as text in lower case; `default` if the setting is not given."""
    return str(given[key].value).strip().casefold() if key in given else default


def type_of(given: Mapping[str, Entry]) -> str:
    """MODEL.TYPE in lower case; vit if it is not given."""
    return text_of(given, TYPE, "vit")


@dataclass
class Layer:
    """The settings of one file, or of the words on the command line, and the problems found in it."""

    name: str
    kind: Kind
    entries: dict[str, Entry] = field(default_factory=dict)
    """Dotted key -> entry; some keys may be no settings."""
    problems: list[str] = field(default_factory=list)
    own_words: list[str] = field(default_factory=list)
    """Settings of the user's own code as NAME.SETTING=VALUE, besides those in USE."""

    def take_unknown(self) -> dict[str, Entry]:
        """Remove and return the entries that are no settings.

        In the config.yaml of a run by an earlier version, these include keys that are settings now, but were a section
        then.
        """
        unknown: dict[str, Entry] = {}
        for key, entry in list(self.entries.items()):
            was_section = self.kind is Kind.RUN and entry.value == {}  # A section is read as {}.
            if key not in settings() or was_section:
                unknown[key] = self.entries.pop(key)
        return unknown

    def set(self, key: str, value: Any, source: Source) -> None:
        """Set a value, under our key for `key`; a second, different value is added to `problems`.

        The value of a section is a problem, too. But `AMP: true` turns AMP on, and an empty section sets nothing.
        """
        our_key = canonical(key)
        if our_key in sections():
            if not value or is_no_value(value):
                return
            if our_key != "AMP" or not isinstance(value, str):
                keys = [k.rpartition(".")[2] for k in settings() if k.rpartition(".")[0] == our_key]
                problem = f"{our_key} is a section, not a setting. Its keys: {', '.join(keys)}."
                self.problems.append(f"{source}: {problem}")
                return
            our_key = "AMP.ENABLED"
        earlier = self.entries.get(our_key)
        if earlier is not None and earlier.value != value:
            self.problems.append(f"{source}: {our_key} is set twice: {earlier.source} has another value")
        self.entries[our_key] = Entry(value, source)


def merged(layers: Iterable[Layer]) -> dict[str, Entry]:
    """The entries of all layers; later ones override earlier ones."""
    entries: dict[str, Entry] = {}
    for layer in layers:
        entries |= layer.entries
    return entries


def read_recipe(cfg: str | None) -> tuple[list[Layer], list[str]]:
    """Read -cfg, a file or the name of a recipe that comes with vitamp; return its layers and lines for the log.

    A file counts before a recipe. A UserError that suggests the right recipe if there is neither.
    """
    if cfg is None:
        return [], []
    path = Path(cfg)
    if path.is_file():
        return read_files(cfg), []

    # Files that begin with an underscore are only for the BASE lists of others.
    recipes = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml")) if not file.name.startswith("_")}
    if cfg in recipes:
        file = as_seen(recipes[cfg])  # relative to the current folder, as the user would write it
        return read_files(str(file)), [f"-cfg {cfg}: {file}, a recipe that comes with vitamp"]
    if not path.exists() and path.suffix in (".yaml", ".yml") and path.stem in recipes:
        raise UserError(f"{cfg}: no such file. Did you mean -cfg {path.stem}, a recipe that comes with vitamp?")
    is_recipe_name = path.name == cfg and not path.suffix
    if not path.exists() and is_recipe_name:
        similar = difflib.get_close_matches(cfg, recipes)
        suggestion = f" Did you mean {either(similar)}?" if similar else ""
        where = f"The recipes are in {as_seen(ROOT / 'configs')}; {as_seen(ROOT / 'docs/recipes.md')} describes them."
        raise UserError(f"-cfg {cfg}: no such file, and no recipe of this name.{suggestion} {where}")
    return read_files(cfg), []  # a pipe, or a missing file, which is an error that names its cause


def _advice_on_missing(path: Path) -> str:
    """Return a sentence about a file that cannot be read, such as ' Did you mean configs/x.yaml?'.

    '' if the file exists, or if no file beside it has a similar name.
    """
    if path.exists():
        return ""
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    files = {entry.stem: entry.name for entry in path.parent.iterdir()}
    match = closest(path.stem, files)
    return f" Did you mean {path.parent / files[match]}?" if match else ""


def read_files(name: str, extended_by: tuple[Path, ...] = ()) -> list[Layer]:
    """Read a YAML file and its BASE files; return their layers, of which later ones override earlier ones.

    extended_by: the files whose BASE lists led to this one, to find a circle
    """
    path = Path(name)
    if path.resolve() in extended_by:
        raise UserError(f"{name}: BASE leads back to this file; remove it from one of the BASE lists")
    if is_config_of_run(path):
        kind = Kind.RUN
    elif path.resolve().parent == ROOT / "configs":
        kind = Kind.RECIPE
    else:
        kind = Kind.FILE
    layer = Layer(name, kind)
    root = _compose_yaml(name)
    # Relative paths in a run's config.yaml begin in the folder in which the run was started.
    start_folder = start_of(path.parent) if kind is Kind.RUN else ""
    if root is not None:
        for key, value, source in _leaves(root, "", layer):
            layer.set(key, absolute(key, value, start_folder), source)
    # BASE is no setting: its files are read instead.
    base_files = layer.entries.pop("BASE", Entry((), NOT_SET)).value
    layers = list[Layer]()
    for base_file in as_names(base_files or ()):
        if base_file:
            layers += read_files(str(path.parent / str(base_file)), extended_by + (path.resolve(),))
    layers.append(layer)
    return layers


def _compose_yaml(name: str) -> yaml.MappingNode | None:
    """Read a YAML file as nodes (keys and values with their line numbers); None for an empty file."""
    try:
        with open(name, "rb", opener=only_regular) as stream:
            # Composing creates no Python object, whatever tags the file contains.
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.{_advice_on_missing(Path(name))}") from None
    except yaml.MarkedYAMLError as error:
        line_number = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = error.problem or error.context
        raise UserError(f"{name}{line_number}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not a YAML text file: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode | None):
        raise UserError(f"{name}:{root.start_mark.line + 1}: expected `KEY: value` lines")
    return root


DEEPEST = 3
"""Lists in lists that a setting may have, as SIZE_SCHEDULE; deeper ones would let a small file fill the memory."""


def _leaves(node: yaml.MappingNode, prefix: str, layer: Layer) -> Iterator[tuple[str, Any, Source]]:
    """Yield (dotted key, value, source) of each setting in a mapping and its sections.

    A mapping that is no section, but the value of a key, is yielded as {}, which is no valid value.

    prefix: what dotted keys begin with, such as `MODEL.`
    layer: the layer of the file, to which problems are added
    """
    for key_node, value_node in node.value:
        source = Source(f"{layer.name}:{key_node.start_mark.line + 1}", layer.kind)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
            # Nested merges let a small file fill the memory.
            layer.problems.append(f"{source}: a key must be a plain word; instead of `<<`, build on files with BASE")
            continue
        key = prefix + key_node.value
        # Besides our sections, sections in MODEL are read, which other programs' models have. Deeper ones are not read,
        # because sections that refer to each other would let a small file fill the memory.
        is_our_section = canonical(key) in sections()
        is_in_model = key.startswith("MODEL.") and key.count(".") < 3
        if isinstance(value_node, yaml.MappingNode) and (is_our_section or is_in_model):
            yield from _leaves(value_node, f"{key}.", layer)
        else:
            yield key, _plain(value_node), source


def _plain(node: yaml.Node) -> Any:
    """The value of a node as text, None, or a list of texts and lists; a mapping is {}, which is no valid value."""
    if isinstance(node, yaml.MappingNode):
        return {}
    return None if node.tag.endswith(":null") else _text_of(node, DEEPEST)


def _text_of(node: yaml.Node, depth: int) -> Any:
    """A node as text, or as a list of texts and lists; lists that are more than `depth` deep are empty."""
    if isinstance(node, yaml.SequenceNode) and depth > 0:
        return [_text_of(item, depth - 1) for item in node.value]
    return node.value if isinstance(node, yaml.ScalarNode) else []


def read_typed(flags: Mapping[str, tuple[Any, str]], words: Mapping[str, str]) -> Layer:
    """Read the command line into a layer; KEY=VALUE words override flags.

    flags: dotted key -> (value, the flag that gave it, or a Source)
    words: dotted key -> the text after `=`: a YAML scalar or list, whose items stay text
    """
    layer = Layer("command line", Kind.WORD)
    source = Source(layer.name, layer.kind)
    for key, text in words.items():
        if not key.isupper():
            layer.own_words.append(f"{key}={text}")
            continue
        field = settings().get(canonical(key))
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            node = None
        value: Any = text.strip()
        takes_list = field is None or field.annotation not in (str, str | None)
        if isinstance(node, yaml.SequenceNode) and takes_list:
            value = _plain(node)
        elif isinstance(node, yaml.ScalarNode) and node.style:  # a text in quotes, which are left out
            value = node.value
        if key == "BASE":
            layer.problems.append(f"{layer.name}: BASE belongs in a YAML file")
        else:
            layer.set(key, value, source)

    flag_entries: dict[str, Entry] = {}
    for key, (value, flag) in flags.items():
        flag_source = flag if isinstance(flag, Source) else Source(flag, Kind.FLAG)
        flag_entries[key] = Entry(value, flag_source)
    layer.entries = flag_entries | layer.entries
    return layer
