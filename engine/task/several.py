"""Several classes per image, or none (DATA.MULTI_LABEL): mAP, AUROC, F1. Labels are rows of zeros and ones, B x C."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import Batch, ImageDataset
from engine.task.base import Metrics, Tally, Task, check_count
from engine.task.losses import Criterion, loss_named
from utils.config.train import TrainConfig
from utils.distributed.world import World, broadcast, sum_over_ranks
from utils.text import counted, some_of
from vitamp.metrics import SEVERAL_LABELS


@dataclass(frozen=True)
class F1Means(Metrics):
    """Training metrics."""

    shown = (("f1_micro", "F1", "f1"),)
    mean_words = "F1"
    f1_micro: float


@dataclass(frozen=True)
class LabelMetrics(F1Means):
    """Validation metrics, as `Scores` explains them."""

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

    def words(self) -> str:
        return f"{super().words()}, several labels per image"

    def rows(self, val_set: ImageDataset) -> dict[str, str]:
        """Classes with too few validation images for a threshold of their own."""
        labels = val_set.sample_labels()
        names: list[object] = list(val_set.classes or ())
        names += range(len(names), labels.shape[1])
        untuned = np.flatnonzero(labels.sum(0, dtype=np.int64) < ENOUGH)
        words = describe_untuned(untuned, names)
        return {"thresholds": words} if words else {}

    def loss(self, train: TrainConfig, weights: Tensor | None) -> Criterion:
        return loss_named("bce" if train.LOSS == "ce" else train.LOSS).build(train, 2, weights)

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        partners = labels.flip(0)
        return torch.lerp(partners, labels, lam), labels.where(lam >= 0.5, partners)

    def example(self, size: int, device: torch.device) -> Tensor:
        return F.one_hot(torch.randint(0, self.classes, (size,), device=device), self.classes).float()

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of micro F1 at a probability of 0.5. Mixed samples count as for top-1."""
        chosen = logits >= 0
        truth = labels > 0
        return 2 * (chosen & truth).sum().to(sum_type), (chosen.sum() + truth.sum()).to(sum_type)

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> F1Means:
        return F1Means(loss, 100 * counts[0] / max(counts[1], 1.0))

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = torch.stack(list(outputs))
        # log p - log (1 - p), of the mean p; the number of outputs cancels out
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _ScoreTable(samples, self, device)


class _ScoreTable(Tally):
    """Logits and labels of every sample."""

    def __init__(self, samples: int, task: SeveralLabels, device: torch.device) -> None:
        self._classes = task.classes
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._table.add(torch.cat((logits, batch.labels), dim=1), batch.indices)

    def metrics(self, world: World) -> LabelMetrics:
        rows = self._table.on_rank_0(world)
        made = None
        if world.first:  # alone, so that the last digits are the same on all and they agree on the best validation
            logits = rows[:, : self._classes].double()
            labels = rows[:, self._classes :].double()
            scores = scores_of(logits.sigmoid().numpy(), labels.numpy() > 0)
            made = LabelMetrics(
                loss=float(F.binary_cross_entropy_with_logits(logits, labels)),
                f1_micro=100 * scores.f1_micro,
                f1_macro=100 * scores.f1_macro,
                map=100 * scores.map,
                auroc=100 * scores.auroc,
                exact_match=100 * scores.exact_match,
                f1_micro_tuned=100 * scores.f1_micro_tuned,
                f1_macro_tuned=100 * scores.f1_macro_tuned,
                thresholds=tuple(scores.thresholds.tolist()),
            )
        made = broadcast(made, world)
        if not world.first:
            return made
        return replace(made, predictions={"logits": rows[:, : self._classes].half().numpy()})


# Metrics of several labels per sample, from the scores of a whole split: mAP, AUROC, F1 and exact match.
#
# Classes without a positive sample have no average precision: means over classes leave them out. The mean AUROC also
# leaves out classes without a negative sample. Classes with few positives (ENOUGH) keep a threshold of 0.5. In
# simulations with calibrated scores, thresholds from 1 to 10 positives had a lower F1 on other images than 0.5 in 14 %
# to 54 % of the cases; from 20 positives, in 5 % to 9 %.

HALF = 0.5
"""Threshold of a class without one of its own."""
ENOUGH = 20
"""Validation images that a class needs for a threshold of its own."""
MOST_NAMED = 10


class Scores(NamedTuple):
    """Metrics as fractions."""

    map: float
    """Mean average precision over the classes with positives."""
    auroc: float
    """Mean area under the ROC curve over the classes with positives and negatives."""
    f1_micro: float
    """F1 of all decisions together, at a threshold of 0.5."""
    f1_macro: float
    """Mean F1 over the classes with positives, at a threshold of 0.5."""
    exact_match: float
    """Fraction of samples with exactly the right labels, at a threshold of 0.5."""
    f1_micro_tuned: float
    """At a threshold for each class, with the highest F1 on these samples if enough of them have the class."""
    f1_macro_tuned: float
    thresholds: np.ndarray
    """Of each class: the probability from which on it is predicted."""
    average_precision: np.ndarray
    """Of each class; NaN without positives."""
    aurocs: np.ndarray
    """AUROC of each class; NaN without positives or without negatives."""


def scores_of(probabilities: np.ndarray, truth: np.ndarray) -> Scores:
    """`probabilities`: float64, N x C. `truth`: bool, N x C."""
    ranked = [rank(probabilities[:, label], truth[:, label]) for label in range(truth.shape[1])]
    precision, thresholds, aurocs = np.array(ranked, dtype=np.float64).T
    thresholds = np.where(truth.sum(0) < ENOUGH, HALF, thresholds)
    chosen = probabilities >= HALF
    _, micro, macro = f1(chosen, truth)
    _, best_micro, best_macro = f1(probabilities >= thresholds, truth)
    return Scores(
        map=_mean(precision, truth),
        auroc=_mean(aurocs, truth & ~truth.all(0)),
        f1_micro=micro,
        f1_macro=macro,
        exact_match=float((chosen == truth).all(1).mean()),
        f1_micro_tuned=best_micro,
        f1_macro_tuned=best_macro,
        thresholds=thresholds,
        average_precision=precision,
        aurocs=aurocs,
    )


def describe_untuned(untuned: Sequence[int] | np.ndarray, names: Sequence[object]) -> str:
    """Which of the classes keep HALF, for log and tools; '' for none."""
    if not len(untuned):
        return ""
    named = some_of([names[label] for label in untuned], MOST_NAMED)
    return (
        f"{len(untuned)} of {len(names)} classes keep a threshold of {HALF}, with fewer than "
        f"{counted(ENOUGH, 'validation image')}: {named}"
    )


def rank(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:
    """Average precision as scikit-learn defines it, threshold with the highest F1, AUROC; NaN where undefined."""
    positives = int(truth.sum())
    if not positives or np.isnan(scores).any():
        return np.nan, HALF, np.nan
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    hits = np.cumsum(truth[order])
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # equal scores are predicted together
    scores = scores[last]
    hits = hits[last]
    predicted = last + 1
    average = float((np.diff(hits, prepend=0) * (hits / predicted)).sum() / positives)
    best = int(np.argmax(2 * hits / (predicted + positives)))
    below = float(scores[best + 1]) if best + 1 < len(scores) else 0.0
    between = (float(scores[best]) + below) / 2  # halfway, because other samples score a little lower or higher
    threshold = between if between > below else float(scores[best])
    # The area under the ROC curve through these counts of true and false positives, from the highest score on.
    misses = predicted - hits
    auroc = np.nan
    if misses[-1]:
        heights = hits - np.diff(hits, prepend=0) / 2  # a positive and a negative of equal score count as half right
        auroc = float((heights * np.diff(misses, prepend=0)).sum() / (hits[-1] * misses[-1]))
    return average, threshold, auroc


def f1(chosen: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, float, float]:
    """F1 of each class, 0 for one that is neither there nor predicted; micro and macro F1."""
    both = (chosen & truth).sum(0)
    of_either = chosen.sum(0) + truth.sum(0)
    of_class = 2 * both / np.maximum(of_either, 1)
    micro = float(2 * both.sum() / of_either.sum()) if of_either.any() else np.nan
    return of_class, micro, _mean(of_class, truth)


def _mean(of_class: np.ndarray, truth: np.ndarray) -> float:
    """Mean over the classes with positives; NaN if there are none."""
    present = truth.any(0)
    return float(of_class[present].mean()) if present.any() else np.nan


# Rows of numbers of every sample of a validation: each rank keeps its own, and rank 0 gets all at the end.

BYTES_AT_ONCE = 64 * 2**20
"""Most memory of a device that gathering takes."""


class Gathered:
    """Rows are in host memory."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples = samples
        self._device = device
        self._indices: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor, indices: Tensor) -> None:
        """One row per sample of a batch; those of padding are left out."""
        # The last column counts how often a sample was seen.
        rows = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).cpu()
        indices = indices.cpu()
        real = indices >= 0
        self._rows.append(rows[real])
        self._indices.append(indices[real])

    def on_rank_0(self, world: World) -> Tensor:
        """All rows, in the order of the split; on other ranks none. A collective call.

        Ranks add up their rows, and zeros for others', a few rows at a time.
        """
        indices = torch.cat(self._indices)
        rows = torch.cat(self._rows)
        width = rows.shape[1]
        table = torch.zeros(self._samples if world.first else 0, width)
        at_once = max(1, BYTES_AT_ONCE // (4 * width))
        for first in range(0, self._samples, at_once):
            last = min(first + at_once, self._samples)
            own = (indices >= first) & (indices < last)
            some = torch.zeros(last - first, width).index_add_(0, indices[own] - first, rows[own])
            some = sum_over_ranks(some.to(self._device), world)
            if world.first:
                table[first:last] = some.cpu()
        check_count(broadcast(int((table[:, -1] == 1).sum()), world), self._samples)
        return table[:, :-1]
