"""Loads the settings, each with its source, and writes them.

From weak to strong: defaults, those of the model's family, a resumed run, BASE files, the YAML, flags, KEY=VALUE.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from utils.config.checks import conflicts, notes, warnings
from utils.config.keys import (
    CHANGE_DEFAULTS,
    EPOCHS,
    NAME,
    OF_ONE_START,
    PREPROCESSING,
    WARMUP,
    absolute,
    default_of,
    nested,
    settings,
    value_of,
    values_by_key,
    with_checkpoint,
)
from utils.config.kinds import AUTO, as_integer, as_names, as_yaml, folded, is_own_setting, one_line
from utils.config.read import NOT_SET, Entry, Kind, Layer, Source, merged, read_recipe, read_typed, text_of, type_of
from utils.config.resumed import resume_of, settings_of, values_of_run, without_words, written_before_restart
from utils.config.schema import Config
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import CONFIG
from utils.text import redacted

if TYPE_CHECKING:
    from utils.cli import CommandLine
    from vitamp.weights import Chosen


@dataclass(frozen=True)
class Loaded:
    """The settings of a run, checked and frozen, and where each comes from."""

    config: Config
    sources: dict[str, Source]
    """Dotted key -> 'configs/x.yaml:12', '-batch_size', 'command line', 'default' or 'default (swin)'."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Both are for the log."""

    def is_default(self, key: str) -> bool:
        """Whether neither a file nor the command line set this key."""
        return self.sources[key].kind is Kind.DEFAULT

    def with_values(
        self, found: Mapping[str, Any], source: str, notes: Iterable[str] = (), kind: Kind = Kind.FOUND
    ) -> Loaded:
        """The same settings with values that only the data or the weights could give, checked together as a user's."""
        entries = {key: Entry(value_of(self.config, key), known) for key, known in self.sources.items()}
        entries |= {key: Entry(value, Source(source, kind)) for key, value in found.items()}
        config, sources = _checked(entries, [])
        return replace(self, config=config, sources=sources, notes=self.notes + tuple(notes))

    def with_warning(self, text: str) -> Loaded:
        return replace(self, warnings=self.warnings + (text,))


def load_command(command: CommandLine) -> tuple[Loaded, bool]:
    """The settings that a command line asks for, and whether the code that they name in USE is the user's own.

    A resumed run has its own config.yaml, so that resuming needs no -cfg.
    """
    cfg = command.cfg
    flags = command.flags
    words = command.words
    run = None
    if cfg is None:
        resume = resume_of({key: value for key, (value, _) in flags.items()} | words)
        run = resume.run if resume else None
    if run is not None and (run / CONFIG).exists():  # with auto, it may have been killed before it wrote one
        cfg = str(run / CONFIG)
        flags = {key: (default_of(key), "-resume") for key in OF_ONE_START} | flags
    loaded = load_config(cfg, flags, words)
    if written_before_restart(loaded.config):
        loaded = load_config(cfg, flags, words | {"MODEL.RESUME": AUTO})
        log.info("torchrun has restarted this job, which resumes its run.")
    use = loaded.sources["USE"]
    return loaded, use.is_typed or (run is None and use.kind is not Kind.RUN)  # a resumed folder may be someone else's


def load_config(
    cfg: str | None = None, flags: Mapping[str, tuple[Any, str]] | None = None, words: Mapping[str, str] | None = None
) -> Loaded:
    """Load and check the settings; one UserError reports all problems."""
    files, lines = read_recipe(cfg)
    typed = read_typed(flags or {}, words or {})
    layers = files + [typed]
    if any(type_of(layer.entries) != "vit" or layer.entries.keys() - settings() for layer in layers):
        from utils.config.paddlevit import translate

        lines += translate(layers)
    unknown, without = _take_unknown(layers)
    lines += without
    given = merged(layers)
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL"):
        if key in given:
            given[key] = replace(given[key], value=with_checkpoint(key, given[key].value))
    problems = [problem for layer in layers for problem in layer.problems]
    if unknown:
        from utils.foreign_flags import unknown_keys

        problems += unknown_keys(given, unknown)
    problems += _keep_own_settings(given, layers)
    _open_preprocessing(given, files)

    recipe = merged(files)
    defaults = dict[str, Entry]()
    # Whether the command line changes the number of epochs, but not the warm-up that was chosen with it
    alone = EPOCHS in typed.entries and WARMUP not in typed.entries and (WARMUP not in recipe or EPOCHS in recipe)
    of_run = values_of_run(given, all_settings=cfg is None, warmup=alone and cfg is not None)
    known = given | of_run
    if type_of(given) != "vit" or not given.keys().isdisjoint(CHANGE_DEFAULTS):
        from utils.config.families import defaults_by

        defaults, about = defaults_by(known)
        lines += about
    config, sources = _checked(defaults | known, problems)
    loaded = Loaded(config, sources, tuple(lines))
    if alone and WARMUP not in of_run:
        loaded = _with_warmup_in_proportion(loaded, defaults | recipe)
    later = tuple(note + _of_family(loaded.sources, note) for note in notes(loaded.config, given))
    return replace(loaded, notes=loaded.notes + later, warnings=tuple(warnings(loaded.config, loaded.sources)))


def _take_unknown(layers: Iterable[Layer]) -> tuple[dict[str, Entry], list[str]]:
    """Remove what is no setting. Returns what a user wrote of it, and a line for each run of an earlier version."""
    unknown = dict[str, Entry]()
    lines: list[str] = []
    for layer in layers:
        gone = layer.take_unknown()
        if layer.kind is not Kind.RUN:
            unknown |= gone
        elif gone:
            lines.append(without_words(layer.name, gone))
    return unknown, lines


def _keep_own_settings(given: dict[str, Entry], layers: Sequence[Layer]) -> list[str]:
    """Settings of own code stay where another layer names its files: -use FILE with -resume. Returns problems."""
    own: dict[str, str] = {}
    for layer in layers:
        named = layer.entries["USE"].value if "USE" in layer.entries else None
        for one in list(as_names(named or ())) + layer.own_words:
            if is_own_setting(one):
                own[one.partition("=")[0].strip()] = one
    use = given.get("USE")
    words = layers[-1].own_words
    if own and use is not None and use.value:
        files = [one for one in as_names(use.value) if not is_own_setting(one)]
        given["USE"] = Entry(files + list(own.values()), use.source)
    elif own and words:
        from utils.foreign_flags import without_file

        return [f"{layers[-1].name}: {without_file(words[0])}"]
    return []


def _open_preprocessing(given: dict[str, Entry], files: Iterable[Layer]) -> None:
    """Mark the preprocessing that a recipe of configs/ has for another model than the user's."""
    recipe = merged(layer for layer in files if layer.kind is Kind.RECIPE)
    name = text_of(given, NAME)
    of_recipe = text_of(recipe, NAME)
    if name in ("", of_recipe):
        return
    for_whom = of_recipe or "other models"
    for key in PREPROCESSING:
        if key in given and given[key].source.kind is Kind.RECIPE:
            source = Source(f"{given[key].source}, for {for_whom}", Kind.OTHER_MODEL)
            given[key] = Entry(given[key].value, source)


# A warm-up belongs to the number of epochs that it was chosen with. So epochs on the command line alone scale that of a
# recipe, and leave that of a resumed run.


def _with_warmup_in_proportion(loaded: Loaded, below: Mapping[str, Entry]) -> Loaded:
    """The warm-up as the same part of the epochs on the command line as of those `below` it."""
    before = as_integer(below[EPOCHS].value if EPOCHS in below else default_of(EPOCHS))
    now = loaded.config.TRAIN.NUM_EPOCHS
    warmup = loaded.config.TRAIN.WARMUP_EPOCHS
    by = loaded.sources[EPOCHS]
    # With auto, the warm-up is a fraction: of a run of one epoch.
    length = 1 if folded(now) == AUTO else now
    of = 1 if folded(before) == AUTO else before
    if not (warmup and length and isinstance(of, int)) or of in (0, length):
        return loaded
    part = round(warmup * length / of, 6)
    line = f"{WARMUP} {part:g}: the recipe's {warmup:g} of {before} epochs, in proportion to {EPOCHS} {now} ({by})"
    return loaded.with_values({WARMUP: part}, f"{by}, in proportion", [line])


def config_of_run(folder: Path) -> Config:
    return load_config(str(folder / CONFIG)).config


def config_of_weights(
    chosen: Chosen, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """Those that trained these weights, overridden by `flags` and `given`: of a whole model, no adapters or shards."""
    values = {key: (value, f"{chosen.place}") for key, value in settings_of(chosen).items()}
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.LORA.RANK"):
        values[key] = (None, "")
    values |= {"MODEL.NEW_CLASSIFIER": (False, ""), "DIST.STRATEGY": ("ddp", ""), "DIST.HSDP": (False, "")}
    return load_config(None, values | (flags or {}), given.words if given else {}).config


def _checked(entries: Mapping[str, Entry], problems: list[str]) -> tuple[Config, dict[str, Source]]:
    """The frozen settings and their sources. Raises a UserError with all problems."""
    sources = {key: entries[key].source if key in entries else NOT_SET for key in settings()}
    where = {key: "" if source == NOT_SET else f"{source}: " for key, source in sources.items()}
    try:
        config = Config.model_validate(nested({key: entry.value for key, entry in entries.items()}))
    except ValidationError as error:
        problems = problems + _invalid_values(error, entries, sources, where)
    else:
        if not problems:
            problems = [f"{where[key]}{key}: {text}{_of_family(sources, text)}" for key, text in conflicts(config)]
        if not problems:
            return config, sources
    if len(problems) == 1:
        raise UserError(problems[0])
    title = f"{len(problems)} settings are wrong:"
    raise UserError("\n  ".join([title] + problems))


def _invalid_values(
    error: ValidationError, entries: Mapping[str, Entry], sources: Mapping[str, Source], where: Mapping[str, str]
) -> list[str]:
    from utils.config.words import expected

    found: dict[str | Source, str] = {}
    for details in error.errors():
        # The location may end with the branch of a union or an index of a list.
        parts = [str(part) for part in details["loc"]]
        keys = [".".join(parts[:end]) for end in range(1, 5)]
        key = next(key for key in keys if key in settings())
        text = f"{where[key]}{key}: {expected(key, entries[key].value)}"
        # A flag that sets two keys gets one line.
        found.setdefault(sources[key] if sources[key].kind is Kind.FLAG else key, text)
    return list(found.values())


def _of_family(sources: Mapping[str, Source], text: str) -> str:
    """' (KEY: default (swin))' for settings in `text` that are a family's defaults."""
    of_families = {key: source for key, source in sources.items() if source.kind is Kind.DEFAULT and source != NOT_SET}
    named = [key for key in of_families if key in text]
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
