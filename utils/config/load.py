"""Loads the settings, each with its source, and writes them.

From weak to strong, settings come from: the schema's defaults, the defaults of the model's family, a resumed run, BASE
files, the YAML file, flags, and KEY=VALUE words.
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
    """Lines for the log."""
    warnings: tuple[str, ...] = ()
    """Warnings for the log."""

    def is_default(self, key: str) -> bool:
        """Whether neither a file nor the command line set this key."""
        return self.sources[key].kind is Kind.DEFAULT

    def with_values(
        self, values: Mapping[str, Any], source: str, notes: Iterable[str] = (), kind: Kind = Kind.FOUND
    ) -> Loaded:
        """Return these settings with some values replaced, such as `auto` by a number; conflicts are a UserError.

        values: dotted key -> value
        source: where the values come from, in words
        notes: more lines for the log
        """
        entries = {key: Entry(value_of(self.config, key), old_source) for key, old_source in self.sources.items()}
        entries |= {key: Entry(value, Source(source, kind)) for key, value in values.items()}
        config, sources = _checked(entries, [])
        return replace(self, config=config, sources=sources, notes=self.notes + tuple(notes))

    def with_warning(self, text: str) -> Loaded:
        return replace(self, warnings=self.warnings + (text,))


def load_command(command: CommandLine) -> tuple[Loaded, bool]:
    """Load the settings of a command line; return them and whether the code files in USE were named by the user.

    Resuming needs no -cfg: the config.yaml of the resumed run takes its place. Code files that such a run names may be
    someone else's.
    """
    cfg = command.cfg
    flags = command.flags
    words = command.words
    resumed_folder = None
    if cfg is None:
        resume = resume_of({key: value for key, (value, _) in flags.items()} | words)
        resumed_folder = resume.run if resume else None
    # With -resume auto, the run may have been killed before it wrote a config.yaml.
    if resumed_folder is not None and (resumed_folder / CONFIG).exists():
        cfg = str(resumed_folder / CONFIG)
        flags = {key: (default_of(key), "-resume") for key in OF_ONE_START} | flags

    loaded = load_config(cfg, flags, words)
    if written_before_restart(loaded.config):
        loaded = load_config(cfg, flags, words | {"MODEL.RESUME": AUTO})
        log.info("torchrun has restarted this job, which resumes its run.")

    use_source = loaded.sources["USE"]
    is_from_run = resumed_folder is not None or use_source.kind is Kind.RUN
    return loaded, use_source.is_typed or not is_from_run


def load_config(
    cfg: str | None = None, flags: Mapping[str, tuple[Any, str]] | None = None, words: Mapping[str, str] | None = None
) -> Loaded:
    """Load and check the settings; one UserError reports all problems.

    cfg: -cfg, a YAML file or the name of a recipe
    flags: dotted key -> (value, the flag that gave it)
    words: dotted key -> the text after `=` in a KEY=VALUE word
    """
    file_layers, lines = read_recipe(cfg)
    typed = read_typed(flags or {}, words or {})
    layers = file_layers + [typed]

    # Files of PaddleViT, and ours of a family besides ViT, need translation; others do not import it.
    if any(type_of(layer.entries) != "vit" or layer.entries.keys() - settings() for layer in layers):
        from utils.config.paddlevit import translate

        lines += translate(layers)
    unknown, lines_about_old_runs = _take_unknown(layers)
    lines += lines_about_old_runs
    given = merged(layers)
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL"):
        if key in given:
            given[key] = replace(given[key], value=with_checkpoint(key, given[key].value))
    problems = [problem for layer in layers for problem in layer.problems]
    if unknown:
        from utils.foreign_flags import unknown_keys

        problems += unknown_keys(given, unknown)
    problems += _keep_own_settings(given, layers)
    _open_preprocessing(given, file_layers)

    recipe = merged(file_layers)
    # Whether the command line changes the number of epochs, but not the warm-up that was chosen with that number.
    changes_epochs_only = (
        EPOCHS in typed.entries and WARMUP not in typed.entries and (WARMUP not in recipe or EPOCHS in recipe)
    )
    resumed = values_of_run(given, all_settings=cfg is None, warmup=changes_epochs_only and cfg is not None)
    known = given | resumed
    defaults = dict[str, Entry]()
    if type_of(given) != "vit" or not given.keys().isdisjoint(CHANGE_DEFAULTS):
        from utils.config.families import defaults_by

        defaults, lines_about_defaults = defaults_by(known)
        lines += lines_about_defaults
    config, sources = _checked(defaults | known, problems)

    loaded = Loaded(config, sources, tuple(lines))
    if changes_epochs_only and WARMUP not in resumed:
        loaded = _with_warmup_in_proportion(loaded, defaults | recipe)
    later_notes = tuple(note + _family_defaults_in(note, loaded.sources) for note in notes(loaded.config, given))
    return replace(loaded, notes=loaded.notes + later_notes, warnings=tuple(warnings(loaded.config, loaded.sources)))


def _take_unknown(layers: Iterable[Layer]) -> tuple[dict[str, Entry], list[str]]:
    """Remove the entries that are no settings from all layers.

    Returns those that a user wrote, which are errors, and for each run by an earlier version a line for the log that
    lists its others.
    """
    users_entries = dict[str, Entry]()
    lines: list[str] = []
    for layer in layers:
        unknown = layer.take_unknown()
        if layer.kind is not Kind.RUN:
            users_entries |= unknown
        elif unknown:
            lines.append(without_words(layer.name, unknown))
    return users_entries, lines


def _keep_own_settings(given: dict[str, Entry], layers: Sequence[Layer]) -> list[str]:
    """Collect the settings of the user's own code from all layers into USE, and return problems.

    USE lists code files and their settings (NAME.SETTING=VALUE). Without this, a layer that names files, such as -use
    FILE with -resume, would remove the settings of weaker layers.
    """
    own_settings: dict[str, str] = {}
    for layer in layers:
        use_value = layer.entries["USE"].value if "USE" in layer.entries else None
        for word in list(as_names(use_value or ())) + layer.own_words:
            if is_own_setting(word):
                setting_name = word.partition("=")[0].strip()
                own_settings[setting_name] = word
    use = given.get("USE")
    typed_words = layers[-1].own_words
    if own_settings and use is not None and use.value:
        files = [word for word in as_names(use.value) if not is_own_setting(word)]
        given["USE"] = Entry(files + list(own_settings.values()), use.source)
    elif own_settings and typed_words:
        from utils.foreign_flags import without_file

        return [f"{layers[-1].name}: {without_file(typed_words[0])}"]
    return []


def _open_preprocessing(given: dict[str, Entry], file_layers: Iterable[Layer]) -> None:
    """Mark the preprocessing of a recipe of configs/ if the user's model is another one, whose weights then decide."""
    recipe = merged(layer for layer in file_layers if layer.kind is Kind.RECIPE)
    name = text_of(given, NAME)
    recipe_name = text_of(recipe, NAME)
    if name in ("", recipe_name):
        return
    recipes_model = recipe_name or "other models"
    for key in PREPROCESSING:
        if key in given and given[key].source.kind is Kind.RECIPE:
            source = Source(f"{given[key].source}, for {recipes_model}", Kind.OTHER_MODEL)
            given[key] = Entry(given[key].value, source)


# A warm-up belongs to the number of epochs that it was chosen with. So if the command line changes the number of epochs
# alone, the warm-up of a recipe is scaled, and that of a resumed run stays.


def _with_warmup_in_proportion(loaded: Loaded, recipe: Mapping[str, Entry]) -> Loaded:
    """Scale the warm-up so that it is the same fraction of the epochs on the command line as of the recipe's epochs.

    recipe: the settings that the command line overrides
    """
    recipe_epochs = as_integer(recipe[EPOCHS].value if EPOCHS in recipe else default_of(EPOCHS))
    epochs = loaded.config.TRAIN.NUM_EPOCHS
    warmup = loaded.config.TRAIN.WARMUP_EPOCHS
    epochs_source = loaded.sources[EPOCHS]
    # If NUM_EPOCHS is auto, the warm-up is a fraction of the run, which is computed as a run of one epoch.
    length = 1 if folded(epochs) == AUTO else epochs
    recipe_length = 1 if folded(recipe_epochs) == AUTO else recipe_epochs
    can_scale = warmup and length and isinstance(recipe_length, int)
    if not can_scale or recipe_length in (0, length):
        return loaded
    scaled = round(warmup * length / recipe_length, 6)
    origin = f"the recipe's {warmup:g} of {recipe_epochs} epochs"
    line = f"{WARMUP} {scaled:g}: {origin}, in proportion to {EPOCHS} {epochs} ({epochs_source})"
    return loaded.with_values({WARMUP: scaled}, f"{epochs_source}, in proportion", [line])


def config_of_run(folder: Path) -> Config:
    """The settings in the config.yaml of a run's folder."""
    return load_config(str(folder / CONFIG)).config


def config_of_weights(
    chosen: Chosen, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """Load the settings of the run that trained these weights, changed so that they describe the model itself.

    Exported weights are those of a whole model: nothing is loaded, and there are no adapters or shards.

    flags: dotted key -> (value, the flag that gave it), which overrides the run's settings
    given: a command line, whose KEY=VALUE words override both
    """
    values = {key: (value, f"{chosen.place}") for key, value in settings_of(chosen).items()}
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.LORA.RANK"):
        values[key] = (None, "")
    values |= {"MODEL.NEW_CLASSIFIER": (False, ""), "DIST.STRATEGY": ("ddp", ""), "DIST.HSDP": (False, "")}
    return load_config(None, values | (flags or {}), given.words if given else {}).config


def _checked(entries: Mapping[str, Entry], problems: list[str]) -> tuple[Config, dict[str, Source]]:
    """Validate the settings; return them and the source of every setting, or raise a UserError with all problems.

    problems: those that were found before. Conflicts are only looked for if there is no other problem.
    """
    sources = {key: entries[key].source if key in entries else NOT_SET for key in settings()}
    prefixes = {key: "" if source == NOT_SET else f"{source}: " for key, source in sources.items()}
    try:
        config = Config.model_validate(nested({key: entry.value for key, entry in entries.items()}))
    except ValidationError as error:
        problems = problems + _invalid_values(error, entries, sources, prefixes)
    else:
        if not problems:
            problems = [
                f"{prefixes[key]}{key}: {text}{_family_defaults_in(text, sources)}" for key, text in conflicts(config)
            ]
        if not problems:
            return config, sources
    if len(problems) == 1:
        raise UserError(problems[0])
    title = f"{len(problems)} settings are wrong:"
    raise UserError("\n  ".join([title] + problems))


def _invalid_values(
    error: ValidationError, entries: Mapping[str, Entry], sources: Mapping[str, Source], prefixes: Mapping[str, str]
) -> list[str]:
    """A line for each setting that pydantic rejects, with what is expected. `prefixes`: key -> 'source: ' or ''."""
    from utils.config.words import expected

    lines: dict[str | Source, str] = {}
    for details in error.errors():
        # The location is the key in parts. It may end with the branch of a union or an index of a list.
        parts = [str(part) for part in details["loc"]]
        possible_keys = [".".join(parts[:end]) for end in range(1, 5)]
        key = next(key for key in possible_keys if key in settings())
        line = f"{prefixes[key]}{key}: {expected(key, entries[key].value)}"
        # A flag that sets two keys gets one line.
        lines.setdefault(sources[key] if sources[key].kind is Kind.FLAG else key, line)
    return list(lines.values())


def _family_defaults_in(text: str, sources: Mapping[str, Source]) -> str:
    """' (KEY: default (swin))' if the text names a setting whose value is its family's default, else ''."""
    family_keys = [key for key, source in sources.items() if source.kind is Kind.DEFAULT and source != NOT_SET]
    named_keys = [key for key in family_keys if key in text]
    return f" ({', '.join(named_keys)}: {sources[named_keys[0]]})" if named_keys else ""


def to_yaml(config: Config) -> str:
    """The settings as YAML, section by section; loading it gives an equal Config."""
    return as_yaml(nested(values_by_key(config)))


def format_config(loaded: Loaded) -> str:
    """The settings as YAML with `# source` after each; the output of -print_config, without passwords of URLs."""
    keys = iter(settings())
    lines: list[tuple[str, str | None]] = []
    for line in to_yaml(loaded.config).splitlines():
        # The heading of a section ends with a colon and has no key. The other lines are in the order of the keys.
        key = None if line.endswith(":") else next(keys)
        lines.append((redacted(line), key))

    # The sources are in one column, which lines of more than 60 characters may exceed.
    width = max(len(line) for line, key in lines if key is not None and len(line) <= 60)
    text = ""
    for line, key in lines:
        text += f"{line}\n" if key is None else f"{line:<{width}}  # {loaded.sources[key]}\n"
    return text


def differences(old: Config, new: Config) -> list[str]:
    """'TRAIN.BASE_LR: 0.003 -> 0.001' for each setting that differs."""
    # -batch_size also sets BATCH_SIZE_EVAL, and null means the same number. Then only BATCH_SIZE is listed.
    is_same_in_eval = all(config.DATA.BATCH_SIZE_EVAL in (None, config.DATA.BATCH_SIZE) for config in (old, new))
    lines = []
    current_folder = os.getcwd()
    for key in settings():
        if key == "DATA.BATCH_SIZE_EVAL" and is_same_in_eval:
            continue
        old_value = absolute(key, value_of(old, key), current_folder)
        new_value = absolute(key, value_of(new, key), current_folder)
        # Passwords are removed from a URL when it is saved.
        is_same_url = isinstance(new_value, str) and redacted(new_value) == old_value
        if old_value != new_value and not is_same_url:
            lines.append(f"{key}: {one_line(old_value)} -> {one_line(new_value)}")
    return lines


def config_hash(config: Config) -> str:
    """SHA-256 of all settings: equal for equal settings, on every machine."""
    return hashlib.sha256(json.dumps(values_by_key(config), sort_keys=True).encode()).hexdigest()
