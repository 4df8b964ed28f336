"""What the labels of a run are, and so what is measured: one class per sample, or several (DATA.MULTI_LABEL).

A `Task` counts in training and makes a `Tally` of each validation. Its loss is in `engine/optim/loss.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import Batch
from engine.measure.ranking import scores_of
from utils.config import Config
from utils.distributed.world import World, broadcast, sum_over_ranks
from utils.errors import AllRanksError
from utils.record.tasks import ONE_LABEL

BYTES_AT_ONCE = 64 * 2**20
"""Most memory of a device that gathering the scores of several labels takes."""


class Metrics:
    """Metrics of an update, an epoch or a validation: attributes have the names of utils/record/tasks.py."""

    loss: float
    acc1: Any = None
    """Top-1; None for a task without it, as is top-5"""
    acc5: Any = None
    thresholds: tuple[float, ...] = ()
    """The probability from which on each class is predicted, if the validation chose it."""

    def fields(self) -> dict[str, float | None]:
        """Fields for metrics.jsonl and meta.json."""
        own = {name: value for name, value in vars(self).items() if name != "thresholds"}
        return {metric.name: getattr(self, metric.name) for metric in ONE_LABEL.metrics} | own

    def average(self) -> str:
        """The mean of the epoch so far, for a training log line."""
        raise NotImplementedError

    def summary(self, what: str) -> str:
        """For the log line of a whole epoch or validation. `what`: Train or Validation."""
        raise NotImplementedError

    def fleet(self) -> str:
        """For LOG_STYLE fleet."""
        raise NotImplementedError


@dataclass(frozen=True)
class Means(Metrics):
    """Mean loss and accuracies in percent."""

    loss: float
    acc1: float
    acc5: float

    def average(self) -> str:
        return f"Avg Acc: {self.acc1:.4f}"

    def summary(self, what: str) -> str:
        return f"{what} Loss: {self.loss:.4f}, {what} Acc@1: {self.acc1:.4f}, {what} Acc@5: {self.acc5:.4f}"

    def fleet(self) -> str:
        return f"loss: {self.loss:.5f}, acc1: {self.acc1:.5f}, acc5: {self.acc5:.5f}"


@dataclass(frozen=True)
class F1Means(Metrics):
    """Training metrics of several labels per sample."""

    loss: float
    f1_micro: float

    def average(self) -> str:
        return f"Avg F1: {self.f1_micro:.4f}"

    def summary(self, what: str) -> str:
        return f"{what} Loss: {self.loss:.4f}, {what} F1: {self.f1_micro:.4f}"

    def fleet(self) -> str:
        return f"loss: {self.loss:.5f}, f1: {self.f1_micro:.5f}"


@dataclass(frozen=True)
class MultiLabelMetrics(F1Means):
    """Validation metrics of several labels per sample, as `ranking.Scores` explains them."""

    f1_macro: float
    map: float
    exact_match: float
    f1_micro_tuned: float
    f1_macro_tuned: float
    thresholds: tuple[float, ...] = ()

    def summary(self, what: str) -> str:
        return (
            f"{what} Loss: {self.loss:.4f}, {what} mAP: {self.map:.4f}, {what} F1: micro {self.f1_micro:.4f}, "
            f"macro {self.f1_macro:.4f} (at tuned thresholds {self.f1_micro_tuned:.4f}, {self.f1_macro_tuned:.4f}), "
            f"{what} Exact match: {self.exact_match:.4f}"
        )


class Tally(ABC):
    """Sums of one validation."""

    @abstractmethod
    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count the samples of a batch. `logits`: float32."""

    @abstractmethod
    def metrics(self, world: World) -> Metrics:
        """The metrics of all ranks together. A collective call."""


class Task(ABC):
    @abstractmethod
    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """The two counts of a micro-batch that `TrainMeters` adds up beside the loss."""

    @abstractmethod
    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> Metrics:
        """Metrics of these sums."""

    @abstractmethod
    def tally(self, samples: int, device: torch.device) -> Tally:
        """For a validation of so many samples."""


def task_of(config: Config) -> Task:
    if not config.DATA.MULTI_LABEL:
        return SINGLE_LABEL
    return MultiLabel(int(config.MODEL.NUM_CLASSES), config.DATA.THRESHOLD_IMAGES)


def correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the label is the top-1 prediction, and whether it is in the top 5; one value per sample."""
    hits = _hits(logits, labels)
    return hits[:, 0], hits.any(dim=-1)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Which of a sample's top 5 predictions is its label, at most one of them. Two classifiers are averaged."""
    logits = logits.mean(1) if logits.ndim == 3 else logits
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)


def sum_type_of(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class SingleLabel(Task):
    """One class per sample: top-1 and top-5 accuracy."""

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        hits = _hits(logits, labels).sum(0).to(sum_type)
        return hits[0], hits.sum()

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> Means:
        return Means(loss, 100 * counts[0] / samples, 100 * counts[1] / samples)

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _Accuracy(samples, device)


class _Accuracy(Tally):
    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples = samples
        self._sums = torch.zeros(4, dtype=sum_type_of(device), device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        first, five = correct(logits, batch.labels)
        real = batch.indices >= 0  # False for samples that only pad the batch
        losses = F.cross_entropy(logits, batch.labels, reduction="none").to(self._sums.dtype)
        losses = losses.where(real, 0.0)  # not a product: 0 times an infinite loss is NaN
        self._sums += torch.stack((losses.sum(), (first & real).sum(), (five & real).sum(), real.sum()))

    def metrics(self, world: World) -> Means:
        loss, top1, top5, counted = sum_over_ranks(self._sums, world).tolist()
        _check_count(counted, self._samples)
        return Means(loss / self._samples, 100 * top1 / self._samples, 100 * top5 / self._samples)


SINGLE_LABEL = SingleLabel()


@dataclass(frozen=True)
class MultiLabel(Task):
    """Several classes per sample, or none. `labels` are rows of zeros and ones, B x C."""

    classes: int
    threshold_images: int

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of micro F1 at a probability of 0.5. Mixed samples count as for top-1."""
        chosen, truth = logits >= 0, labels > 0
        return 2 * (chosen & truth).sum().to(sum_type), (chosen.sum() + truth.sum()).to(sum_type)

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> F1Means:
        return F1Means(loss, 100 * counts[0] / max(counts[1], 1.0))

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _ScoreTable(samples, self, device)


class _ScoreTable(Tally):
    """Logits and labels of every sample: each rank keeps its own in host memory, and rank 0 gets all at the end."""

    def __init__(self, samples: int, task: MultiLabel, device: torch.device) -> None:
        self._samples, self._classes, self._device = samples, task.classes, device
        self._threshold_images = task.threshold_images
        self._width = 2 * task.classes + 1  # the last column counts how often a sample was seen
        self._indices: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, logits: Tensor, batch: Batch) -> None:
        rows, indices = (
            torch.cat((logits, batch.labels, torch.ones_like(logits[:, :1])), dim=1).cpu(),
            batch.indices.cpu(),
        )
        real = indices >= 0  # False for samples that only pad the batch
        self._rows.append(rows[real])
        self._indices.append(indices[real])

    def metrics(self, world: World) -> MultiLabelMetrics:
        rows = self._on_rank_0(world)
        _check_count(broadcast(int((rows[:, -1] == 1).sum()), world), self._samples)
        # One rank computes, so that the last digits are the same on all and they agree on the best validation.
        return MultiLabelMetrics(**broadcast(self._computed(rows) if world.first else None, world))

    def _on_rank_0(self, world: World) -> Tensor:
        """All rows, in the order of the split. Ranks add up their rows, and zeros for others', a few rows at a time."""
        indices, rows = torch.cat(self._indices), torch.cat(self._rows)
        table = torch.zeros(self._samples if world.first else 0, self._width)
        at_once = max(1, BYTES_AT_ONCE // (4 * self._width))
        for first in range(0, self._samples, at_once):
            last = min(first + at_once, self._samples)
            own = (indices >= first) & (indices < last)
            some = torch.zeros(last - first, self._width).index_add_(0, indices[own] - first, rows[own])
            some = sum_over_ranks(some.to(self._device), world)
            if world.first:
                table[first:last] = some.cpu()
        return table

    def _computed(self, rows: Tensor) -> dict[str, Any]:
        logits, labels = rows[:, : self._classes].double(), rows[:, self._classes : -1].double()
        found = scores_of(logits.sigmoid().numpy(), labels.numpy() > 0, self._threshold_images)._asdict()
        del found["average_precision"]
        thresholds = tuple(found.pop("thresholds").tolist())
        loss = float(F.binary_cross_entropy_with_logits(logits, labels))
        return {"loss": loss, **{name: 100 * value for name, value in found.items()}, "thresholds": thresholds}


def _check_count(counted: float, samples: int) -> None:
    if counted != samples:
        raise AllRanksError(f"validation counted {counted:.0f} samples, not {samples}; its metrics are not usable.")
