"""What every task has: its loss, the targets of mixed images, and metrics of updates and of a validation."""

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
    """Metrics of an update, an epoch or a validation: attributes have the names of vitamp/metrics.py."""

    shown: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """What log lines show beside the loss: attribute, its words, and its name for LOG_STYLE fleet"""
    mean_words: ClassVar[str] = ""
    """The first of these, as the mean of an epoch so far"""
    loss: float
    _: KW_ONLY
    thresholds: tuple[float, ...] = ()
    """The probability from which on each class is predicted, if the validation chose it."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Metrics that only some runs ask for, by name"""
    predictions: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    """On rank 0: what a validation predicted for each image, in the order of the split"""

    def fields(self) -> dict[str, float | None]:
        """Fields for metrics.jsonl and meta.json. A task without top-1 and top-5 has them too, as null."""
        others = ("thresholds", "more", "predictions")
        own = {name: value for name, value in vars(self).items() if name not in others}
        return dict.fromkeys(OF_EVERY_TASK) | own | dict(self.more)

    def value(self, name: str) -> float:
        """The metric of this name, which must have been measured."""
        value = self.fields()[name]
        assert value is not None
        return value

    def average(self) -> str:
        """The mean of the epoch so far, for a training log line."""
        return f"Avg {self.mean_words}: {getattr(self, self.shown[0][0]):.4f}"

    def summary(self, what: str) -> str:
        """For the log line of a whole epoch or validation. `what`: Train or Validation."""
        values = [f"{what} Loss: {self.loss:.4f}"]
        values += [f"{what} {words}: {getattr(self, name):.4f}" for name, words, _ in self.shown]
        return ", ".join(values)

    def after_time(self) -> str:
        """What follows in that line: PaddleViT's own fields come first."""
        return ""

    def fleet(self) -> str:
        """For LOG_STYLE fleet."""
        values = [f"loss: {self.loss:.5f}"]
        values += [f"{own}: {getattr(self, name):.5f}" for name, _, own in self.shown]
        return ", ".join(values)


class Tally(ABC):
    """Sums of one validation."""

    @abstractmethod
    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count the samples of a batch. `logits`: float32."""

    @abstractmethod
    def metrics(self, world: World) -> Metrics:
        """The metrics of all ranks together. A collective call."""


@dataclass(frozen=True)
class Task(ABC):
    kind: ClassVar[TaskKind]
    """Names and words of its metrics"""
    mixes: ClassVar[bool] = True
    """Whether images may be erased and mixed, with their labels."""
    classes: int
    own_metrics: tuple[str, ...] = field(default=(), kw_only=True)
    """Metrics of the user's own that validation computes too"""

    def words(self) -> str:
        """For the banner."""
        return counted(self.classes, "class")

    def rows(self, val_set: ImageDataset) -> dict[str, str]:
        """More rows of the banner, by name."""
        return {}

    @abstractmethod
    def loss(self, train: TrainConfig, weights: Tensor | None) -> Criterion:
        """(logits, targets) -> loss. `weights`: float32, of the classes; None: all are equal."""

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and labels of images that are mixed with those of `labels.flip(0)`, if the task `mixes`.

        `lam`: weight of each image itself, B x 1. The label is that of the image with the larger weight.
        """
        raise NotImplementedError("images without labels are not mixed")

    @abstractmethod
    def example(self, size: int, device: torch.device) -> Tensor:
        """Made-up labels of a batch, for trials."""

    @abstractmethod
    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """The two counts of a micro-batch that `TrainMeters` adds up beside the loss."""

    @abstractmethod
    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> Metrics:
        """Metrics of these sums."""

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        """Logits of the mean probabilities of several logits."""
        raise NotImplementedError("without labels there are no probabilities")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of the classes, for metrics of the user's own."""
        raise NotImplementedError("without labels there are no probabilities")

    @abstractmethod
    def tally(self, samples: int, device: torch.device) -> Tally:
        """For a validation of so many samples."""


def sum_type_of(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def check_count(counted: float, samples: int) -> None:
    """Raise if a validation did not count each sample once."""
    if counted != samples:
        raise AllRanksError(f"validation counted {counted:.0f} samples, not {samples}; its metrics are not usable.")
