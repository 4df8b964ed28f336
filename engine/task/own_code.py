"""Code of the user's own while it runs: its metrics of a validation, and a trial on made-up data before the start."""

from dataclasses import replace
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from datasets import Batch
from datasets.transforms.augment import own_augmentations
from datasets.transforms.own import OwnChange
from engine.task import task_of
from engine.task.base import Metrics, Tally, Task
from engine.task.several import Gathered
from utils.config import Config
from utils.distributed.world import World, broadcast
from utils.errors import AllRanksError, UserError
from utils.own_code import OWN_ERRORS, OwnCodeError, own_lines
from utils.seeding import fork_host_rng
from vitamp.metrics import ONE_LABEL
from vitamp.registry import own_named
from vitamp.sizes import in_pixels


class WithOwnMetrics(Tally):
    """A tally of the program, and the metrics of `task.own_metrics`."""

    def __init__(self, tally: Tally, task: Task, samples: int, device: torch.device) -> None:
        self._tally = tally
        self._task = task
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._tally.add(logits, batch)
        labels = batch.labels.reshape(len(logits), -1).to(logits.dtype)
        self._table.add(torch.cat((self._task.probabilities(logits), labels), dim=1), batch.indices)

    def metrics(self, world: World) -> Metrics:
        metrics = self._tally.metrics(world)
        rows = self._table.on_rank_0(world)
        found: dict[str, float] | str | None = None
        if world.first:
            probabilities = rows[:, : self._task.classes]
            labels = rows[:, self._task.classes :].long()
            if self._task.kind == ONE_LABEL:
                labels = labels[:, 0]
            try:
                found = measured(self._task.own_metrics, probabilities, labels)
            except OwnCodeError as error:  # which all ranks raise
                found = str(error)
        found = broadcast(found, world)
        if isinstance(found, str):
            raise AllRanksError(f"{found}\n")
        return replace(metrics, more={**metrics.more, **(found or {})})


def measured(names: tuple[str, ...], probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """The registered metrics of these names. OwnCodeError, with the user's line, if one fails."""
    found: dict[str, float] = {}
    for name in names:
        own = own_named("metric", name)
        assert own is not None  # checked with the settings
        its_probabilities = probabilities.clone()
        its_labels = labels.clone()
        try:
            made: Any = own.made()
            if hasattr(made, "update") and hasattr(made, "compute"):
                made.update(its_probabilities, its_labels)
                value = made.compute()
            else:
                value = made(its_probabilities, its_labels)
        except OWN_ERRORS as error:
            raise OwnCodeError(own_lines(error) or f"{own.file}: metric {name}: {error}") from None
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise OwnCodeError(
                f"{own.file}: metric {name} returned {_what(value)}; it must return one number."
            ) from None
    return found


def _what(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


SAMPLES = 4
FOR_METRICS = 64
"""Fewest images on which metrics are tried"""
MOST_FOR_METRICS = 2048


def try_own_code(config: Config) -> None:
    """Raise UserError, with the user's line, for what fails on made-up data."""
    named = ", ".join(config.own_files)
    has_labels = not config.MODEL.MAE_PRETRAIN
    with fork_host_rng():
        try:
            loss = own_named("loss", config.TRAIN.LOSS)
            if loss and has_labels:
                named = f"{loss.file}: loss {loss.name}"
                _try_loss(config, named)
            if not config.EVAL:  # else their files are not executed
                _try_augmentations(config)
            model = own_named("model", config.MODEL.NAME)
            if model and has_labels:
                named = f"{model.file}: model {model.name}"
                _try_model(config, named)
            if config.VALIDATE_METRICS:
                _try_metrics(config)
        except OwnCodeError as error:
            raise UserError(str(error)) from None
        except UserError:
            raise
        except OWN_ERRORS as error:
            # Of torch or timm, without a line of the file: of layers that it only builds.
            raise UserError(own_lines(error) or f"{named}: {type(error).__name__}: {error}") from None


def _try_loss(config: Config, named: str) -> None:
    task = task_of(config)
    loss = task.loss(config.TRAIN, None)
    labels = task.example(SAMPLES, torch.device("cpu"))
    weights = loss.parameters() if isinstance(loss, nn.Module) and not config.EVAL else ()
    if any(weight.requires_grad for weight in weights):
        what = "weights that nothing trains; train them in a model, or freeze them: requires_grad_(False)"
        raise UserError(f"{named} has {what}.")
    if config.TRAIN.mixes or config.TRAIN.DISTILLATION_TYPE is not None:  # its labels are one-hot
        labels, _ = task.mixed(labels, torch.full((SAMPLES, 1), 0.7))
    value = loss(torch.randn(SAMPLES, task.classes, requires_grad=True), labels)
    if not isinstance(value, Tensor) or value.ndim:
        raise UserError(f"{named} returned {_what(value)}; it must return the mean as a scalar.")
    if not value.requires_grad:
        raise UserError(f"{named} has no gradient with respect to the logits.")
    value.backward()


def _try_augmentations(config: Config) -> None:
    channels, high, wide = config.DATA.shape
    for name in own_augmentations(config.TRAIN):
        pixels = np.random.randint(0, 256, (high, wide, 3), dtype=np.uint8)
        OwnChange(name)(Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]))


def _try_metrics(config: Config) -> None:
    task = task_of(config)
    # All classes are among the labels, unless there are very many.
    images = min(max(FOR_METRICS, 2 * task.classes), MOST_FOR_METRICS)
    labels = torch.arange(images) % task.classes
    if task.kind != ONE_LABEL:
        labels = F.one_hot(labels, task.classes)
    measured(config.VALIDATE_METRICS, task.probabilities(torch.randn(images, task.classes)), labels)


def _try_model(config: Config, named: str) -> None:
    """Run the model once without weights."""
    classes = config.MODEL.NUM_CLASSES
    channels = config.DATA.IMAGE_CHANNELS
    size = config.DATA.IMAGE_SIZE
    with torch.no_grad(), torch.device("meta"):
        name = config.MODEL.NAME.strip()
        module = timm.create_model(name, num_classes=classes, in_chans=channels, img_size=size).eval()
        try:
            logits = module(torch.empty(SAMPLES, *config.DATA.shape))
        except NotImplementedError:  # an operation that needs values
            return
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (SAMPLES, classes):
        raise UserError(
            f"{named} returned {shape} for {SAMPLES} images of {in_pixels(size)} x {channels}; it must return logits "
            f"of {SAMPLES} x {classes} (MODEL.NUM_CLASSES)."
        )
