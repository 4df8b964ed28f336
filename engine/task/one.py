"""The task of one class per image: accuracy, and metrics that weigh all classes alike. Labels are int64, B."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from torch import Tensor

from datasets import Batch
from engine.task.base import Metrics, Tally, Task, check_count, sum_type_of
from engine.task.losses import Criterion, loss_named
from utils.config.train import TrainConfig
from utils.distributed.world import World, sum_over_ranks
from vitamp.metrics import ONE_LABEL


@dataclass(frozen=True)
class Means(Metrics):
    """Mean loss, and top-1 and top-5 accuracy in percent."""

    shown = (("acc1", "Acc@1", "acc1"), ("acc5", "Acc@5", "acc5"))
    mean_words = "Acc"
    acc1: float
    acc5: float

    def summary(self, phase: str) -> str:
        return super().summary(phase).replace("Train Acc@1", "Train Acc")  # PaddleViT's words


@dataclass(frozen=True)
class ValidationMeans(Means):
    """Metrics of a validation, in percent. `ClassCounts` explains those that weigh all classes alike."""

    balanced_acc: float
    macro_f1: float

    def after_time(self) -> str:
        return f", Balanced Acc: {self.balanced_acc:.4f}, Macro F1: {self.macro_f1:.4f}"


class OneLabel(Task):
    """Each image has exactly one class."""

    kind = ONE_LABEL

    def loss(self, train: TrainConfig, weights: Tensor | None) -> Criterion:
        return loss_named(train.LOSS).build(train, self.classes, weights)

    def mixed(self, labels: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        targets = mixup_target(labels, self.classes, lam)  # pyright: ignore[reportArgumentType]  # a row per image
        return targets, labels.where(lam[:, 0] >= 0.5, labels.flip(0))

    def example(self, size: int, device: torch.device) -> Tensor:
        return torch.randint(0, self.classes, (size,), device=device)

    def counts(self, logits: Tensor, labels: Tensor, sum_type: torch.dtype) -> tuple[Tensor, Tensor]:
        """Count the samples whose label is the top-1 prediction, and those whose label is in the top 5."""
        hits, _ = _hits(logits, labels)
        hits_by_rank = hits.sum(0).to(sum_type)
        return hits_by_rank[0], hits_by_rank.sum()

    def training_metrics(self, loss: float, counts: tuple[float, float], samples: float) -> Means:
        top1, top5 = counts
        return Means(loss, 100 * top1 / samples, 100 * top5 / samples, trivial=_trivial(self.classes))

    def averaged(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([logits.log_softmax(-1) for logits in outputs]).logsumexp(0) - math.log(len(outputs))

    def probabilities(self, logits: Tensor) -> Tensor:
        return _mean_of_classifiers(logits).softmax(-1)

    def tally(self, samples: int, device: torch.device) -> Tally:
        return _Accuracy(samples, self.classes, device)


class _Accuracy(Tally):
    """Counts right predictions on the device, without waiting for it until the end of the validation."""

    def __init__(self, samples: int, classes: int, device: torch.device) -> None:
        self._samples = samples
        # Loss, images right by top-1, images right by top-5, images.
        self._sums = torch.zeros(4, dtype=sum_type_of(device), device=device)
        # Rows as in `ClassCounts`. A tensor of their own: in one all-reduce with them, the losses of the ranks might be
        # added in another order, and round differently.
        self._class_counts = torch.zeros(len(ClassCounts._fields), classes, dtype=self._sums.dtype, device=device)
        # Per image: 2 x predicted class + (1 if the label is in the top 5, else 0). Images that another rank validates
        # stay 0, so that the sum over ranks has all.
        self._answers = torch.zeros(samples, dtype=torch.int32, device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Add the losses, hits and predictions of a batch to the sums, all on the device."""
        hits, guesses = _hits(logits, batch.labels)
        is_real = batch.indices >= 0  # False for samples that only pad the batch
        in_top1 = hits[:, 0] & is_real
        in_top5 = hits.any(dim=-1) & is_real

        # Sums over all images
        losses = F.cross_entropy(logits, batch.labels, reduction="none").to(self._sums.dtype)
        losses = losses.where(is_real, 0.0)  # not a product: 0 times an infinite loss is NaN
        self._sums += torch.stack((losses.sum(), in_top1.sum(), in_top5.sum(), is_real.sum()))

        # Counts by class: views of the rows, which are changed in place. Unlike bincount, index_add_ does not wait for
        # the device.
        right, labelled, predicted = self._class_counts
        right.index_add_(0, batch.labels, in_top1.to(right.dtype))
        labelled.index_add_(0, batch.labels, is_real.to(right.dtype))
        predicted.index_add_(0, guesses, is_real.to(right.dtype))

        # The answer for each image. Padding has index -1 and the answer 0, which it adds to the first image.
        answers = (2 * guesses + in_top5).where(is_real, 0).to(self._answers.dtype)
        self._answers.index_add_(0, batch.indices.clamp(0, self._samples - 1), answers)

    def metrics(self, world: World) -> ValidationMeans:
        """Return the metrics of all ranks together, and the prediction for each image. A collective call."""
        loss, top1, top5, counted = sum_over_ranks(self._sums, world).tolist()
        check_count(counted, self._samples)
        counts = ClassCounts(*sum_over_ranks(self._class_counts, world).long().tolist())
        answers = sum_over_ranks(self._answers, world).cpu().numpy()
        guesses = answers >> 1  # an answer is 2 x predicted class + (1 if the label is in the top 5)
        in_top5 = answers & 1
        classes = len(counts.right)
        smallest_type = np.min_scalar_type(classes)
        return ValidationMeans(
            loss=loss / self._samples,
            acc1=100 * top1 / self._samples,
            acc5=100 * top5 / self._samples,
            balanced_acc=100 * counts.balanced_accuracy(),
            macro_f1=100 * counts.macro_f1(),
            trivial=_trivial(classes),
            predictions={"guess": guesses.astype(smallest_type), "in_top5": in_top5.astype(np.uint8)},
        )


def _trivial(classes: int) -> tuple[str, ...]:
    """Return the metrics that say nothing with so many classes: the top 5 of five are all of them."""
    return ("acc5",) if classes <= 5 else ()


def correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each sample whether its label is the top-1 prediction, and whether it is in the top 5."""
    hits, _ = _hits(logits, labels)
    return hits[:, 0], hits.any(dim=-1)


def _hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compare each sample's top 5 predictions with its label.

    Returns two tensors: booleans, B x 5 (B x C if there are fewer than 5 classes), of which at most one per sample is
    true; and the top-1 prediction of each sample. `logits`: B x C, or B x 2 x C of two classifiers.
    """
    logits = _mean_of_classifiers(logits)
    guesses = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    return guesses == labels.unsqueeze(-1), guesses[:, 0]


def _mean_of_classifiers(logits: Tensor) -> Tensor:
    """Average the logits of a distilled model's two classifiers (B x 2 x C); others (B x C) stay as they are."""
    return logits.mean(1) if logits.ndim == 3 else logits


# Metrics of one label per image that weigh all classes alike, from three counts per class.
#
# The counts are whole numbers, so they are exact with any batches and any number of processes.


class ClassCounts(NamedTuple):
    """Counts of images, one number per class."""

    right: list[int]
    """Images of the class that are predicted as it"""
    labelled: list[int]
    """Images of the class"""
    predicted: list[int]
    """Images that are predicted as the class"""

    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have images, as a fraction; scikit-learn's `balanced_accuracy_score`."""
        return _mean(right / images for right, images in zip(self.right, self.labelled, strict=True) if images)

    def macro_f1(self) -> float:
        """Mean F1 over the classes that have images or are predicted; scikit-learn's `f1_score(average="macro")`.

        A class that is predicted but has no image counts with an F1 of 0.
        """
        by_class = zip(self.right, self.labelled, self.predicted, strict=True)
        return _mean(2 * right / (images + predicted) for right, images, predicted in by_class if images or predicted)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; NaN without values.

    The sum is correctly rounded, so that ranks on different processors get the same bits and agree on the best
    validation.
    """
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
