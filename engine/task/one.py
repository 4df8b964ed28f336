"""One class per image: top-1 and top-5 accuracy. Labels are int64, B."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from torch import Tensor, nn

from datasets import Batch
from engine.task.base import Metrics, Tally, Task, check_count, sum_type_of
from engine.task.losses import BinaryCrossEntropy, WeightedCrossEntropy
from utils.config.train import TrainConfig
from utils.distributed.world import World, sum_over_ranks
from utils.record.tasks import ONE_LABEL


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


class OneLabel(Task):
    kind = ONE_LABEL
    fewest_classes = 2

    def loss(self, train: TrainConfig, weights: Tensor | None) -> nn.Module:
        if train.LOSS == "bce":
            return BinaryCrossEntropy(train, self.classes, weights)
        if weights is None:
            return nn.CrossEntropyLoss(label_smoothing=train.SMOOTHING)
        return WeightedCrossEntropy(weights, train.SMOOTHING)

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        targets = mixup_target(labels, self.classes, lam)  # pyright: ignore[reportArgumentType]  # a row per image
        return targets, labels.where(lam[:, 0] >= 0.5, labels.flip(0))

    def example(self, size: int, device: torch.device) -> Tensor:
        return torch.randint(0, self.classes, (size,), device=device)

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
        check_count(counted, self._samples)
        return Means(loss / self._samples, 100 * top1 / self._samples, 100 * top5 / self._samples)


def correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the label is the top-1 prediction, and whether it is in the top 5; one value per sample."""
    hits = _hits(logits, labels)
    return hits[:, 0], hits.any(dim=-1)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Which of a sample's top 5 predictions is its label, at most one of them. Two classifiers are averaged."""
    logits = logits.mean(1) if logits.ndim == 3 else logits
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)
