"""Base classes of the tasks: a task's loss, the targets of mixed images, and metrics of training and validation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from datasets import Batch, ImageDataset
from engine.task.losses import Criterion
from utils.config.train import TrainConfig
from utils.distributed.world import World
from utils.errors import AllRanksError
from utils.text import counted
from vitamp.metrics import OF_EVERY_TASK, TaskKind


@dataclass(frozen=True)
class Metrics:
    """Metrics of an update, an epoch or a validation. The attributes are named as in vitamp/metrics.py."""

    shown: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """Metrics that log lines show beside the loss: attribute, its words, and its name for LOG_STYLE fleet"""
    mean_words: ClassVar[str] = ""
    """Words for the first of these, where a line shows its mean over the epoch so far"""
    loss: float
    _: KW_ONLY
    thresholds: tuple[float, ...] = ()
    """With several labels, after a validation: the probability from which on each class is predicted."""
    trivial: tuple[str, ...] = ()
    """Names of metrics that can have only one value, such as top-5 of three classes; log lines leave them out."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Metrics that only some runs ask for, by name"""
    predictions: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    """On rank 0, after a validation: columns with the prediction for each image, in the order of the split"""

    def fields(self) -> dict[str, float | None]:
        """Return the fields of metrics.jsonl and meta.json: all metrics by name.

        Fields that every task has, such as top-1, are None where the task does not measure them.
        """
        not_single_values = ("thresholds", "trivial", "more", "predictions")
        measured = {name: value for name, value in vars(self).items() if name not in not_single_values}
        of_every_task: dict[str, float | None] = dict.fromkeys(OF_EVERY_TASK)
        return of_every_task | measured | dict(self.more)  # `more` has metrics of its own by name

    def value(self, name: str) -> float:
        """Return the metric of this name, which must have been measured."""
        value = self.fields()[name]
        assert value is not None
        return value

    def average(self) -> str:
        """Write the mean of the first metric over the epoch so far, for a training log line."""
        first_metric = self.shown[0][0]
        return f"Avg {self.mean_words}: {getattr(self, first_metric):.4f}"

    def summary(self, phase: str) -> str:
        """Write the metrics for the log line of a whole epoch or validation. `phase`: Train or Validation."""
        values = [f"{phase} Loss: {self.loss:.4f}"]
        values += [
            f"{phase} {words}: {getattr(self, name):.4f}" for name, words, _ in self.shown if name not in self.trivial
        ]
        return ", ".join(values)

    def after_time(self) -> str:
        """Write further metrics for the end of that line, after the time: first come the fields that PaddleViT has."""
        return ""

    def fleet(self) -> str:
        """Write the metrics for a log line in the style of PaddlePaddle's fleet (LOG_STYLE fleet)."""
        values = [f"loss: {self.loss:.5f}"]
        values += [f"{fleet_name}: {getattr(self, name):.5f}" for name, _, fleet_name in self.shown]
        return ", ".join(values)


class Tally(ABC):
    """Sums up the predictions of one validation, batch by batch, into its metrics."""

    @abstractmethod
    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count the samples of a batch. `logits`: float32."""

    @abstractmethod
    def metrics(self, world: World) -> Metrics:
        """Return the metrics of all ranks together. A collective call."""


@dataclass(frozen=True)
class Task(ABC):
    """Decides what follows from the labels: the loss, the targets of mixed images, the metrics."""

    kind: ClassVar[TaskKind]
    """Names and words of its metrics"""
    mixes: ClassVar[bool] = True
    """Whether images may be erased and mixed, with their labels."""
    classes: int
    own_metrics: tuple[str, ...] = field(default=(), kw_only=True)
    """Metrics of the user's own that validation computes too"""

    def words(self) -> str:
        """Describe the classes for the banner."""
        return counted(self.classes, "class")

    def rows(self, val_set: ImageDataset) -> dict[str, str]:
        """Return further rows of the banner, by name."""
        return {}

    @abstractmethod
    def loss(self, train: TrainConfig, weights: Tensor | None) -> Criterion:
        """Build the loss, a function of logits and targets. `weights`: of the classes, float32; None: all are equal."""

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets and labels of a batch whose images are mixed with those of the reversed batch.

        `lam`: weight of each image itself in its mixture, B x 1; its partner, in `labels.flip(0)`, has the rest. The
        label of a mixture, for metrics, is that of the image with the larger weight. Only for a task that `mixes`.
        """
        raise NotImplementedError("images without labels are not mixed")

    @abstractmethod
    def example(self, size: int, device: torch.device) -> Tensor:
        """Make up the labels of a batch, for trials without data."""

    @abstractmethod
    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the two counts of a micro-batch that `TrainMeters` adds up beside the loss."""

    @abstractmethod
    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> Metrics:
        """Return the metrics of an update or epoch: its mean loss, the sums of `counts`, and its number of samples."""

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return logits of the mean of the probabilities that several logits stand for."""
        raise NotImplementedError("without labels there are no probabilities")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the classes, for metrics of the user's own."""
        raise NotImplementedError("without labels there are no probabilities")

    @abstractmethod
    def tally(self, samples: int, device: torch.device) -> Tally:
        """Begin to count for a validation of so many samples."""


def sum_type_of(device: torch.device) -> torch.dtype:
    """Return the most precise float type that a device can sum in."""
    return torch.float32 if device.type == "mps" else torch.float64


def check_count(counted: float, samples: int) -> None:
    """Raise AllRanksError if a validation did not count each sample once."""
    if counted != samples:
        raise AllRanksError(f"validation counted {counted:.0f} samples, not {samples}; its metrics are not usable.")
