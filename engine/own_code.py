"""Code of the user's own: which files a start executes, the names and settings they register, and a trial of each."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from pydantic import ValidationError
from timm.models import register_model
from torch import Tensor, nn

import datasets
from datasets import Batch
from datasets.transforms.augment import OwnChange, own_augmentations
from engine.task import task_of
from engine.task.base import Metrics, Tally, Task
from engine.task.several import Gathered
from utils.config import Config
from utils.config.keys import choices, value_of
from utils.config.kinds import OWN_SETTING, parse_text
from utils.distributed.world import World, broadcast
from utils.errors import AllRanksError, UserError, nearest
from utils.log import log
from utils.own_code import (
    FIELD,
    OWN_ERRORS,
    Noted,
    OwnCodeError,
    allowed,
    copy_of,
    execute,
    executed,
    noted_by_run,
    noted_of,
    own_lines,
    read,
)
from utils.record.history import NO_METRICS
from utils.record.resumed_run import resumed_run
from vitamp.checkpoints import run_folder_of
from vitamp.metrics import METRICS, set_of
from vitamp.registry import KINDS, Own, names_of, own_named, registered

IN_TOOLS = ("model", "dataset")
"""What a trained model needs; the others are of training alone."""
IN_VALIDATION = (*IN_TOOLS, "metric")
"""What -eval needs"""


def use_own_code(config: Config, given: bool, trust: bool = False) -> None:
    """For the entry scripts: execute the files of USE, if they are `given` now, else the resumed run's copies."""
    allowed.trust |= trust
    run = resumed_run(config)
    noted = noted_by_run(run) if run is not None else []
    if given:
        _warn_of_changes([Path(name) for name in config.own_files], noted)
        for name in config.own_files:
            execute(Path(name).expanduser())
        for one in executed.values():
            log.info("Own code: %s", Noted(**one.as_noted()).words())
        _bind(config, tuple(KINDS))
        for line in _unused(config):
            log.info("%s", line)
    else:
        use_of_weights(noted, config, run, IN_VALIDATION if config.EVAL else tuple(KINDS))


def use_of_weights(noted: Sequence[Noted], config: Config, run: Path | None, kinds: Sequence[str] = IN_TOOLS) -> None:
    """Execute what `config` uses of the files that are noted beside weights, as -use and -trust allow."""
    used = _used(config)
    needed = [one for one in noted if any(kind in kinds and name in used for name, kind in one.registers.items())]
    own = {read(path)[1]: path for path in allowed.files}
    strange = [one for one in needed if one.sha256 not in own]
    if strange and not allowed.trust:
        places = [f"  {one.words()}, sha256 {one.sha256}\n    copy: {_place(run, one)}" for one in strange]
        raise UserError(
            "This model uses code of its run, which is not executed without your consent:\n"
            + "\n".join(places)
            + "\nRead it. Then add -trust to execute the copy, or -use FILE with a file of the same sha256."
        )
    for one in needed:
        execute(own[one.sha256] if one.sha256 in own else copy_of(run, one), one.file)
    _bind(config, kinds)


def use_of_meta(meta: Mapping[str, Any], config: Config, place: Path, kinds: Sequence[str] = IN_TOOLS) -> None:
    """For tools: what the weights at `place` need."""
    use_of_weights(noted_of(meta.get(FIELD), place), config, run_folder_of(place), kinds)


def may_execute(meta: Mapping[str, Any], place: Path, names: Collection[str]) -> bool:
    """Whether the command line allows to execute the files that register these names, by what is noted at `place`."""
    own = {read(path)[1] for path in allowed.files}
    needed = [one for one in noted_of(meta.get(FIELD), place) if not one.registers.keys().isdisjoint(names)]
    return allowed.trust or all(one.sha256 in own for one in needed)


def _place(run: Path | None, noted: Noted) -> str:
    try:
        return str(copy_of(run, noted))
    except UserError as error:
        return str(error)


def _used(config: Config) -> set[str]:
    single = {config.TRAIN.LOSS, config.MODEL.NAME.strip(), config.DATA.DATASET}
    return single.union(config.TRAIN.AUGMENT, config.VALIDATE_METRICS)


def _unused(config: Config) -> Iterator[str]:
    """One line for each thing that the files register and that no setting chooses."""
    # A model may also be the teacher, a data set that of the k-NN accuracy.
    used = _used(config) | {config.TRAIN.TEACHER_MODEL, (config.TRAIN.KNN or "").partition("=")[0]}
    for name, own in registered.items():
        if name in used or (config.EVAL and own.kind not in IN_VALIDATION):
            continue
        setting = KINDS[own.kind].setting
        others = value_of(config, setting)
        value = ",".join([*others, name]) if isinstance(others, list | tuple) else name
        file = Path(own.file).name
        yield f"{own.kind} {name} of {file} is registered, but not used; {setting}={value} chooses it"


def _warn_of_changes(paths: Sequence[Path], noted: Sequence[Noted]) -> None:
    before = {one.file: one for one in noted}
    for path in paths:
        was = before.get(path.name)
        if was is not None and read(path)[1] != was.sha256:
            log.warning(
                "%s has changed since the run's last start (copy: %s). The run continues with the new file.",
                path,
                f"own_code/{was.copy_name}",
            )


def _bind(config: Config, kinds: Sequence[str]) -> None:
    """Offer what is registered to what chooses by name, and check names and settings."""
    if losses := [name for name in names_of("loss") if name.casefold() in choices("TRAIN.LOSS")]:
        raise UserError(f"-use {registered[losses[0]].file}: TRAIN.LOSS has a loss {losses[0]} already; rename yours.")
    if sets := [name for name in names_of("dataset") if name in datasets.names()]:
        raise UserError(f"-use {registered[sets[0]].file}: there is a data set {sets[0]} already; rename yours.")
    if names_of("augmentation"):
        from datasets.transforms.augment import POLICIES

        if known := [name for name in names_of("augmentation") if name in POLICIES]:
            raise UserError(f"-use {registered[known[0]].file}: TRAIN.AUGMENT has {known[0]} already; rename yours.")
    if taken := [name for name in names_of("metric") if _is_taken(name)]:
        raise UserError(f"-use {registered[taken[0]].file}: validation has a metric {taken[0]} already; rename yours.")
    if names_of("model"):
        offer_models()
    if "loss" in kinds and config.TRAIN.own_loss:
        _check_name("loss", config.TRAIN.LOSS, choices("TRAIN.LOSS"))
    for name in config.VALIDATE_METRICS if "metric" in kinds else ():
        _check_name("metric", name)
    for note in bind(config.own_settings, _used(config), all_files=len(kinds) == len(KINDS)):
        log.warning("%s.", note)


def _is_taken(name: str) -> bool:
    """Whether lines of metrics.jsonl have a field of this name already, or one that reads as it."""
    return name in METRICS or name in NO_METRICS or set_of(name)[1] != name


def _check_name(kind: str, name: str, built_in: Sequence[str] = ()) -> None:
    known = [*built_in, *names_of(kind)]
    if name not in known:
        raise UserError(
            f"{KINDS[kind].setting} {name}: there is no {kind} of this name.{nearest(name, known)} "
            f"Known: {', '.join(known) or 'none'}. One of your own needs its file: -use FILE."
        )


def bind(texts: Sequence[str], chosen: Collection[str], all_files: bool) -> list[str]:
    """Give their settings (words of USE) to what is registered. Returns notes on settings without effect.

    `chosen`: the names that the run uses. Only they must have all their settings. `all_files`: whether all files of USE
    were executed; otherwise other names may be theirs.
    """
    given, problems = _by_name(texts, all_files)
    notes: list[str] = []
    for name, own in registered.items():
        values = given.get(name, {})
        if name not in chosen and values:
            notes.append(f"{name}: its settings have no effect, because {KINDS[own.kind].setting} does not name {name}")
        if name not in chosen:
            continue
        try:
            own.values = dict(own.settings(**{key: parse_text(text) for key, text in values.items()}))
        except ValidationError as error:
            for one in error.errors():
                key = ".".join([name, *map(str, one["loc"])])
                known = [f"{name}.{field}" for field in own.settings.model_fields]
                if one["type"] == "extra_forbidden":
                    has = f"{own.kind} {name} has {', '.join(known) or 'no settings'}"
                    problems.append(f"{key}: unknown setting.{nearest(key, known)} The {has}.")
                elif one["type"] == "missing":
                    problems.append(f"{own.kind} {name} needs {key}=VALUE: it has no default.")
                else:
                    problems.append(f"{key}={one['input']}: {one['msg'].lower()}.")
    if problems:
        raise UserError("\n".join(problems))
    return notes


def _by_name(texts: Sequence[str], all_files: bool) -> tuple[dict[str, dict[str, str]], list[str]]:
    given: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for text in texts:
        match = OWN_SETTING.fullmatch(text)
        assert match is not None
        if match[1] in registered:
            given.setdefault(match[1], {})[match[2]] = match[3]
        elif all_files:
            known = ", ".join(registered) or "nothing"
            problems.append(
                f"{text}: nothing is registered as {match[1]!r}.{nearest(match[1], registered)} "
                f"The files of USE register {known}."
            )
    return given, problems


# Models of the user's own: timm offers them under their names, so all of the program finds them.

CLASSES = 1000
"""Where none are asked for, as of most of timm's models"""
_offered: set[str] = set()


def offer_models() -> None:
    for name in names_of("model"):
        if name not in _offered:
            _offer(registered[name])


def _offer(own: Own) -> None:
    if timm.is_model(own.name) and timm.model_entrypoint(own.name).__module__ != __name__:
        raise UserError(f"-use {own.file}: timm has a model {own.name} already; rename yours.")

    def build(pretrained: bool = False, **given: Any) -> nn.Module:  # noqa: ARG001 - timm passes it
        taken = {name: value for name, value in given.items() if value is not None and _passes(own, name)}
        try:
            module = own.call(**{"num_classes": CLASSES, **taken, **own.values})
        except OWN_ERRORS as error:
            raise UserError(own_lines(error) or f"model {own.name}: {error}") from None
        if not isinstance(module, nn.Module):
            raise UserError(f"-use {own.file}: model {own.name} returned {type(module).__name__}, not an nn.Module.")
        if own.takes("img_size") and not getattr(module, "pretrained_cfg", None):
            # What timm says of models that are built for one size: the program then passes it.
            vars(module)["pretrained_cfg"] = {"fixed_input_size": True}
        return module

    build.__name__ = own.name
    register_model(build)
    _offered.add(own.name)


def _passes(own: Own, name: str) -> bool:
    """Arguments of timm's own that this model lacks are left out; a size that was asked for is not."""
    return own.takes(name) or name not in (
        *KINDS["model"].named,
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "cache_dir",
    )


class WithOwnMetrics(Tally):
    """A tally of the program, and the metrics of `task.own_metrics`."""

    def __init__(self, tally: Tally, task: Task, samples: int, device: torch.device) -> None:
        self._tally, self._task = tally, task
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._tally.add(logits, batch)
        labels = batch.labels.reshape(len(logits), -1).to(logits.dtype)
        self._table.add(torch.cat((self._task.probabilities(logits), labels), dim=1), batch.indices)

    def metrics(self, world: World) -> Metrics:
        metrics, rows = self._tally.metrics(world), self._table.on_rank_0(world)
        found = broadcast(self._computed(rows) if world.first else None, world)
        if isinstance(found, str):
            raise AllRanksError(f"{found}\n")
        return replace(metrics, more={**metrics.more, **found})

    def _computed(self, rows: Tensor) -> dict[str, float] | str:
        """The metrics; or the error, which all ranks raise."""
        classes = self._task.classes
        probabilities, labels = rows[:, :classes], rows[:, classes:].long()
        try:
            return measured(self._task.own_metrics, probabilities, labels[:, 0] if labels.shape[1] == 1 else labels)
        except OwnCodeError as error:
            return str(error)


def measured(names: tuple[str, ...], probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """The registered metrics of these names. OwnCodeError, with the user's line, if one fails."""
    return {name: _value(name, probabilities.clone(), labels.clone()) for name in names}


def _value(name: str, probabilities: Tensor, labels: Tensor) -> float:
    own = own_named("metric", name)
    assert own is not None  # checked with the settings
    try:
        made: Any = own.made()
        if hasattr(made, "update") and hasattr(made, "compute"):
            made.update(probabilities, labels)
            value = made.compute()
        else:
            value = made(probabilities, labels)
    except OWN_ERRORS as error:
        raise OwnCodeError(own_lines(error) or f"{own.file}: metric {name}: {error}") from None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OwnCodeError(f"{own.file}: metric {name} returned {what}; it must return one number.") from None


SAMPLES = 4
FOR_METRICS, MOST_FOR_METRICS = 64, 2048
"""Fewest and most images on which metrics are tried"""


def try_own_code(config: Config) -> None:
    """Raise UserError, with the user's line, for what fails on made-up data."""
    host = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if own_named("loss", config.TRAIN.LOSS):
                _try_loss(config)
            for name in own_augmentations(config.TRAIN):
                _try_augmentation(name, config)
            if own_named("model", config.MODEL.NAME) and not config.MODEL.MAE_PRETRAIN:
                _try_model(config)
            if config.VALIDATE_METRICS:
                _try_metrics(config)
        except OwnCodeError as error:
            raise UserError(str(error)) from None
        except UserError:
            raise
        except OWN_ERRORS as error:
            if lines := own_lines(error):
                raise UserError(lines) from None
            raise
        finally:
            random.setstate(host[0])
            np.random.set_state(host[1])


def _try_loss(config: Config) -> None:
    task, name = task_of(config), config.TRAIN.LOSS
    loss = task.loss(config.TRAIN, None)
    labels = task.example(SAMPLES, torch.device("cpu"))
    targets = [labels]
    if config.TRAIN.mixes:
        targets.append(task.mixed(labels, torch.full((SAMPLES, 1), 0.7))[0])
    for target in targets:
        logits = torch.randn(SAMPLES, task.classes, requires_grad=True)
        value = loss(logits, target)
        if not isinstance(value, Tensor) or value.ndim:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{_file('loss', name)}: loss {name} returned {what}; it must return the mean as a scalar.")
        if not value.requires_grad:
            raise UserError(f"{_file('loss', name)}: loss {name} has no gradient with respect to the logits.")
        value.backward()


def _try_augmentation(name: str, config: Config) -> None:
    size = config.DATA.IMAGE_SIZE
    pixels = np.random.randint(0, 256, (size, size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels if config.DATA.IMAGE_CHANNELS == 3 else pixels[:, :, 0])
    OwnChange(name)(image)


def _try_model(config: Config) -> None:
    """Run the model once without weights."""
    name, classes = config.MODEL.NAME.strip(), config.MODEL.NUM_CLASSES
    channels, size = config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE
    with torch.no_grad(), torch.device("meta"):
        module = timm.create_model(name, num_classes=classes, in_chans=channels, img_size=size).eval()
        try:
            logits = module(torch.empty(SAMPLES, channels, size, size))
        except NotImplementedError:  # an operation that needs values
            return
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (SAMPLES, classes):
        raise UserError(
            f"{_file('model', name)}: model {name} returned {shape} for {SAMPLES} images of {size} x {size} x "
            f"{channels}; it must return logits of {SAMPLES} x {classes} (MODEL.NUM_CLASSES)."
        )


def _try_metrics(config: Config) -> None:
    """On random probabilities and labels, among which are all classes unless there are very many."""
    task = task_of(config)
    images = min(max(FOR_METRICS, 2 * task.classes), MOST_FOR_METRICS)
    labels = task.example(images, torch.device("cpu"))
    labels = torch.arange(images) % task.classes if labels.ndim == 1 else labels.long()
    measured(config.VALIDATE_METRICS, task.probabilities(torch.randn(images, task.classes)), labels)


def _file(kind: str, name: str) -> str:
    own = own_named(kind, name)
    return own.file if own else ""
