"""Code of the user's own: executes the files that a start needs, and gives their functions the settings of USE.

A file registers functions and classes by name: losses, models, augmentations, metrics, data sets.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from pydantic import ValidationError
from timm.models import register_model
from torch import nn

import datasets
from datasets.transforms.augment import POLICIES
from models.parts import pretrained_cfg
from utils.config import Config
from utils.config.keys import value_of
from utils.config.kinds import OWN_SETTING, parse_text
from utils.config.resumed import resumed_run
from utils.config.words import choices
from utils.errors import UserError, nearest
from utils.log import log
from utils.own_code import (
    FIELD,
    OWN_ERRORS,
    Noted,
    allowed,
    check_name,
    copy_of,
    execute,
    executed_own_files,
    noted_of,
    own_lines,
    read,
)
from utils.record.history import FIELDS_WITHOUT_METRIC
from utils.record.run_folder import ABOUT, read_about
from vitamp.metrics import METRICS, set_of
from vitamp.registry import KINDS, Own, registered

IN_TOOLS = ("model", "dataset")
"""Kinds of code that a tool needs for a trained model; the other kinds are for training alone"""
IN_VALIDATION = IN_TOOLS + ("metric",)
"""Kinds of code that -eval needs"""


def _is_timms(name: str) -> bool:
    """Whether timm has a model of this name that is not the user's own.

    The user's models are registered with timm too: by this module, or by their files with timm's @register_model.
    """
    if not timm.is_model(name):
        return False
    entry = timm.model_entrypoint(name)
    registered_here = entry.__module__ == __name__
    registered_by_file = any(entry is own.call for own in registered.values())
    return not registered_here and not registered_by_file


IS_BUILT_IN: dict[str, Callable[[str], bool]] = {
    "loss": lambda name: name.casefold() in choices("TRAIN.LOSS"),
    "model": _is_timms,
    "augmentation": lambda name: name.casefold() in POLICIES,
    # A name that metrics.jsonl uses already, or reads as another set's metric (ema_...), cannot be a metric's either.
    "metric": lambda name: name in METRICS or name in FIELDS_WITHOUT_METRIC or set_of(name)[1] != name,
    "dataset": lambda name: name in datasets.names(),
}
"""Kind -> whether the program has one of this name, which the user's own code then cannot have"""


def use_own_code(config: Config, given: bool, trust: bool = False) -> None:
    """Execute the user's files at the start of a command, and make what they register usable by name.

    `given`: the command names files in USE: these are executed. Otherwise, a resumed run executes its copies of the
    files that it used before. `trust`: -trust, without which such copies are not executed.
    """
    allowed.trust |= trust
    run = resumed_run(config)
    run_files: list[Noted] = []
    if run is not None and (run / ABOUT).exists():
        # The files that the run used when it was last started.
        run_files = noted_of(read_about(run).get(FIELD), run / ABOUT)
    if not given:
        needed_kinds = IN_VALIDATION if config.EVAL else tuple(KINDS)
        use_of_weights(run_files, config, run, needed_kinds)
        return
    paths = [Path(os.path.expanduser(name)) for name in config.own_files]
    for path in paths:
        # Copies of files of this name, by hash; there may be several, from several folders.
        copies = {file.sha256: file.copy_name for file in run_files if file.file == path.name}
        if copies and _sha256_of(path) not in copies:
            newest_copy = list(copies.values())[-1]
            log.warning(
                "%s has changed since the run's last start (copy: own_code/%s). The run continues with the new file.",
                path,
                newest_copy,
            )
    for path in paths:
        execute(path)
    for file, _content in executed_own_files.values():
        log.info("Own code: %s", file.words())
    _make_usable(config, tuple(KINDS))
    _log_unused(config)


def _sha256_of(path: Path) -> str:
    _content, sha256 = read(path)
    return sha256


def _log_unused(config: Config) -> None:
    """Log which registered functions no setting chooses, and the setting that would choose each."""
    knn_dataset = (config.TRAIN.KNN or "").partition("=")[0]
    used = _chosen_names(config) | {config.TRAIN.TEACHER_MODEL, knn_dataset}
    for name, own in registered.items():
        if name in used or (config.EVAL and own.kind not in IN_VALIDATION):
            continue
        # The value that would choose it: its name, or if the setting is a list, the present list with its name added.
        setting = KINDS[own.kind].setting
        value = value_of(config, setting)
        names = list(value) if isinstance(value, list | tuple) else []
        names.append(name)
        unused = f"{own.kind} {name} of {Path(own.file).name}"
        log.info("%s is registered, but not used; %s=%s chooses it", unused, setting, ",".join(names))


def use_of_weights(
    run_files: Sequence[Noted], config: Config, run: Path | None, kinds: Sequence[str] = IN_TOOLS
) -> None:
    """Execute the user's files that saved weights need, and make what they register usable by name.

    UserError if the user has not allowed a file, by -use with a file of the same content, or by -trust.
    `run_files`: files that run.json or the checkpoint records. `run`: the run's folder, which has copies of them; None
    if the weights are not in a run. `kinds`: kinds of registered code that are needed, such as "model".
    """
    needed = _files_to_execute(run_files, _chosen_names(config), kinds)
    given_paths = {_sha256_of(path): path for path in allowed.files}
    if run is None:
        # There are no copies. Files that define the model are needed all the same, so that an error names them. A data
        # set may be missing until its images are needed.
        needed = [file for file in needed if file.sha256 in given_paths or "model" in file.registers.values()]
    without_consent = [file for file in needed if file.sha256 not in given_paths]
    if without_consent and not allowed.trust:
        lines = [f"  {file.words()}, sha256 {file.sha256}\n    copy: {copy_of(run, file)}" for file in without_consent]
        raise UserError(
            "This model uses code of its run, which is not executed without your consent:\n"
            + "\n".join(lines)
            + "\nRead it. Then add -trust to execute the copy, or -use FILE with a file of the same sha256."
        )
    for file in needed:
        path = given_paths[file.sha256] if file.sha256 in given_paths else copy_of(run, file)
        execute(path, file.file)
    # A data set that neither the program nor the run's files have may be in a file of -use.
    dataset = config.DATA.DATASET
    is_built_in = IS_BUILT_IN["dataset"](dataset)
    if not is_built_in and not any(dataset in file.registers for file in run_files):
        for path in allowed.files:
            execute(path)
    _make_usable(config, kinds)


def _files_to_execute(run_files: Sequence[Noted], names: set[str], kinds: Sequence[str]) -> list[Noted]:
    """Return the files that register code of these kinds under these names, and are not executed yet."""
    # By content, not by path: a file that the user has given with -use is at another path.
    executed_hashes = {file.sha256 for file, _content in executed_own_files.values() if file.registers}
    needed: list[Noted] = []
    for file in run_files:
        registered_names = [name for name, kind in file.registers.items() if kind in kinds]
        registers_any = not names.isdisjoint(registered_names)
        if registers_any and file.sha256 not in executed_hashes:
            needed.append(file)
    return needed


def _chosen_names(config: Config) -> set[str]:
    """Return all names by which settings choose a loss, model, data set, augmentation or metric, built in or not."""
    single_names = {config.TRAIN.LOSS, config.MODEL.NAME.strip(), config.DATA.DATASET}
    return single_names.union(config.TRAIN.AUGMENT, config.VALIDATE_METRICS)


def _make_usable(config: Config, kinds: Sequence[str]) -> None:
    """Make all registered code usable by name, and give it its settings, which USE has.

    UserError if a name is that of a built-in, if the settings choose a name that is not registered, or for a wrong
    setting. `kinds`: kinds of code that this command needs.
    """
    for name, own in registered.items():
        if IS_BUILT_IN[own.kind](name):
            raise UserError(f"-use {own.file}: the {own.kind} {name} is vitamp's own already; rename yours.")
        if own.kind == "model":
            _register_with_timm(own)
    if "loss" in kinds and config.TRAIN.own_loss:
        check_name("loss", config.TRAIN.LOSS, choices("TRAIN.LOSS"))
    if "metric" in kinds:
        for name in config.VALIDATE_METRICS:
            check_name("metric", name)
    # Only a teacher of distillation needs its model and nothing else: then no other name counts as chosen.
    is_for_teacher = len(kinds) == 1
    chosen = {config.MODEL.NAME.strip()} if is_for_teacher else _chosen_names(config)
    all_files = len(kinds) == len(KINDS)  # all kinds are needed, so all files were executed
    for note in bind(config.own_settings, chosen, all_files):
        log.warning("%s.", note)


def bind(texts: Sequence[str], chosen: Collection[str], all_files: bool) -> list[str]:
    """Give registered code its settings, words of USE such as "focal.gamma=1.5"; raise UserError for wrong ones.

    `chosen`: the names that the run uses, which must have all settings without a default. `all_files`: whether all
    files of USE were executed; if not, a setting of an unknown name may belong to one that was not, and is ignored.
    Returns notes on settings without effect.
    """
    given: dict[str, dict[str, Any]] = {}  # name -> its settings
    problems: list[str] = []
    # Without all files, settings of names that are not chosen are ignored.
    names_with_settings = registered if all_files else chosen
    for text in texts:
        match = OWN_SETTING.fullmatch(text)
        assert match is not None
        name, key, value = match.groups()
        if name in names_with_settings:
            given.setdefault(name, {})[key] = parse_text(value)
        elif all_files:
            names = ", ".join(registered) or "nothing"
            similar = nearest(name, registered)
            problems.append(f"{text}: nothing is registered as {name!r}.{similar} The files of USE register {names}.")
    notes: list[str] = []
    for name, own in registered.items():
        values = given.get(name, {})
        if name not in chosen:
            setting = KINDS[own.kind].setting
            if values:
                notes.append(f"{name}: its settings have no effect, because {setting} does not name {name}")
            continue
        try:
            # Only the settings that are given: the others keep the defaults of the code itself.
            own.values = {key: value for key, value in own.settings(**values) if key in values}
        except ValidationError as error:
            problems += _problems_with(own, error)
    if problems:
        raise UserError("\n".join(problems))
    return notes


def _problems_with(own: Own, error: ValidationError) -> Iterator[str]:
    """Yield a sentence for each setting of `own` that is unknown, missing, or not of its type."""
    name = own.name
    known_keys = [f"{name}.{field}" for field in own.settings.model_fields]
    # For a setting that may have one of several types, pydantic reports an error for each type. Only the last one of
    # each setting stays in this dictionary.
    details = {detail["loc"][0]: detail for detail in error.errors()}
    for setting, detail in details.items():
        key = f"{name}.{setting}"
        if detail["type"] == "extra_forbidden":
            listed = ", ".join(known_keys) or "no settings"
            yield f"{key}: unknown setting.{nearest(key, known_keys)} The {own.kind} {name} has {listed}."
        elif detail["type"] == "missing":
            yield f"{own.kind} {name} needs {key}=VALUE: it has no default."
        else:
            yield f"{key}={detail['input']}: {detail['msg'].lower()}."


CLASSES = 1000
"""Classes of a model that is built without a number of them, as most of timm's models have"""
OF_TIMM = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Further arguments that timm passes to every model"""


def _register_with_timm(own: Own) -> None:
    """Register a model of the user's own with timm under its name, so that the whole program can build it."""

    def build(pretrained: bool = False, **given: Any) -> nn.Module:  # noqa: ARG001 - timm passes it
        """Call the user's function or class with those of timm's arguments that it takes, and its own settings."""
        # Arguments that timm always passes are left out if the model does not take them. Others, such as a size that
        # was asked for, are not: the call then fails. A value that is not set is left out, too: the model has its own.
        left_out = {name for name in KINDS["model"].named + OF_TIMM if not own.takes(name)}
        for name, value in given.items():
            is_unset_rate = name.endswith("_rate") and not value  # 0 is the default of MODEL
            if value is None or is_unset_rate:
                left_out.add(name)
        arguments: dict[str, Any] = {"num_classes": CLASSES}
        arguments |= {name: value for name, value in given.items() if name not in left_out}
        set_twice = arguments.keys() & own.values
        if set_twice:
            key = min(set_twice)
            raise UserError(f"{own.name}.{key}: a key of MODEL sets it too ({arguments[key]}); leave one out.")
        try:
            module = own.call(**arguments, **own.values)
        except OWN_ERRORS as error:
            if torch.get_default_device().type == "meta":
                # Its constructor may read values (`.item()`), which tensors of the meta device do not have. So it is
                # built on the CPU, which raises the error again if it has another reason.
                with torch.device("cpu"):
                    return build(**given).to("meta")
            raise UserError(own_lines(error) or f"model {own.name}: {error}") from None
        if not isinstance(module, nn.Module):
            raise UserError(f"-use {own.file}: model {own.name} returned {type(module).__name__}, not an nn.Module.")
        # Whether the model is built for one size of images: the function or class has a parameter for it, or the
        # function passes its **kwargs on to a class that has. timm marks such models, and the program passes them a
        # size.
        parameters = signature(own.call).parameters.keys() | signature(type(module)).parameters.keys()
        if own.takes("img_size") and "img_size" in parameters:
            vars(module)["pretrained_cfg"] = {**pretrained_cfg(module), "fixed_input_size": True}
        return module

    build.__name__ = own.name
    # timm warns if the file itself has registered the model with @register_model already.
    with warnings.catch_warnings(action="ignore"):
        register_model(build)
