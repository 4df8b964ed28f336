"""Loads the settings: defaults < BASE files < the YAML < flags < KEY=VALUE, each with its source; and writes them."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from utils.config.checks import conflicts, notes, warnings
from utils.config.families import (
    FAMILIES,
    TYPE,
    defaults_of,
    drop_fixed,
    family_note,
    family_of,
    foreign_type,
    implied_by,
    implied_notes,
    translated,
)
from utils.config.keys import allowed, choices, nested, sections, settings, suggest, value_of
from utils.config.kinds import OWN_SETTING, OneLine, as_names, is_no_value, one_line
from utils.config.read import Entry, Layer, Unknown, read_files, read_words
from utils.config.resumed import resolved_by_run, without_words
from utils.config.schema import Config
from utils.errors import UserError, closest, either, nearest
from utils.log import warn_once
from utils.program import ROOT
from utils.record.run_folder import CONFIG, is_of_user
from utils.text import redacted

FOLDER = ROOT / "configs"
ENDINGS = (".yaml", ".yml")
MOST_SUGGESTED = 3


def file_of(cfg: str) -> tuple[str, str]:
    """The file that -cfg names, and a line for the log if it is found by the name of a recipe. A file comes first."""
    path = Path(cfg)
    if path.is_file():
        if path.name == cfg and cfg in shipped():
            # At once, not among the notes of the settings: an error in this file's settings needs the explanation too.
            warn_once(
                f"-cfg {cfg}: the file {cfg} in the current folder is used, not the recipe of this name that comes "
                f"with vitamp ({_as_seen(shipped()[cfg])}). Rename the file, or name the recipe by this path."
            )
        return cfg, ""
    if path.suffix in ENDINGS:
        if path.stem in shipped() and not path.exists():
            raise UserError(f"{cfg}: no such file. Did you mean -cfg {path.stem}, a recipe that comes with vitamp?")
        return cfg, ""
    if path.name == cfg and cfg in shipped():
        file = str(_as_seen(shipped()[cfg]))
        return file, f"-cfg {cfg}: {file}, a recipe that comes with vitamp"
    if path.name == cfg and not path.exists():
        similar = difflib.get_close_matches(cfg, shipped(), MOST_SUGGESTED)
        suggestion = f" Did you mean {either(similar)}?" if similar else ""
        raise UserError(f"-cfg {cfg}: no such file, and no recipe of this name.{suggestion} {_folder_in_words()}")
    return cfg, ""


@cache
def shipped() -> dict[str, Path]:
    """Recipes by name. Files that begin with an underscore are parts of others."""
    return {file.stem: file for file in sorted(FOLDER.rglob("*.yaml")) if not file.name.startswith("_")}


def _folder_in_words() -> str:
    return f"The recipes are in {_as_seen(FOLDER)}; {_as_seen(ROOT / 'docs/recipes.md')} describes them."


def _as_seen(path: Path) -> Path:
    """Relative to the current folder, if it is below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """The settings of a run, checked and frozen, and where each comes from."""

    config: Config
    sources: dict[str, str]
    """Dotted key -> 'configs/x.yaml:12', '-batch_size', 'command line', 'default' or 'default (swin)'."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""
    warnings: tuple[str, ...] = ()
    """Warnings for the log."""

    def is_default(self, key: str) -> bool:
        """Whether neither a file nor the command line set this key."""
        return self.sources[key].partition(" ")[0] == DEFAULT

    def with_values(self, found: Mapping[str, Entry], notes: Iterable[str] = ()) -> Loaded:
        """The same settings with values that only the data or the weights could give, checked together as a user's."""
        entries = {key: Entry(value_of(self.config, key), source) for key, source in self.sources.items()}
        config, problems = _validate({**entries, **found})
        sources = {**self.sources, **{key: entry.source for key, entry in found.items()}}
        if config is None:
            raise UserError(_report(problems))
        _raise_conflicts(config, sources)
        return replace(self, config=config, sources=sources, notes=(*self.notes, *notes))


def load_config(
    cfg: str | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    words: Mapping[str, str] | None = None,
) -> Loaded:
    """Load and check the settings; one UserError reports all problems."""
    file, recipe_note = file_of(cfg) if cfg is not None else (None, "")
    files = read_files(file) if file is not None else []
    own = [f"{key}={value}" for key, value in (words or {}).items() if not key.isupper()]
    word_layer = read_words({key: value for key, value in (words or {}).items() if key.isupper()})
    typed = {key: Entry(value, source) for key, (value, source) in (flags or {}).items()}
    word_layer.entries = typed | word_layer.entries
    layers = [*files, word_layer]
    of_paddlevit = translated(_merged(layers), layers)
    given = _merged(layers)
    before = given.get("USE", Entry((), "command line"))
    # Settings of own code stay where another layer names its files: -use FILE with -resume.
    named = [one for layer in layers if "USE" in layer.entries for one in as_names(layer.entries["USE"].value or ())]
    of_own = {one.partition("=")[0].strip(): one for one in (*named, *own) if OWN_SETTING.fullmatch(one)}
    if of_own and before.value:
        code = [one for one in as_names(before.value) if not OWN_SETTING.fullmatch(one)]
        given["USE"] = Entry([*code, *of_own.values()], before.source)
    problems = drop_fixed(given)
    if own and not before.value:
        problems.append(f"command line: {own[0]}: no such setting; one of your own code needs its file: -use FILE")
    family = family_of(given)
    defaults = defaults_of(family, given)
    resolved = resolved_by_run(given)
    implied = implied_by(given)
    family_entries = {key: Entry(value, f"{DEFAULT} ({family})") for key, value in defaults.items()}
    implied_entries = {key: Entry(value, f"{DEFAULT} ({by})") for key, (value, by) in implied.items()}
    entries = {**family_entries, **implied_entries, **given, **resolved}

    # The config.yaml of a run by an earlier version may have settings that are gone.
    of_runs = [layer for layer in files if layer.unknown and not is_of_user(f"{layer.name}:")]
    unknown = [key for layer in layers if layer not in of_runs for key in layer.unknown]
    problems += _unknown_keys(given, unknown)
    problems += [problem for layer in layers for problem in layer.problems]
    config, invalid = _validate(entries)
    problems += invalid
    sources = {key: entries[key].source if key in entries else DEFAULT for key in settings()}
    if config is None or problems:
        raise UserError(_report(problems))
    _raise_conflicts(config, sources)
    set_before = {**given, **resolved}
    lines = [recipe_note] if recipe_note else []
    lines += of_paddlevit + family_note(family, defaults, set_before) + implied_notes(implied, set_before)
    lines += [without_words(layer.name, [key.key for key in layer.unknown]) for layer in of_runs]
    sources_given = {key: entry.source for key, entry in given.items()}
    lines += [f"{note}{_of_family(sources, note)}" for note in notes(config, sources_given)]
    warned = () if config.EVAL else tuple(warnings(config, [layer.entries for layer in layers], sources))
    return Loaded(config, sources, tuple(lines), warned)


def _merged(layers: Sequence[Layer]) -> dict[str, Entry]:
    return {key: entry for layer in layers for key, entry in layer.entries.items()}


def config_of_run(folder: Path) -> Config:
    """The settings in the config.yaml of a run."""
    return load_config(str(folder / CONFIG)).config


def _unknown_keys(given: Mapping[str, Entry], unknown: Sequence[Unknown]) -> Iterator[str]:
    """One line per key; the keys of a model that vitamp does not build are reported with its MODEL.TYPE."""
    kind = foreign_type(given)
    keys = [one.key for one in unknown]
    of_type = [key for key in keys if kind and (key.startswith("MODEL.") or not closest(key, settings(), 0.9))]
    if of_type:
        yield (
            f"{_where(given[TYPE].source)}MODEL.TYPE {kind} is not one of {', '.join(FAMILIES)}, nor a family of "
            "docs/migrating.md. To train a model of timm instead, set MODEL.NAME "
            f"(-list_models '*{kind}*' lists names) and leave out {', '.join(of_type)}"
        )
    for one in unknown:
        if one.key not in of_type:
            yield f"{one.source}: unknown key {one.key}.{suggest(one.key)}"


def _raise_conflicts(config: Config, sources: Mapping[str, str]) -> None:
    problems = [f"{_where(sources[key])}{key}: {text}{_of_family(sources, text)}" for key, text in conflicts(config)]
    if problems:
        raise UserError(_report(problems))


def _of_family(sources: Mapping[str, str], text: str) -> str:
    """' (KEY: default (swin))' for settings in `text` that are a family's defaults."""
    named = [key for key, source in sources.items() if source.startswith(f"{DEFAULT} (") and key in text]
    return f" ({', '.join(named)}: {sources[named[0]]})" if named else ""


def _validate(entries: Mapping[str, Entry]) -> tuple[Config | None, list[str]]:
    try:
        return Config.model_validate(nested({key: entry.value for key, entry in entries.items()})), []
    except ValidationError as error:
        keys = dict.fromkeys(_key_of(details["loc"]) for details in error.errors())
        lines: dict[str, str] = {}
        for key in keys:  # a flag that sets two keys gets one line
            source = entries[key].source
            group = source if source.startswith("-") else key
            lines.setdefault(group, f"{_where(source)}{key}: {_expected(key, entries[key].value)}")
        return None, list(lines.values())


def _key_of(place: tuple[int | str, ...]) -> str:
    """The setting of a pydantic error, whose location may end with the branch of a union or an index of a list."""
    names = [str(part) for part in place]
    return next(key for end in range(1, len(names) + 1) if (key := ".".join(names[:end])) in settings())


def _expected(key: str, value: Any) -> str:
    if value is None or is_no_value(value):
        return f"expected {allowed(key)}, got no value; leave the key out to get its default"
    if isinstance(value, dict):
        return f"expected {allowed(key)}, got a section"
    suggestion = nearest(value, choices(key)) if isinstance(value, str) else ""
    return f"expected {allowed(key)}, got {_source_text(value)}.{suggestion}"


def _source_text(value: Any) -> str:
    """A value as its file or command line has it."""
    if isinstance(value, list):
        return "[" + ", ".join(_source_text(item) for item in value) + "]"
    return str(value)


def _where(source: str) -> str:
    return "" if source == DEFAULT else f"{source}: "


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings are wrong:", *(f"  {problem}" for problem in problems)])


def to_yaml(config: Config) -> str:
    """The settings as YAML, section by section; loading it gives an equal Config."""
    return "".join(f"{line}\n" for line, _ in _lines(config))


def format_config(loaded: Loaded) -> str:
    """The settings as YAML with `# source` after each; the output of -print_config, without passwords of URLs."""
    lines = [(redacted(line), loaded.sources[key] if key else "") for line, key in _lines(loaded.config)]
    width = max(len(line) for line, source in lines if source and len(line) <= 60)
    return "".join(f"{line:<{width}}  # {source}\n" if source else f"{line}\n" for line, source in lines)


def _lines(config: Config) -> Iterator[tuple[str, str]]:
    """(line, its key; '' for a section's heading). Top-level settings come last, as in the schema."""
    shown: set[str] = set()
    for key in settings():
        *path, name = key.split(".")
        for depth in range(1, len(path) + 1):
            section = ".".join(path[:depth])
            if section in sections() and section not in shown:
                shown.add(section)
                yield "  " * (depth - 1) + path[depth - 1] + ":", ""
        pair = yaml.dump({name: value_of(config, key)}, Dumper=OneLine, width=float("inf"), allow_unicode=True)
        yield "  " * len(path) + pair.rstrip("\n"), key


def differences(old: Config, new: Config) -> list[str]:
    """'TRAIN.BASE_LR: 0.003 -> 0.001' for each setting that differs."""
    # -batch_size sets BATCH_SIZE_EVAL, too; null means the same.
    follows = all(config.DATA.BATCH_SIZE_EVAL in (None, config.DATA.BATCH_SIZE) for config in (old, new))
    keys = [key for key in settings() if not (follows and key == "DATA.BATCH_SIZE_EVAL")]
    pairs = ((key, value_of(old, key), value_of(new, key)) for key in keys)
    return [f"{key}: {one_line(one)} -> {one_line(other)}" for key, one, other in pairs if not _same(one, other)]


def _same(before: Any, after: Any) -> bool:
    """Whether two values are equal. A saved URL has no password."""
    return before == after or (isinstance(after, str) and redacted(after) == before)


def config_hash(config: Config) -> str:
    """SHA-256 of all settings: equal for equal settings, on every machine."""
    values = {key: value_of(config, key) for key in settings()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
