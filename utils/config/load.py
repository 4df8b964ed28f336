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
from utils.config.resumed import line_about_gone_settings, resume_of, settings_of, values_of_run, written_before_restart
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
    remarks: tuple[str, ...] = ()
    """Those of them about settings that do not have the effect that one would expect."""
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
        config, sources = _checked(entries, problems=[])
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
    user_names_files = use_source.is_typed or not is_from_run
    return loaded, user_names_files


def load_config(
    cfg: str | None = None, flags: Mapping[str, tuple[Any, str]] | None = None, words: Mapping[str, str] | None = None
) -> Loaded:
    """Load and check the settings; one UserError reports all problems.

    From weak to strong, settings come from the defaults, the resumed run, the files (`cfg` and its BASE files), and the
    command line.

    cfg: -cfg, a YAML file or the name of a recipe; None if the command line has no -cfg
    flags: dotted key -> (value, the flag that gave it)
    words: dotted key -> the text after `=` in a KEY=VALUE word
    """
    # Read the files and the command line, from weak to strong: a layer of settings for each.
    file_layers, log_lines = read_recipe(cfg)
    typed = read_typed(flags or {}, words or {})
    layers = file_layers + [typed]

    # Only files of PaddleViT, and ours of a family besides ViT, need translation, and import it.
    if any(_needs_translation(layer) for layer in layers):
        from utils.config.paddlevit import translate

        log_lines += translate(layers)
    unknown, lines_about_old_runs = _remove_unknown(layers)
    log_lines += lines_about_old_runs

    # The settings that files and the command line give
    given = merged(layers)
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL"):
        if key in given:
            given[key] = replace(given[key], value=with_checkpoint(key, given[key].value))
    problems = [problem for layer in layers for problem in layer.problems]
    if unknown:
        from utils.foreign_flags import unknown_keys

        problems += unknown_keys(given, unknown)
    problems += _collect_own_settings(given, layers)
    _mark_preprocessing_of_other_model(given, file_layers)

    # Add the resumed run's settings that are still open. A warm-up belongs to the number of epochs that it was chosen
    # with. So if the command line changes only this number, the run's warm-up replaces that of the files, too.
    recipe = merged(file_layers)
    types_epochs_alone = EPOCHS in typed.entries and WARMUP not in typed.entries
    warmup_has_epochs = WARMUP not in recipe or EPOCHS in recipe  # Both are of the files, or both are defaults.
    changes_epochs_only = types_epochs_alone and warmup_has_epochs
    resumed = values_of_run(given, all_settings=cfg is None, warmup=changes_epochs_only and cfg is not None)
    known = given | resumed

    # Defaults that other settings change
    defaults = dict[str, Entry]()
    if type_of(given) != "vit" or not given.keys().isdisjoint(CHANGE_DEFAULTS):
        from utils.config.families import defaults_by

        defaults, lines_about_defaults = defaults_by(known)
        log_lines += lines_about_defaults
    config, sources = _checked(defaults | known, problems)

    loaded = Loaded(config, sources, tuple(log_lines))
    if changes_epochs_only and WARMUP not in resumed:
        loaded = _with_warmup_in_proportion(loaded, defaults | recipe)
    remarks = tuple(note + _hint_at_family_defaults(note, loaded.sources) for note in notes(loaded.config, given))
    return replace(
        loaded,
        notes=loaded.notes + remarks,
        remarks=remarks,
        warnings=tuple(warnings(loaded.config, loaded.sources)),
    )


def _needs_translation(layer: Layer) -> bool:
    """Whether a layer has a model family besides ViT, or keys that are no settings of ours."""
    has_unknown_keys = len(layer.entries.keys() - settings()) > 0
    return type_of(layer.entries) != "vit" or has_unknown_keys


def _remove_unknown(layers: Iterable[Layer]) -> tuple[dict[str, Entry], list[str]]:
    """Remove the entries that are no settings from all layers.

    Returns the unknown entries of files and of the command line, which are errors, and lines for the log: one for each
    config.yaml of a run by an earlier version, which lists its unknown keys.
    """
    users_entries = dict[str, Entry]()
    lines: list[str] = []
    for layer in layers:
        unknown = layer.take_unknown()
        if layer.kind is not Kind.RUN:
            users_entries |= unknown
        elif unknown:
            lines.append(line_about_gone_settings(layer.name, unknown))
    return users_entries, lines


def _collect_own_settings(given: dict[str, Entry], layers: Sequence[Layer]) -> list[str]:
    """Collect the settings of the user's own code from all layers into the entry USE of `given`; return problems.

    USE lists code files and their settings (NAME.SETTING=VALUE). Without this, a layer that names files, such as -use
    FILE with -resume, would remove the settings of weaker layers. Settings on the command line without any code file
    are a problem, because nothing would read them.

    layers: the layers that are merged in `given`, from weak to strong; the last is the command line
    """
    command_line = layers[-1]
    own_settings: dict[str, str] = {}
    for layer in layers:
        use_value = layer.entries["USE"].value if "USE" in layer.entries else None
        for word in list(as_names(use_value or ())) + layer.own_words:
            if is_own_setting(word):
                setting_name = word.partition("=")[0].strip()
                own_settings[setting_name] = word
    use = given.get("USE")
    if own_settings and use is not None and use.value:
        files = [word for word in as_names(use.value) if not is_own_setting(word)]
        given["USE"] = Entry(files + list(own_settings.values()), use.source)
    elif own_settings and command_line.own_words:
        from utils.foreign_flags import without_file

        return [f"{command_line.name}: {without_file(command_line.own_words[0])}"]
    return []


def _mark_preprocessing_of_other_model(given: dict[str, Entry], file_layers: Iterable[Layer]) -> None:
    """Mark the preprocessing settings that come from a recipe of configs/ if the user trains another model than it.

    Their source becomes Kind.OTHER_MODEL. Pretrained weights then replace them with the preprocessing that the weights
    were trained with.

    given: the settings of all layers; changed
    file_layers: the layers of files
    """
    recipe = merged(layer for layer in file_layers if layer.kind is Kind.RECIPE)
    model_name = text_of(given, NAME)
    recipe_name = text_of(recipe, NAME)
    if model_name in ("", recipe_name):
        return
    recipes_model = recipe_name or "other models"
    for key in PREPROCESSING:
        if key in given and given[key].source.kind is Kind.RECIPE:
            source = Source(f"{given[key].source}, for {recipes_model}", Kind.OTHER_MODEL)
            given[key] = Entry(given[key].value, source)


def _with_warmup_in_proportion(loaded: Loaded, recipe: Mapping[str, Entry]) -> Loaded:
    """Scale the warm-up so that it is the same fraction of the epochs on the command line as of the recipe's epochs.

    recipe: the settings that the command line overrides
    """
    recipe_epochs = as_integer(recipe[EPOCHS].value if EPOCHS in recipe else default_of(EPOCHS))
    epochs = loaded.config.TRAIN.NUM_EPOCHS
    warmup = loaded.config.TRAIN.WARMUP_EPOCHS
    epochs_source = loaded.sources[EPOCHS]
    # If NUM_EPOCHS is auto, WARMUP_EPOCHS is a fraction of the run: it counts as for a run of one epoch.
    new_length = 1 if folded(epochs) == AUTO else epochs
    old_length = 1 if folded(recipe_epochs) == AUTO else recipe_epochs
    # The recipe's number is overridden, so it has not been checked: it may be no integer.
    can_scale = warmup and new_length and isinstance(old_length, int)
    if not can_scale or old_length in (0, new_length):
        return loaded
    scaled = round(warmup * new_length / old_length, 6)
    origin = f"the recipe's {warmup:g} of {recipe_epochs} epochs"
    line = f"{WARMUP} {scaled:g}: {origin}, in proportion to {EPOCHS} {epochs} ({epochs_source})"
    return loaded.with_values({WARMUP: scaled}, f"{epochs_source}, in proportion", [line])


def config_of_run(folder: Path) -> Config:
    """Load the settings in the config.yaml of a run's folder."""
    return load_config(str(folder / CONFIG)).config


def config_of_weights(
    chosen: Chosen, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """Load the settings of the run that trained these weights, changed so that they describe the model itself.

    flags: dotted key -> (value, the flag that gave it), which overrides the run's settings
    given: a command line, whose KEY=VALUE words override both
    """
    # Each value has the name of its source, as flags have; those that are set here have none.
    values = {key: (value, f"{chosen.place}") for key, value in settings_of(chosen).items()}
    # Weights that are ready for use are those of a whole model: nothing else is loaded, and they have no adapters.
    for key in ("MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.LORA.RANK"):
        values[key] = (None, "")
    # Nor is the classifier replaced, or the model sharded.
    values |= {"MODEL.NEW_CLASSIFIER": (False, ""), "DIST.STRATEGY": ("ddp", ""), "DIST.HSDP": (False, "")}
    return load_config(None, values | (flags or {}), given.words if given else {}).config


def _checked(entries: Mapping[str, Entry], problems: list[str]) -> tuple[Config, dict[str, Source]]:
    """Validate the settings; return them and the source of every setting, or raise a UserError with all problems.

    problems: texts of problems that were found before. Conflicts are only looked for if there is no other problem.
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
                f"{prefixes[key]}{key}: {text}{_hint_at_family_defaults(text, sources)}"
                for key, text in conflicts(config)
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
    """Return a line for each setting that pydantic rejects, which says what is expected instead of its value.

    prefixes: key -> what its line begins with, such as `configs/x.yaml:12: `; '' for a setting that nobody set
    """
    from utils.config.words import expected

    lines: dict[str | Source, str] = {}  # Source or key -> line
    for details in error.errors():
        # The location is the key in parts. It may end with the branch of a union or an index of a list.
        parts = [str(part) for part in details["loc"]]
        possible_keys = [".".join(parts[:number]) for number in range(1, 5)]  # A key has up to four parts.
        key = next(key for key in possible_keys if key in settings())
        line = f"{prefixes[key]}{key}: {expected(key, entries[key].value)}"
        # A flag that sets two keys gets one line. All other sources get a line for each key.
        line_of = sources[key] if sources[key].kind is Kind.FLAG else key
        lines.setdefault(line_of, line)
    return list(lines.values())


def _hint_at_family_defaults(text: str, sources: Mapping[str, Source]) -> str:
    """Return ' (KEY: default (swin))' if the text names a setting whose value is the default of its family, else ''."""
    family_keys = [key for key, source in sources.items() if source.kind is Kind.DEFAULT and source != NOT_SET]
    named_keys = [key for key in family_keys if key in text]
    return f" ({', '.join(named_keys)}: {sources[named_keys[0]]})" if named_keys else ""


def to_yaml(config: Config) -> str:
    """Return the settings as YAML, section by section; loading it gives an equal Config."""
    return as_yaml(nested(values_by_key(config)))


def format_config(loaded: Loaded) -> str:
    """Return the output of -print_config: the settings as YAML, each with its `# source`, and no passwords of URLs."""
    keys = iter(settings())
    lines: list[tuple[str, str | None]] = []
    for line in to_yaml(loaded.config).splitlines():
        # The heading of a section ends with a colon and has no key. The other lines are one per key, in the same order.
        key = None if line.endswith(":") else next(keys)
        lines.append((redacted(line), key))

    # The sources are in one column, which lines of more than 60 characters may exceed. Some line is always shorter.
    width = max(len(line) for line, key in lines if key is not None and len(line) <= 60)
    text = ""
    for line, key in lines:
        text += f"{line}\n" if key is None else f"{line:<{width}}  # {loaded.sources[key]}\n"
    return text


def differences(old: Config, new: Config) -> list[str]:
    """List the settings that differ, each as 'TRAIN.BASE_LR: 0.003 -> 0.001'."""
    # -batch_size also sets BATCH_SIZE_EVAL, and null means the same number. Then only BATCH_SIZE is listed.
    is_same_in_eval = all(config.DATA.BATCH_SIZE_EVAL in (None, config.DATA.BATCH_SIZE) for config in (old, new))
    lines = []
    current_folder = os.getcwd()
    for key in settings():
        if key == "DATA.BATCH_SIZE_EVAL" and is_same_in_eval:
            continue
        old_value = absolute(key, value_of(old, key), current_folder)
        new_value = absolute(key, value_of(new, key), current_folder)
        # The old settings may be saved ones, and passwords are removed from a URL when it is saved.
        is_same_url = isinstance(new_value, str) and redacted(new_value) == old_value
        if old_value != new_value and not is_same_url:
            lines.append(f"{key}: {one_line(old_value)} -> {one_line(new_value)}")
    return lines


def config_hash(config: Config) -> str:
    """SHA-256 of all settings: equal for equal settings, on every machine."""
    return hashlib.sha256(json.dumps(values_by_key(config), sort_keys=True).encode()).hexdigest()
