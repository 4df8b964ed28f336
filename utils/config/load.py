"""Defaults <- BASE files <- the YAML <- flags <- words: one checked, frozen Config, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from utils.config.checks import misfits, remarks
from utils.config.families import defaults_of, family_note, family_of
from utils.config.fields import is_no_value, retired_values
from utils.config.keys import allowed, choices, default_of, nested, settings
from utils.config.kinds import folded
from utils.config.read import Entry, read_files, read_words
from utils.config.resumed import kept_defaults
from utils.config.scaled import scaled_unasked
from utils.config.schema import Config
from utils.errors import UserError, nearest

DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """The settings of a run."""

    config: Config
    sources: dict[str, str]
    """Dotted key -> 'configs/x.yaml:12', '-batch_size', 'command line', 'default' or 'default (swin)'."""
    notes: tuple[str, ...] = ()
    """What the log should say about the settings."""
    warnings: tuple[str, ...] = ()
    """The same, where a setting acts otherwise than it looks."""


def load_config(
    cfg: str | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    words: Mapping[str, str] | None = None,
) -> Loaded:
    """Load and check the settings; everything found wrong is reported in one UserError."""
    files = read_files(cfg) if cfg is not None else []
    word_layer = read_words(words or {})
    typed = {key: Entry(value, source) for key, (value, source) in (flags or {}).items()} | word_layer.entries
    layers = [*(layer.entries for layer in files), typed]
    given = {key: entry for layer in layers for key, entry in layer.items()}
    family = family_of(given)
    defaults = defaults_of(family, given)
    kept, kept_note = kept_defaults(given, defaults)
    chosen = {key: Entry(value, f"{DEFAULT} ({family})") for key, value in defaults.items()}
    entries = {**chosen, **kept, **given}

    problems = [problem for layer in [*files, word_layer] for problem in layer.problems]
    config, wrong = _validate(entries)
    problems += wrong
    sources = {key: entries[key].source if key in entries else DEFAULT for key in settings()}
    if config is None or problems:
        raise UserError(_report(problems))
    problems = [f"{_where(sources[key])}{key}: {text}{_of_family(sources, text)}" for key, text in misfits(config)]
    if problems:
        raise UserError(_report(problems))
    notes = family_note(family, defaults, {**kept, **given}) + kept_note + [*_retired(given)]
    about = remarks(config, {key: entry.source for key, entry in given.items()})
    notes += [f"{note}{_of_family(sources, note)}" for note in about]
    return Loaded(config, sources, tuple(notes), tuple(scaled_unasked(config, layers, sources)))


def _retired(given: Mapping[str, Entry]) -> Iterator[str]:
    for key, entry in given.items():
        if isinstance(entry.value, str) and (why := retired_values(settings()[key]).get(folded(entry.value))):
            yield (
                f"{_where(entry.source)}{key} {entry.value} is accepted and without effect, {default_of(key)} is used: "
                f"{why}"
            )


def _of_family(sources: Mapping[str, str], text: str) -> str:
    """Which settings named in `text` nobody set, but come with the family."""
    named = [key for key, source in sources.items() if source.startswith(f"{DEFAULT} (") and key in text]
    return f" ({', '.join(named)}: {sources[named[0]]})" if named else ""


def _validate(entries: Mapping[str, Entry]) -> tuple[Config | None, list[str]]:
    try:
        return Config.model_validate(nested({key: entry.value for key, entry in entries.items()})), []
    except ValidationError as error:
        keys = dict.fromkeys(_key_of(details["loc"]) for details in error.errors())
        return None, _once_a_source({key: entries[key] for key in keys})


def _key_of(place: tuple[int | str, ...]) -> str:
    """The setting an error is about; pydantic adds the branch of a union or the position in a list."""
    names = [str(part) for part in place]
    return next(key for end in range(1, len(names) + 1) if (key := ".".join(names[:end])) in settings())


def _once_a_source(wrong: Mapping[str, Entry]) -> list[str]:
    """One line for each bad value; a flag that sets two keys is still one mistake."""
    lines = {}
    for key, entry in wrong.items():
        group = entry.source if entry.source.startswith("-") else key
        lines.setdefault(group, f"{_where(entry.source)}{key}: {_what_is_wrong(key, entry.value)}")
    return list(lines.values())


def _what_is_wrong(key: str, value: Any) -> str:
    if value is None or is_no_value(value):
        return f"has no value; it takes {allowed(key)}; leave the key out to get its default"
    if isinstance(value, dict):
        return f"is a single setting, not a section; it takes {allowed(key)}"
    hint = nearest(value, choices(key)) if isinstance(value, str) else ""
    return f"{_as_written(value)} is not what it takes: {allowed(key)}.{hint}"


def _as_written(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_as_written(item) for item in value) + "]"
    return str(value)


def _where(source: str) -> str:
    return "" if source == DEFAULT else f"{source}: "


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings are wrong:", *(f"  {problem}" for problem in problems)])
