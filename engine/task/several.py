"""Several classes per image, or none (DATA.MULTI_LABEL): mAP, AUROC, F1. Labels are rows of zeros and ones, B x C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import Batch, ImageDataset
from engine.task.base import Metrics, Tally, Task
from engine.task.gathered import Gathered
from engine.task.losses import BinaryCrossEntropy, own_loss
from engine.task.ranking import describe_untuned, scores_of
from utils.config.train import TrainConfig
from utils.distributed.world import World, broadcast
from utils.record.tasks import SEVERAL_LABELS


@dataclass(frozen=True)
class F1Means(Metrics):
    """Training metrics."""

    f1_micro: float

    def average(self) -> str:
        return f"Avg F1: {self.f1_micro:.4f}"

    def summary(self, what: str) -> str:
        return f"{what} Loss: {self.loss:.4f}, {what} F1: {self.f1_micro:.4f}"

    def fleet(self) -> str:
        return f"loss: {self.loss:.5f}, f1: {self.f1_micro:.5f}"


@dataclass(frozen=True)
class LabelMetrics(F1Means):
    """Validation metrics, as `ranking.Scores` explains them."""

    f1_macro: float
    map: float
    auroc: float
    exact_match: float
    f1_micro_tuned: float
    f1_macro_tuned: float

    def summary(self, what: str) -> str:
        return (
            f"{what} Loss: {self.loss:.4f}, {what} mAP: {self.map:.4f}, {what} AUROC: {self.auroc:.4f}, "
            f"{what} F1: micro {self.f1_micro:.4f}, macro {self.f1_macro:.4f} "
            f"(at tuned thresholds {self.f1_micro_tuned:.4f}, {self.f1_macro_tuned:.4f}), "
            f"{what} Exact match: {self.exact_match:.4f}"
        )


@dataclass(frozen=True)
class SeveralLabels(Task):
    kind = SEVERAL_LABELS
    threshold_images: int

    def words(self) -> str:
        return f"{super().words()}, several labels per image"

    def rows(self, val_set: ImageDataset) -> dict[str, str]:
        """Classes with too few validation images for a threshold of their own."""
        labels = val_set.sample_labels()
        if labels is None:
            return {}
        names, least = val_set.classes or [], self.threshold_images
        untuned = np.flatnonzero(labels.sum(0, dtype=np.int64) < least)
        words = describe_untuned(untuned, [*names, *range(len(names), labels.shape[1])], least)
        return {"thresholds": words} if words else {}

    def loss(self, train: TrainConfig, weights: Tensor | None) -> nn.Module:
        return own_loss(train.LOSS) if train.own_loss else BinaryCrossEntropy(train, 2, weights)

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        partners = labels.flip(0)
        return torch.lerp(partners, labels, lam), labels.where(lam >= 0.5, partners)

    def example(self, size: int, device: torch.device) -> Tensor:
        return F.one_hot(torch.randint(0, self.classes, (size,), device=device), self.classes).float()

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of micro F1 at a probability of 0.5. Mixed samples count as for top-1."""
        chosen, truth = logits >= 0, labels > 0
        return 2 * (chosen & truth).sum().to(sum_type), (chosen.sum() + truth.sum()).to(sum_type)

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> F1Means:
        return F1Means(loss, 100 * counts[0] / max(counts[1], 1.0))

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = torch.stack([*outputs])
        # log p - log (1 - p), of the mean p; the number of outputs cancels out
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _ScoreTable(samples, self, device)


class _ScoreTable(Tally):
    """Logits and labels of every sample."""

    def __init__(self, samples: int, task: SeveralLabels, device: torch.device) -> None:
        self._classes, self._threshold_images = task.classes, task.threshold_images
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._table.add(torch.cat((logits, batch.labels), dim=1), batch.indices)

    def metrics(self, world: World) -> LabelMetrics:
        rows = self._table.on_rank_0(world)
        # One rank computes, so that the last digits are the same on all and they agree on the best validation.
        return LabelMetrics(**broadcast(self._computed(rows) if world.first else None, world))

    def _computed(self, rows: Tensor) -> dict[str, Any]:
        logits, labels = rows[:, : self._classes].double(), rows[:, self._classes :].double()
        found = scores_of(logits.sigmoid().numpy(), labels.numpy() > 0, self._threshold_images)._asdict()
        del found["average_precision"], found["aurocs"]
        thresholds = tuple(found.pop("thresholds").tolist())
        loss = float(F.binary_cross_entropy_with_logits(logits, labels))
        return {"loss": loss, **{name: 100 * value for name, value in found.items()}, "thresholds": thresholds}
