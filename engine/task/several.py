"""The task of several classes per image, or none (DATA.MULTI_LABEL): mAP, AUROC, F1.

Labels are rows of zeros and ones, B x C.
"""

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
    """Metrics of an update or epoch, in percent."""

    shown = (("f1_micro", "F1", "f1"),)
    mean_words = "F1"
    f1_micro: float


@dataclass(frozen=True)
class LabelMetrics(F1Means):
    """Metrics of a validation, in percent. `Scores` explains them."""

    f1_macro: float
    map: float
    auroc: float
    exact_match: float
    f1_micro_tuned: float
    f1_macro_tuned: float

    def summary(self, phase: str) -> str:
        return (
            f"{phase} Loss: {self.loss:.4f}, {phase} mAP: {self.map:.4f}, {phase} AUROC: {self.auroc:.4f}, "
            f"{phase} F1: micro {self.f1_micro:.4f}, macro {self.f1_macro:.4f} "
            f"(at tuned thresholds {self.f1_micro_tuned:.4f}, {self.f1_macro_tuned:.4f}), "
            f"{phase} Exact match: {self.exact_match:.4f}"
        )


@dataclass(frozen=True)
class SeveralLabels(Task):
    """Each image may have any number of the classes, so each class is predicted by itself."""

    kind = SEVERAL_LABELS

    def words(self) -> str:
        return f"{super().words()}, several labels per image"

    def rows(self, val_set: ImageDataset) -> dict[str, str]:
        """Name the classes that have too few validation images for a threshold of their own."""
        labels = val_set.sample_labels()
        names: list[object] = list(val_set.classes or ())
        names += range(len(names), labels.shape[1])  # a class without a name is shown by its number
        images_of_class = labels.sum(0, dtype=np.int64)
        untuned = np.flatnonzero(images_of_class < ENOUGH_TO_TUNE)
        words = describe_untuned(untuned, names)
        return {"thresholds": words} if words else {}

    def loss(self, train: TrainConfig, weights: Tensor | None) -> Criterion:
        # "ce" is the default. Cross-entropy needs exactly one class per image, so binary cross-entropy replaces it.
        name = "bce" if train.LOSS == "ce" else train.LOSS
        outcomes = 2  # of each class: present or not
        return loss_named(name).build(train, outcomes, weights)

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        partners = labels.flip(0)
        return torch.lerp(partners, labels, lam), labels.where(lam >= 0.5, partners)

    def example(self, size: int, device: torch.device) -> Tensor:
        return F.one_hot(torch.randint(0, self.classes, (size,), device=device), self.classes).float()

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of micro F1 at a threshold of 0.5: 2 x right / (predicted + true) labels.

        `labels`: rows of zeros and ones. For a mixed image, `mixed` has chosen those of the image with the larger
        weight, as for top-1 accuracy.
        """
        predicted = logits >= 0  # a logit of 0 is a probability of 0.5
        truth = labels > 0
        right = (predicted & truth).sum()
        return 2 * right.to(sum_type), (predicted.sum() + truth.sum()).to(sum_type)

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> F1Means:
        numerator, denominator = counts
        return F1Means(loss, 100 * numerator / max(denominator, 1.0))

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = torch.stack(list(outputs))
        # The logit of the mean probability p is log p - log (1 - p), in which the number of outputs cancels out.
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _ScoreTable(samples, self, device)


class _ScoreTable(Tally):
    """Keeps logits and labels of every sample, since these metrics need the scores of the whole split."""

    def __init__(self, samples: int, task: SeveralLabels, device: torch.device) -> None:
        self._classes = task.classes
        self._table = Gathered(samples, device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._table.add(torch.cat((logits, batch.labels), dim=1), batch.indices)

    def metrics(self, world: World) -> LabelMetrics:
        """Return the metrics of all ranks together; only rank 0, which has all rows, adds the predictions.

        A collective call.
        """
        rows = self._table.on_rank_0(world)
        metrics = None
        # Rank 0 computes them for all, so that the last digits are the same and the ranks agree on the best validation.
        if world.first:
            # As in `add`, a row has the logits of all classes, then the labels.
            logits = rows[:, : self._classes].double()
            labels = rows[:, self._classes :].double()
            scores = scores_of(logits.sigmoid().numpy(), labels.numpy() > 0)
            metrics = LabelMetrics(
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
        metrics = broadcast(metrics, world)
        if not world.first:
            return metrics
        return replace(metrics, predictions={"logits": rows[:, : self._classes].half().numpy()})


# Metrics of several labels per sample, from the scores of a whole split: mAP, AUROC, F1 and exact match.
#
# Classes without a positive sample have no average precision: means over classes leave them out. The mean AUROC also
# leaves out classes without a negative sample. Classes with few positives (ENOUGH_TO_TUNE) keep a threshold of 0.5. In
# simulations with calibrated scores, thresholds from 1 to 10 positives had a lower F1 on other images than 0.5 in 14 %
# to 54 % of the cases; from 20 positives, in 5 % to 9 %.

HALF = 0.5
"""Threshold of a class without one of its own."""
ENOUGH_TO_TUNE = 20
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
    """Compute all metrics from the scores of a split. `probabilities`: float64, N x C. `truth`: bool, N x C."""
    ranked = [rank(probabilities[:, label], truth[:, label]) for label in range(truth.shape[1])]
    precisions, best_thresholds, aurocs = np.array(ranked, dtype=np.float64).T
    thresholds = np.where(truth.sum(0) < ENOUGH_TO_TUNE, HALF, best_thresholds)
    predicted = probabilities >= HALF
    _, micro, macro = f1(predicted, truth)  # without the F1 of each class
    _, tuned_micro, tuned_macro = f1(probabilities >= thresholds, truth)
    truth_where_auroc_is_defined = truth & ~truth.all(0)  # as if classes without negatives had no positives either
    return Scores(
        map=_mean(precisions, truth),
        auroc=_mean(aurocs, truth_where_auroc_is_defined),
        f1_micro=micro,
        f1_macro=macro,
        exact_match=float((predicted == truth).all(1).mean()),
        f1_micro_tuned=tuned_micro,
        f1_macro_tuned=tuned_macro,
        thresholds=thresholds,
        average_precision=precisions,
        aurocs=aurocs,
    )


def describe_untuned(untuned: Sequence[int] | np.ndarray, names: Sequence[object]) -> str:
    """Name the classes that keep a threshold of HALF, for log and tools; '' if there are none.

    `untuned`: labels of these classes. `names`: of all classes, by label.
    """
    if not len(untuned):
        return ""
    untuned_names = some_of([names[label] for label in untuned], MOST_NAMED)
    return (
        f"{len(untuned)} of {len(names)} classes keep a threshold of {HALF}, with fewer than "
        f"{counted(ENOUGH_TO_TUNE, 'validation image')}: {untuned_names}"
    )


def rank(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:
    """Rank the samples by their scores for one class, and measure how well that separates it from the others.

    Returns the average precision as scikit-learn defines it, the threshold with the highest F1, and the AUROC. A metric
    that is not defined is NaN; then the threshold is HALF.
    """
    positives = int(truth.sum())
    if positives == 0 or np.isnan(scores).any():
        return np.nan, HALF, np.nan

    # Each different score is a possible threshold: samples with this or a higher score are predicted to have the class.
    # For each threshold, from the highest on, `predicted` is their number, and `hits` the number of them that have it.
    order = np.argsort(-scores, kind="stable")
    in_order = scores[order]
    last_of_equals = np.flatnonzero(np.append(in_order[1:] != in_order[:-1], True))
    thresholds = in_order[last_of_equals]
    hits = np.cumsum(truth[order])[last_of_equals]
    predicted = last_of_equals + 1  # samples up to this one, which are counted from 0

    # Average precision: the mean over all positives of the precision at the positive's own score.
    new_hits = np.diff(hits, prepend=0)
    precision = hits / predicted
    average = float((new_hits * precision).sum() / positives)

    # The threshold with the highest F1. It is put halfway to the next lower score (0 below the lowest), because other
    # samples score a little lower or higher. Rounded, that may be the lower score itself: then it stays at the higher.
    best = int(np.argmax(2 * hits / (predicted + positives)))
    best_score = float(thresholds[best])
    next_lower = float(thresholds[best + 1]) if best + 1 < len(thresholds) else 0.0
    halfway = (best_score + next_lower) / 2
    threshold = halfway if halfway > next_lower else best_score

    # Area under the ROC curve: the fraction of all pairs of a positive and a negative in which the positive has the
    # higher score. Pairs of equal score count half.
    misses = predicted - hits
    negatives = misses[-1]
    auroc = np.nan
    if negatives > 0:
        new_misses = np.diff(misses, prepend=0)
        positives_above = hits - new_hits / 2
        auroc = float((positives_above * new_misses).sum() / (hits[-1] * negatives))
    return average, threshold, auroc


def f1(predicted: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return F1 of each class, 0 for a class that no sample has or is predicted to have; then micro and macro F1."""
    hits = (predicted & truth).sum(0)
    denominators = predicted.sum(0) + truth.sum(0)
    by_class = 2 * hits / np.maximum(denominators, 1)
    micro = float(2 * hits.sum() / denominators.sum()) if denominators.any() else np.nan
    return by_class, micro, _mean(by_class, truth)


def _mean(by_class: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean over the classes with positives; NaN if there are none."""
    present = truth.any(0)
    return float(by_class[present].mean()) if present.any() else np.nan


# Rows of numbers of every sample of a validation: each rank keeps its own, and rank 0 gets all at the end.

BYTES_AT_ONCE = 64 * 2**20
"""Most memory of a device that gathering takes."""


class Gathered:
    """A row of numbers for each sample of a validation, in host memory, which rank 0 gets from all ranks at the end."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples = samples
        self._device = device
        self._indices: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor, indices: Tensor) -> None:
        """Keep the rows of a batch, one per sample. Samples that only pad the batch (index below 0) are left out."""
        # A last column of ones. Summed over the ranks, it counts how often each sample was seen, which must be once.
        counted_rows = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).cpu()
        host_indices = indices.cpu()
        real = host_indices >= 0
        self._rows.append(counted_rows[real])
        self._indices.append(host_indices[real])

    def on_rank_0(self, world: World) -> Tensor:
        """Return all rows on rank 0, in the order of the split; on other ranks, no rows. A collective call.

        The table is gathered in chunks. In each, a rank fills in its own rows and leaves the others zero, so the sum
        over the ranks has all rows. Raises AllRanksError if a sample was not seen exactly once.
        """
        indices = torch.cat(self._indices)
        rows = torch.cat(self._rows)
        width = rows.shape[1]
        table = torch.zeros(self._samples if world.first else 0, width)
        rows_at_once = max(1, BYTES_AT_ONCE // (4 * width))  # 4 bytes per number
        for start in range(0, self._samples, rows_at_once):
            end = min(start + rows_at_once, self._samples)
            in_chunk = (indices >= start) & (indices < end)
            chunk = torch.zeros(end - start, width).index_add_(0, indices[in_chunk] - start, rows[in_chunk])
            summed = sum_over_ranks(chunk.to(self._device), world)
            if world.first:
                table[start:end] = summed.cpu()
        times_seen = table[:, -1]  # the last column, which `add` has appended
        seen_once = int((times_seen == 1).sum())
        check_count(broadcast(seen_once, world), self._samples)
        return table[:, :-1]
