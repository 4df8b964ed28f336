"""Metrics of a classifier, from one pass over the images: accuracy, calibration, recall and precision per class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.saved.predictions import batches_of, guesses
from engine.saved.trained import Trained
from engine.task.class_counts import ClassCounts
from engine.task.one import correct
from tools.common.intervals import balanced_accuracy_interval, macro_f1_interval
from tools.common.parts import Part
from tools.common.progress import progress_bar
from utils.intervals import Interval, wilson
from utils.record.tasks import BALANCED, MACRO_F1, TOP1, TOP5, Metric


class Bin(NamedTuple):
    """Images of similar confidence. Confidence and accuracy are percent."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Figures:
    """Fractions are in percent."""

    images: int
    top1: float
    top5: float
    nll: float
    """Mean negative log-likelihood: the validation loss without label smoothing."""
    brier: float
    """Mean squared error of the probabilities, summed over classes: 0 to 2."""
    ece: float
    bins: list[Bin]
    labels: Tensor
    """True class of each image."""
    guesses: Tensor
    """Predicted class of each image."""
    classes: int
    not_finite: int
    """Number of images whose logits are NaN or infinite."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the user's own"""

    def confusion(self) -> Tensor:
        """Number of images by true class (rows) and predicted class (columns)."""
        from sklearn.metrics import confusion_matrix

        return torch.from_numpy(confusion_matrix(self.labels, self.guesses, labels=range(self.classes)))

    @cached_property
    def support(self) -> Tensor:
        """Number of images of each class."""
        return self._counted(self.labels, self.classes)

    @cached_property
    def guessed(self) -> Tensor:
        """Number of predictions of each class."""
        return self._counted(self.guesses, self.classes)

    @cached_property
    def right(self) -> Tensor:
        """Number of correctly predicted images of each class."""
        return self._counted(self.labels[self.labels == self.guesses], self.classes)

    @property
    def precision(self) -> Tensor:
        """Precision of each class; 0 for a class that is never predicted."""
        return self._of_each[0]

    @property
    def recall(self) -> Tensor:
        return self._of_each[1]

    @property
    def f1(self) -> Tensor:
        return self._of_each[2]

    @cached_property
    def _of_each(self) -> list[Tensor]:
        """Precision, recall and F1 of each class."""
        from sklearn.metrics import precision_recall_fscore_support  # takes a second to import

        scores: Any = precision_recall_fscore_support  # its type stubs lack zero_division=0
        fractions = scores(self.labels, self.guesses, labels=range(self.classes), zero_division=0)[:3]
        return [100 * torch.as_tensor(fraction, dtype=torch.float64) for fraction in fractions]

    @property
    def class_counts(self) -> ClassCounts:
        return ClassCounts(self.right.tolist(), self.support.tolist(), self.guessed.tolist())

    @cached_property
    def balanced_acc(self) -> float:
        return 100 * self.class_counts.balanced_accuracy()

    @cached_property
    def macro_f1(self) -> float:
        """Over the classes that have images or are predicted; `macro(f1)` is over those that have images."""
        return 100 * self.class_counts.macro_f1()

    @property
    def values(self) -> dict[Metric, float]:
        """The metrics of a validation."""
        return {TOP1: self.top1, TOP5: self.top5, BALANCED: self.balanced_acc, MACRO_F1: self.macro_f1}

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """By the metric's name."""
        seen = self.labels.numpy(), self.guesses.numpy(), self.classes
        return {
            TOP1.name: wilson(self.top1, self.images),
            TOP5.name: wilson(self.top5, self.images),
            BALANCED.name: balanced_accuracy_interval(*seen),
            MACRO_F1.name: macro_f1_interval(*seen),
        }

    @property
    def largest_class_percent(self) -> float:
        """Top-1 of a model that always guesses the most frequent class."""
        return 100 * int(self.support.max()) / self.images

    def taken_for(self, label: int) -> tuple[int, int]:
        """The class most often predicted for images of this class by mistake, and how often; 0 if never."""
        wrong = self.guesses[(self.labels == label) & (self.guesses != label)]
        counts = self._counted(wrong, self.classes)
        return int(counts.argmax()), int(counts.max())

    @staticmethod
    def _counted(values: Tensor, length: int) -> Tensor:
        return torch.bincount(values, minlength=length)

    def macro(self, of_class: Tensor) -> float:
        """Mean over classes that have images."""
        return float(of_class[self.support > 0].mean())

    def weighted(self, of_class: Tensor) -> float:
        """Mean over images."""
        return float((of_class * self.support).sum() / self.support.sum())


def figures_of(trained: Trained, part: Part, bins: int) -> Figures:
    """Evaluate the model. Memory is a few numbers per image, however many classes there are."""
    rows = [Rows.of(logits, part.labels(labels)) for logits, labels, _ in _with_bar(trained, part)]
    seen = Rows(*(torch.cat(column) for column in zip(*rows, strict=True)))
    return figures_from(seen, trained.config.MODEL.NUM_CLASSES, bins)


def figures_from(seen: Rows, classes: int, bins: int) -> Figures:
    images = len(seen.label)
    ece, bins_of_ece = calibration(seen.confidence, seen.label == seen.guess, bins)
    return Figures(
        images=images,
        top1=100 * int((seen.label == seen.guess).sum()) / images,
        top5=100 * int(seen.among_five.sum()) / images,
        nll=float(seen.nll.sum()) / images,
        brier=float(seen.brier.sum()) / images,
        ece=ece,
        bins=bins_of_ece,
        labels=seen.label,
        guesses=seen.guess,
        classes=classes,
        not_finite=int((~seen.nll.isfinite()).sum()),
    )


class Rows(NamedTuple):
    """Columns of values per image, on the host."""

    label: Tensor
    guess: Tensor
    among_five: Tensor
    confidence: Tensor
    nll: Tensor
    brier: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Rows:
        _, among_five = correct(logits, labels)  # on the device, so that ties are resolved as in validation
        guess = guesses(logits)[:, 0].cpu()
        losses = F.cross_entropy(logits, labels, reduction="none").cpu().double()
        logits, labels = logits.cpu().double(), labels.cpu()
        probabilities = logits.softmax(-1)
        truth = F.one_hot(labels, logits.shape[-1])
        confidence = probabilities.gather(1, guess[:, None])[:, 0]
        return cls(labels, guess, among_five.cpu(), confidence, losses, (probabilities - truth).square().sum(1))


def calibration(confidence: Tensor, right: Tensor, count: int) -> tuple[float, list[Bin]]:
    """ECE in percent, and its bins of equal width; each includes its upper edge."""
    number = (confidence.nan_to_num() * count).ceil().long().sub(1).clamp(0, count - 1)
    images, sure, hits = (
        torch.zeros(count, dtype=torch.float64).index_add_(0, number, values)
        for values in (torch.ones_like(confidence), confidence, right.double())
    )
    ece = 100 * float((sure - hits).abs().sum() / len(confidence))
    means = [100 * values / images.clamp(min=1) for values in (sure, hits)]
    return ece, [Bin(int(n), float(c), float(a)) for n, c, a in zip(images, *means, strict=True)]


def _with_bar(trained: Trained, part: Part) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    with progress_bar(len(part.dataset), "images") as bar:
        for logits, labels, indices in batches_of(trained, part.dataset):
            yield logits, labels, indices
            bar.update(len(labels))
