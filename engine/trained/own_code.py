"""Code of the user's own: which files a start executes, and what of it the settings choose."""

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
    executed,
    noted_of,
    own_lines,
    read,
)
from utils.record.history import NO_METRICS
from utils.record.run_folder import ABOUT, read_about
from vitamp.metrics import METRICS, set_of
from vitamp.registry import KINDS, Own, registered

IN_TOOLS = ("model", "dataset")
"""What a trained model needs; the others are of training alone."""
IN_VALIDATION = IN_TOOLS + ("metric",)
"""What -eval needs"""


def _is_timms(name: str) -> bool:
    if not timm.is_model(name):
        return False
    entry = timm.model_entrypoint(name)
    is_own = any(entry is own.call for own in registered.values())  # by timm's @register_model
    return entry.__module__ != __name__ and not is_own


IS_BUILT_IN: dict[str, Callable[[str], bool]] = {
    "loss": lambda name: name.casefold() in choices("TRAIN.LOSS"),
    "model": _is_timms,
    "augmentation": lambda name: name.casefold() in POLICIES,
    # Or it reads as a field that lines of metrics.jsonl have already.
    "metric": lambda name: name in METRICS or name in NO_METRICS or set_of(name)[1] != name,
    "dataset": lambda name: name in datasets.names(),
}
"""Kind -> whether the program has one of this name, so that one's own cannot have it"""


def use_own_code(config: Config, given: bool, trust: bool = False) -> None:
    """For the entry scripts: execute the files of USE, if they are `given` now, else the resumed run's copies."""
    allowed.trust |= trust
    run = resumed_run(config)
    noted: list[Noted] = []
    if run is not None and (run / ABOUT).exists():
        # The files that the run used when it was last started.
        noted = noted_of(read_about(run).get(FIELD), run / ABOUT)
    if not given:
        use_of_weights(noted, config, run, IN_VALIDATION if config.EVAL else tuple(KINDS))
        return
    paths = [Path(os.path.expanduser(name)) for name in config.own_files]
    for path in paths:
        before = {one.sha256: one.copy_name for one in noted if one.file == path.name}  # of several folders
        if before and read(path)[1] not in before:
            newest = list(before.values())[-1]
            log.warning(
                "%s has changed since the run's last start (copy: own_code/%s). The run continues with the new file.",
                path,
                newest,
            )
    for path in paths:
        execute(path)
    for file, _ in executed.values():
        log.info("Own code: %s", file.words())
    _bind(config, tuple(KINDS))
    _log_unused(config)


def _log_unused(config: Config) -> None:
    """Log what no setting chooses. A model may also be the teacher, a data set that of the k-NN accuracy."""
    used = _used(config) | {config.TRAIN.TEACHER_MODEL, (config.TRAIN.KNN or "").partition("=")[0]}
    for name, own in registered.items():
        if name in used or (config.EVAL and own.kind not in IN_VALIDATION):
            continue
        setting = KINDS[own.kind].setting
        others = value_of(config, setting)
        chosen = list(others) if isinstance(others, list | tuple) else []
        chosen.append(name)
        what = f"{own.kind} {name} of {Path(own.file).name}"
        log.info("%s is registered, but not used; %s=%s chooses it", what, setting, ",".join(chosen))


def use_of_weights(noted: Sequence[Noted], config: Config, run: Path | None, kinds: Sequence[str] = IN_TOOLS) -> None:
    """Execute what `config` uses of the files that are noted beside weights, as -use and -trust allow."""
    needed = _not_executed(noted, _used(config), kinds)
    own = {read(path)[1]: path for path in allowed.files}
    if run is None:  # weights alone, without copies: their data set may be left alone until its images are asked for
        needed = [one for one in needed if one.sha256 in own or "model" in one.registers.values()]
    strange = [one for one in needed if one.sha256 not in own]
    if strange and not allowed.trust:
        files = [f"  {one.words()}, sha256 {one.sha256}\n    copy: {copy_of(run, one)}" for one in strange]
        raise UserError(
            "This model uses code of its run, which is not executed without your consent:\n"
            + "\n".join(files)
            + "\nRead it. Then add -trust to execute the copy, or -use FILE with a file of the same sha256."
        )
    for one in needed:
        path = own[one.sha256] if one.sha256 in own else copy_of(run, one)
        execute(path, one.file)
    name = config.DATA.DATASET  # perhaps one of -use, which the run does not have
    is_known = IS_BUILT_IN["dataset"](name) or any(name in one.registers for one in noted)
    if not is_known:
        for path in allowed.files:
            execute(path)
    _bind(config, kinds)


def _not_executed(noted: Sequence[Noted], used: set[str], kinds: Sequence[str]) -> list[Noted]:
    """The files that register what is used, of these kinds."""
    done = {one.sha256 for one, _ in executed.values() if one.registers}  # with consent, perhaps at another path
    needed: list[Noted] = []
    for one in noted:
        names = [name for name, kind in one.registers.items() if kind in kinds]
        if one.sha256 not in done and not used.isdisjoint(names):
            needed.append(one)
    return needed


def _used(config: Config) -> set[str]:
    single = {config.TRAIN.LOSS, config.MODEL.NAME.strip(), config.DATA.DATASET}
    return single.union(config.TRAIN.AUGMENT, config.VALIDATE_METRICS)


def _bind(config: Config, kinds: Sequence[str]) -> None:
    """Offer what is registered to what chooses by name, and check names and settings."""
    for name, own in registered.items():
        if IS_BUILT_IN[own.kind](name):
            raise UserError(f"-use {own.file}: the {own.kind} {name} is vitamp's own already; rename yours.")
        if own.kind == "model":
            _offer(own)
    if "loss" in kinds and config.TRAIN.own_loss:
        check_name("loss", config.TRAIN.LOSS, choices("TRAIN.LOSS"))
    if "metric" in kinds:
        for name in config.VALIDATE_METRICS:
            check_name("metric", name)
    chosen = _used(config) if len(kinds) > 1 else {config.MODEL.NAME.strip()}  # of a teacher, its model alone
    for note in bind(config.own_settings, chosen, all_files=len(kinds) == len(KINDS)):
        log.warning("%s.", note)


def bind(texts: Sequence[str], chosen: Collection[str], all_files: bool) -> list[str]:
    """Give their settings (words of USE) to what is registered. Returns notes on settings without effect.

    `chosen`: the names that the run uses. Only they must have all their settings. `all_files`: whether all files of USE
    were executed; otherwise other names may be theirs.
    """
    given: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for text in texts:
        match = OWN_SETTING.fullmatch(text)
        assert match is not None
        name = match[1]
        if name in (registered if all_files else chosen):
            given.setdefault(name, {})[match[2]] = parse_text(match[3])
        elif all_files:
            there = ", ".join(registered) or "nothing"
            similar = nearest(name, registered)
            problems.append(f"{text}: nothing is registered as {name!r}.{similar} The files of USE register {there}.")
    notes: list[str] = []
    for name, own in registered.items():
        values = given.get(name, {})
        if name not in chosen:
            setting = KINDS[own.kind].setting
            if values:
                notes.append(f"{name}: its settings have no effect, because {setting} does not name {name}")
            continue
        try:
            own.values = {key: value for key, value in own.settings(**values) if key in values}
        except ValidationError as error:
            problems += _problems_with(own, error)
    if problems:
        raise UserError("\n".join(problems))
    return notes


def _problems_with(own: Own, error: ValidationError) -> Iterator[str]:
    """One for each setting of `own` that is not as its type says."""
    name = own.name
    known = [f"{name}.{field}" for field in own.settings.model_fields]
    by_setting = {one["loc"][0]: one for one in error.errors()}  # a number's type may be one of two
    for setting, one in by_setting.items():
        key = f"{name}.{setting}"
        if one["type"] == "extra_forbidden":
            there = ", ".join(known) or "no settings"
            yield f"{key}: unknown setting.{nearest(key, known)} The {own.kind} {name} has {there}."
        elif one["type"] == "missing":
            yield f"{own.kind} {name} needs {key}=VALUE: it has no default."
        else:
            yield f"{key}={one['input']}: {one['msg'].lower()}."


CLASSES = 1000
"""Where none are asked for, as of most of timm's models"""
OF_TIMM = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def _offer(own: Own) -> None:
    """Offer a model through timm under its name, so that all of the program finds it."""

    def build(pretrained: bool = False, **given: Any) -> nn.Module:  # noqa: ARG001 - timm passes it
        # Arguments of timm's own that this model lacks are left out; a size that was asked for is not. A rate of 0, the
        # default of MODEL, leaves the model's own.
        dropped = {name for name in KINDS["model"].named + OF_TIMM if not own.takes(name)}
        dropped |= {name for name, value in given.items() if value is None or (name.endswith("_rate") and not value)}
        taken: dict[str, Any] = {"num_classes": CLASSES}
        taken |= {name: value for name, value in given.items() if name not in dropped}
        both = taken.keys() & own.values
        if both:
            key = min(both)
            raise UserError(f"{own.name}.{key}: a key of MODEL sets it too ({taken[key]}); leave one out.")
        try:
            module = own.call(**taken, **own.values)
        except OWN_ERRORS as error:
            if torch.get_default_device().type == "meta":
                with torch.device("cpu"):  # where `.item()` works
                    return build(**given).to("meta")
            raise UserError(own_lines(error) or f"model {own.name}: {error}") from None
        if not isinstance(module, nn.Module):
            raise UserError(f"-use {own.file}: model {own.name} returned {type(module).__name__}, not an nn.Module.")
        # **kwargs are of the class
        named = signature(own.call).parameters.keys() | signature(type(module)).parameters.keys()
        if own.takes("img_size") and "img_size" in named:
            # What timm says of models that are built for one size: the program then passes it.
            vars(module)["pretrained_cfg"] = {**pretrained_cfg(module), "fixed_input_size": True}
        return module

    build.__name__ = own.name
    with warnings.catch_warnings(action="ignore"):  # it replaces a function that timm has from the file itself
        register_model(build)
