"""Loads the settings: defaults < BASE files < the YAML < flags < KEY=VALUE, each with its source; and writes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.checks import conflicts, notes, warnings
from utils.config.keys import EPOCHS, WARMUP, absolute, default_of, nested, settings, value_of, values_by_key
from utils.config.kinds import AUTO, OWN_SETTING, as_integer, as_names, as_yaml, folded, one_line
from utils.config.read import Entry, Layer, read_files, read_words, type_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.flags import BY_NAME
from utils.record.run_folder import CONFIG, is_of_user
from utils.text import redacted

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
        config, sources = _checked({**entries, **found}, [])
        return replace(self, config=config, sources=sources, notes=(*self.notes, *notes))


def load_config(
    cfg: str | None = None, flags: Mapping[str, tuple[Any, str]] | None = None, words: Mapping[str, str] | None = None
) -> Loaded:
    """Load and check the settings; one UserError reports all problems."""
    lines = []
    if cfg is not None and not Path(cfg).is_file():
        from utils.config.recipes import recipe_file

        cfg, line = recipe_file(cfg)
        lines += [line] if line else []
    files = read_files(cfg) if cfg is not None else []
    typed = read_words({key: value for key, value in (words or {}).items() if key.isupper()})
    typed.entries = {key: Entry(value, source) for key, (value, source) in (flags or {}).items()} | typed.entries
    layers = [*files, typed]
    if any(type_of(layer.entries) != "vit" for layer in layers) or not _merged(layers).keys() <= settings().keys():
        from utils.config.paddlevit import translate

        lines += translate(layers)
    problems = [problem for layer in layers for problem in layer.problems]
    for layer in layers:
        # The config.yaml of a run by an earlier version may have settings that are gone, or were sections.
        gone = [key for key, entry in layer.entries.items() if key not in settings() or entry.value == {}]
        if gone and not is_of_user(f"{layer.name}:"):
            from utils.config.resumed import without_words

            lines.append(without_words(layer.name, gone))
            layer.entries = {key: entry for key, entry in layer.entries.items() if key not in gone}
    given = _merged(layers)
    if unknown := {key: entry for key, entry in given.items() if key not in settings()}:
        from utils.foreign_flags import unknown_keys

        problems += unknown_keys(given, unknown)
        given = {key: entry for key, entry in given.items() if key not in unknown}

    # Settings of own code stay where another layer names its files: -use FILE with -resume.
    use = [one for layer in layers if "USE" in layer.entries for one in as_names(layer.entries["USE"].value or ())]
    use += (own := [f"{key}={value}" for key, value in (words or {}).items() if not key.isupper()])
    use = [one for one in use if isinstance(one, str) and OWN_SETTING.fullmatch(one)]
    if of_own := {one.partition("=")[0].strip(): one for one in use}:
        before = given.get("USE", Entry((), typed.name))
        if before.value:
            code = [one for one in as_names(before.value) if one not in use]
            given["USE"] = Entry([*code, *of_own.values()], before.source)
        elif own:
            from utils.foreign_flags import by_table

            key, _, value = own[0].partition("=")
            name = key.rpartition(".")[2]  # of another program, such as trainer.max_epochs=3
            advice = f" Did you mean -{name}?" if name in BY_NAME else by_table(name, value, BY_NAME)
            problems.append(
                f"{typed.name}: {own[0]}: no such setting; one of your own code needs its file: -use FILE.{advice}"
            )

    pair, recipe = {EPOCHS, WARMUP}, _merged(files)  # a recipe's warm-up belongs to its number of epochs
    proportional = pair & typed.entries.keys() == {EPOCHS} and pair & recipe.keys() != {WARMUP}
    set_before, of_run, defaults = dict(given), {}, {}
    if "MODEL.RESUME" in given:
        from utils.config.resumed import resolved_by_run

        of_run = resolved_by_run(given, None if cfg is None else (WARMUP,) if proportional else ())
        set_before |= of_run
    entries = set_before
    if type_of(given) != "vit" or "DATA.MULTI_LABEL" in given or "MODEL.MAE_PRETRAIN" in given:
        from utils.config.families import defaults_by

        defaults, about = defaults_by(set_before)
        entries, lines = {**defaults, **set_before}, [*lines, *about]
    config, sources = _checked(entries, problems)
    if proportional and WARMUP not in of_run:
        below = {EPOCHS: Entry(default_of(EPOCHS), DEFAULT), **defaults, **recipe}
        before, now, warmup = as_integer(below[EPOCHS].value), config.TRAIN.NUM_EPOCHS, config.TRAIN.WARMUP_EPOCHS
        # With auto, the warm-up is a fraction: of a run of one epoch.
        length, of = (1 if folded(value) == AUTO else value for value in (now, before))
        if warmup and length and isinstance(of, int) and of not in (0, length):
            part, by = round(warmup * length / of, 6), sources[EPOCHS]
            config, sources = _checked({**entries, WARMUP: Entry(part, f"{by}, in proportion")}, [])
            lines.append(
                f"{WARMUP} {part:g}: the recipe's {warmup:g} of {before} epochs, in proportion to {EPOCHS} {now} ({by})"
            )
    lines += [
        note + _of_family(sources, note) for note in notes(config, {key: one.source for key, one in given.items()})
    ]
    return Loaded(config, sources, tuple(lines), () if config.EVAL else tuple(warnings(config, sources)))


def _merged(layers: Iterable[Layer]) -> dict[str, Entry]:
    return {key: entry for layer in layers for key, entry in layer.entries.items()}


def config_of_run(folder: Path) -> Config:
    """The settings in the config.yaml of a run."""
    return load_config(str(folder / CONFIG)).config


def _checked(entries: Mapping[str, Entry], problems: list[str]) -> tuple[Config, dict[str, str]]:
    """The frozen settings and their sources. Raises a UserError with all problems."""
    sources = {key: entries[key].source if key in entries else DEFAULT for key in settings()}
    where = {key: "" if source == DEFAULT else f"{source}: " for key, source in sources.items()}
    try:
        config = Config.model_validate(nested({key: entry.value for key, entry in entries.items()}))
    except ValidationError as error:
        from utils.config.words import expected

        found: dict[str, str] = {}
        for details in error.errors():
            # The location may end with the branch of a union or an index of a list.
            parts = [str(part) for part in details["loc"]]
            key = next(key for end in range(1, 5) if (key := ".".join(parts[:end])) in settings())
            source = sources[key]  # a flag that sets two keys gets one line
            text = f"{where[key]}{key}: {expected(key, entries[key].value)}"
            found.setdefault(source if source.startswith("-") else key, text)
        problems = [*problems, *found.values()]
    else:
        if not problems:
            problems = [f"{where[key]}{key}: {text}{_of_family(sources, text)}" for key, text in conflicts(config)]
        if not problems:
            return config, sources
    if len(problems) == 1:
        raise UserError(problems[0])
    raise UserError("\n  ".join([f"{len(problems)} settings are wrong:", *problems]))


def _of_family(sources: Mapping[str, str], text: str) -> str:
    """' (KEY: default (swin))' for settings in `text` that are a family's defaults."""
    named = [key for key, source in sources.items() if source.startswith(f"{DEFAULT} (") and key in text]
    return f" ({', '.join(named)}: {sources[named[0]]})" if named else ""


def to_yaml(config: Config) -> str:
    """The settings as YAML, section by section; loading it gives an equal Config."""
    return as_yaml(nested(values_by_key(config)))


def format_config(loaded: Loaded) -> str:
    """The settings as YAML with `# source` after each; the output of -print_config, without passwords of URLs."""
    keys = iter(settings())  # each has a line; the others are the headings of sections
    lines = [(redacted(line), "" if line.endswith(":") else next(keys)) for line in to_yaml(loaded.config).splitlines()]
    width = max(len(line) for line, key in lines if key and len(line) <= 60)
    return "".join(f"{line:<{width}}  # {loaded.sources[key]}\n" if key else f"{line}\n" for line, key in lines)


def differences(old: Config, new: Config) -> list[str]:
    """'TRAIN.BASE_LR: 0.003 -> 0.001' for each setting that differs."""
    # -batch_size sets BATCH_SIZE_EVAL, too; null means the same.
    follows = all(config.DATA.BATCH_SIZE_EVAL in (None, config.DATA.BATCH_SIZE) for config in (old, new))
    found = []
    here = os.getcwd()
    for key in settings():
        before, now = (absolute(key, value_of(config, key), here) for config in (old, new))
        same = before == now or (isinstance(now, str) and redacted(now) == before)  # a saved URL has no password
        if not same and not (follows and key == "DATA.BATCH_SIZE_EVAL"):
            found.append(f"{key}: {one_line(before)} -> {one_line(now)}")
    return found


def config_hash(config: Config) -> str:
    """SHA-256 of all settings: equal for equal settings, on every machine."""
    return hashlib.sha256(json.dumps(values_by_key(config), sort_keys=True).encode()).hexdigest()
