"""Runs the user's own code: its metrics in each validation, and a trial of all of it before the start."""

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
    """Adds the user's own metrics (`task.own_metrics`) to those of a tally of the program."""

    def __init__(self, tally: Tally, task: Task, samples: int, device: torch.device) -> None:
        self._tally = tally
        self._task = task
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._tally.add(logits, batch)
        labels = batch.labels.reshape(len(logits), -1).to(logits.dtype)
        self._table.add(torch.cat((self._task.probabilities(logits), labels), dim=1), batch.indices)

    def metrics(self, world: World) -> Metrics:
        """Return the metrics of the tally and the user's own, the same on all ranks. A collective call."""
        metrics = self._tally.metrics(world)
        rows = self._table.on_rank_0(world)
        # Rank 0 computes the user's metrics. If one fails there, all ranks raise its error.
        values: dict[str, float] = {}
        problem: str | None = None
        if world.first:
            # As in `add`, a row has the probabilities of all classes, then the label, or a label per class.
            probabilities = rows[:, : self._task.classes]
            labels = rows[:, self._task.classes :].long()
            if self._task.kind == ONE_LABEL:
                labels = labels[:, 0]
            try:
                values = measured(self._task.own_metrics, probabilities, labels)
            except OwnCodeError as error:
                problem = str(error)
        values, problem = broadcast((values, problem), world)
        if problem is not None:
            raise AllRanksError(f"{problem}\n")
        return replace(metrics, more={**metrics.more, **values})


def measured(names: tuple[str, ...], probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the user's metrics of these names. Raises OwnCodeError, with the line of the user's file, if one fails.

    A metric is a function of probabilities and labels, or an object with `update` and `compute` as torchmetrics has.
    """
    values: dict[str, float] = {}
    for name in names:
        own = own_named("metric", name)
        assert own is not None  # checked with the settings
        # Copies, since a metric may change its arguments, and the next one gets them too.
        probabilities_copy = probabilities.clone()
        labels_copy = labels.clone()
        try:
            metric: Any = own.made()
            if hasattr(metric, "update") and hasattr(metric, "compute"):
                metric.update(probabilities_copy, labels_copy)
                value = metric.compute()
            else:
                value = metric(probabilities_copy, labels_copy)
        except OWN_ERRORS as error:
            raise OwnCodeError(own_lines(error) or f"{own.file}: metric {name}: {error}") from None
        try:
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise OwnCodeError(
                f"{own.file}: metric {name} returned {_describe(value)}; it must return one number."
            ) from None
    return values


def _describe(value: object) -> str:
    """Describe a wrong return value of the user's code for an error."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


SAMPLES = 4
"""Images on which a loss and a model are tried"""
FEWEST_FOR_METRICS = 64
"""Images on which metrics are tried, if there are few classes"""
MOST_FOR_METRICS = 2048


def try_own_code(config: Config) -> None:
    """Try the user's own loss, augmentations, model and metrics on made-up data, before the run starts.

    Raises UserError for what fails, with the line of the user's file; or with the file and name of the code, if the
    error was raised elsewhere.
    """
    tried = ", ".join(config.own_files)  # the code that is tried now, for errors
    has_labels = not config.MODEL.MAE_PRETRAIN
    with fork_host_rng():
        try:
            loss = own_named("loss", config.TRAIN.LOSS)
            if loss and has_labels:
                tried = f"{loss.file}: loss {loss.name}"
                _try_loss(config, tried)
            if not config.EVAL:  # an evaluation does not execute the files of augmentations
                _try_augmentations(config)
            model = own_named("model", config.MODEL.NAME)
            if model and has_labels:
                tried = f"{model.file}: model {model.name}"
                _try_model(config, tried)
            if config.VALIDATE_METRICS:
                _try_metrics(config)
        except OwnCodeError as error:
            raise UserError(str(error)) from None
        except UserError:
            raise
        except OWN_ERRORS as error:
            # An error without a line of the user's file: torch or timm raised it in layers that the file only builds.
            raise UserError(own_lines(error) or f"{tried}: {type(error).__name__}: {error}") from None


def _try_loss(config: Config, tried: str) -> None:
    """Compute the user's loss and its gradient once. `tried`: file and name of the loss, for errors."""
    task = task_of(config)
    loss = task.loss(config.TRAIN, None)
    labels = task.example(SAMPLES, torch.device("cpu"))
    if isinstance(loss, nn.Module) and not config.EVAL and any(weight.requires_grad for weight in loss.parameters()):
        problem = "weights that nothing trains; train them in a model, or freeze them: requires_grad_(False)"
        raise UserError(f"{tried} has {problem}.")
    targets = labels
    if config.TRAIN.mixes or config.TRAIN.DISTILLATION_TYPE is not None:  # then targets are rows of probabilities
        fraction_of_image = torch.full((SAMPLES, 1), 0.7)  # the rest is of the image that it is mixed with
        targets, _ = task.mixed(labels, fraction_of_image)
    value = loss(torch.randn(SAMPLES, task.classes, requires_grad=True), targets)
    if not isinstance(value, Tensor) or value.ndim:
        raise UserError(f"{tried} returned {_describe(value)}; it must return the mean as a scalar.")
    if not value.requires_grad:
        raise UserError(f"{tried} has no gradient with respect to the logits.")
    value.backward()


def _try_augmentations(config: Config) -> None:
    """Apply each of the user's augmentations to a random image."""
    channels, height, width = config.DATA.shape
    for name in own_augmentations(config.TRAIN):
        pixels = np.random.randint(0, 256, (height, width, 3), dtype=np.uint8)
        OwnChange(name)(Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]))


def _try_metrics(config: Config) -> None:
    """Compute the user's metrics once, of random predictions."""
    task = task_of(config)
    # Two images of each class, but not very few or very many images
    images = min(max(FEWEST_FOR_METRICS, 2 * task.classes), MOST_FOR_METRICS)
    labels = torch.arange(images) % task.classes
    if task.kind != ONE_LABEL:
        labels = F.one_hot(labels, task.classes)
    measured(config.VALIDATE_METRICS, task.probabilities(torch.randn(images, task.classes)), labels)


def _try_model(config: Config, tried: str) -> None:
    """Build the user's model and run it once on the meta device, which computes and allocates nothing.

    `tried`: file and name of the model, for errors.
    """
    classes = config.MODEL.NUM_CLASSES
    channels = config.DATA.IMAGE_CHANNELS
    size = config.DATA.IMAGE_SIZE
    with torch.no_grad(), torch.device("meta"):
        name = config.MODEL.NAME.strip()
        module = timm.create_model(name, num_classes=classes, in_chans=channels, img_size=size).eval()
        try:
            logits = module(torch.empty(SAMPLES, *config.DATA.shape))
        except NotImplementedError:  # an operation needs values, which the meta device does not have
            return
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (SAMPLES, classes):
        raise UserError(
            f"{tried} returned {shape} for {SAMPLES} images of {in_pixels(size)} x {channels}; it must return logits "
            f"of {SAMPLES} x {classes} (MODEL.NUM_CLASSES)."
        )
