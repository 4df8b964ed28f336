"""Evaluation of a run with one label per image, for the report: confusions, calibration, classes, mistakes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from datasets import ImageDataset
from engine.saved.predictions import batches_of, name_of, picture_of
from engine.saved.trained import Trained
from engine.task.class_counts import ClassCounts
from tools.common.figures import Figures, Rows, figures_from
from tools.common.progress import progress_bar
from tools.common.report_page.calibration import Reliability
from tools.common.report_page.opening import Headline
from tools.common.report_page.pictures import data_uri, short_name
from tools.common.report_page.several import MOST_ROWS, training_images
from utils.record.tasks import BALANCED, MACRO_F1, TOP1, TOP5, Metric, always_guessing
from utils.text import counted

BINS = 15
MOST_CLASSES = 20
"""Classes in the confusion matrix: more would not be readable on a screen."""
MOST_PAIRS, MOST_MISTAKES = 15, 12
NOTABLE_IMAGES, NOTABLE_PERCENT = 2, 5.0
"""Images, and percent of its class, from which on a confusion is named at the top"""
MOST_NAMED = 3
"""Classes that are never recognised, of which the names are listed at the top"""


class OfClass(NamedTuple):
    """Metrics of one class in percent."""

    name: str
    training: str
    """Number of training images, if it is known"""
    images: int
    prevalence: float
    recall: float
    precision: float
    f1: float
    mistaken_for: str


class Cell(NamedTuple):
    images: int
    percent: float
    """Of the images of the true class"""


class Pair(NamedTuple):
    """Two classes of which the first is predicted as the second."""

    true: str
    guess: str
    images: int
    percent: float
    """Of the images of the true class"""


class Mistake(NamedTuple):
    image: str
    short: str
    true: str
    guess: str
    confidence: float
    probability_of_true: float
    picture: str
    """A data: URI"""


@dataclass(frozen=True)
class Evaluation:
    template: ClassVar[str] = "one.html"
    weights: str
    """Model, checkpoint, and which of its weights were used"""
    figures: Figures
    reliability: Reliability
    classes: list[OfClass]
    """Lowest recall first"""
    left_out: int
    """Classes beyond MOST_ROWS"""
    names: list[str]
    """Rows and columns of the matrix"""
    matrix: list[list[Cell]]
    has_all_classes: bool
    """False: the matrix has only the most confused classes"""
    pairs: list[Pair]
    mistakes: list[Mistake]
    image: str
    """What an image of its split is called"""
    guessing: str
    """What a model that always guesses the largest class reaches"""

    def headline(self, deciding: Metric) -> Headline:
        """By the metric that decides which validation is the best, or accuracy."""
        figures = self.figures
        metric = deciding if deciding in figures.values else TOP1
        value, guess = figures.values[metric], _always_largest(figures)[metric]
        guessing, at = "always guessing the largest class", figures.intervals[metric.name]
        remarks = [*self._confusion(), *self._never_right()]
        return Headline(metric, value, at, figures.images, self.image, guess, guessing, remarks)

    def _confusion(self) -> list[str]:
        """The most frequent confusion, if it is notable."""
        if not self.pairs or self.pairs[0].images < NOTABLE_IMAGES or self.pairs[0].percent < NOTABLE_PERCENT:
            return []
        true, predicted, images, percent = self.pairs[0]
        alone = len(self.pairs) == 1 or self.pairs[1].images < images
        which = "Most frequent mistake" if alone else "Among the most frequent mistakes"
        return [f"{which}: {true} is taken for {predicted} ({images:,} of {round(100 * images / percent):,} images)."]

    def _never_right(self) -> list[str]:
        """Classes of which no image is recognised."""
        figures = self.figures
        never = int(((figures.support > 0) & (figures.right == 0)).sum())
        if not never:
            return []
        names = [row.name for row in self.classes[:never]]
        which = f": {', '.join(names)}" if never <= MOST_NAMED else ""
        of = f"{counted(never, 'class')} of {int((figures.support > 0).sum()):,}"
        return [f"{of} {'is' if never == 1 else 'are'} never recognised{which}."]


def evaluated(trained: Trained, dataset: ImageDataset, image: str) -> Evaluation:
    """`image`: what an image of this split is called."""
    rows, numbers = _rows(trained, dataset)
    figures = figures_from(rows, trained.config.MODEL.NUM_CLASSES, BINS)
    listed = _of_classes(trained, figures, training_images(trained))
    chosen = _matrix_classes(figures)
    return Evaluation(
        weights=f"{trained.words()}: {trained.chosen.words}",
        figures=figures,
        reliability=Reliability(figures.bins, figures.ece),
        classes=listed[:MOST_ROWS],
        left_out=max(0, len(listed) - MOST_ROWS),
        names=[trained.name_of(label) for label in chosen],
        matrix=_matrix(figures, chosen),
        has_all_classes=len(chosen) == figures.classes,
        pairs=_pairs(trained, figures),
        mistakes=_mistakes(trained, dataset, rows, numbers),
        image=image,
        guessing=always_guessing(figures.largest_class_percent),
    )


def _rows(trained: Trained, dataset: ImageDataset) -> tuple[Rows, torch.Tensor]:
    """Metrics of each image, and its index in the data set."""
    batches = []
    with progress_bar(len(dataset), "images") as bar:
        for logits, labels, indices in batches_of(trained, dataset):
            batches.append((Rows.of(logits, labels), indices.cpu()))
            bar.update(len(labels))
    rows, numbers = zip(*batches, strict=True)
    return Rows(*(torch.cat(column) for column in zip(*rows, strict=True))), torch.cat(numbers)


def _always_largest(figures: Figures) -> dict[Metric, float]:
    """Metrics of a model that always predicts the class with the most images."""
    support, largest = figures.support.tolist(), int(figures.support.argmax())
    right, guessed = [0] * figures.classes, [0] * figures.classes
    right[largest], guessed[largest] = support[largest], figures.images
    counts = ClassCounts(right, support, guessed)
    return {
        TOP1: figures.largest_class_percent,
        TOP5: 100 * sum(sorted(support)[-5:]) / figures.images,
        BALANCED: 100 * counts.balanced_accuracy(),
        MACRO_F1: 100 * counts.macro_f1(),
    }


def _of_classes(trained: Trained, figures: Figures, training: list[str]) -> list[OfClass]:
    measured = (figures.support, figures.recall, figures.precision, figures.f1)
    rows = []
    for label, (images, recall, precision, f1) in enumerate(zip(*(each.tolist() for each in measured), strict=True)):
        if images:
            other, count = figures.taken_for(label)
            mistaken_for = f"{trained.name_of(other)} ({count})" if count else ""
            share = 100 * images / figures.images
            name = trained.name_of(label)
            rows.append(OfClass(name, training[label], images, share, recall, precision, f1, mistaken_for))
    return sorted(rows, key=lambda row: (row.recall, row.precision))


def _matrix_classes(figures: Figures) -> list[int]:
    """Labels of all classes, or of the most confused ones where there are many, in order."""
    if figures.classes <= MOST_CLASSES:
        return list(range(figures.classes))
    wrong = figures.support + figures.guessed - 2 * figures.right
    order = wrong * (figures.images + 1) + figures.support  # of equally confused classes those with more images
    return sorted(order.topk(MOST_CLASSES).indices.tolist())


def _matrix(figures: Figures, chosen: list[int]) -> list[list[Cell]]:
    from sklearn.metrics import confusion_matrix  # takes a second to import

    counts = confusion_matrix(figures.labels, figures.guesses, labels=chosen)
    of_class = figures.support[chosen].clamp(min=1).tolist()
    return [
        [Cell(count, 100 * count / total) for count in row]
        for row, total in zip(counts.tolist(), of_class, strict=True)
    ]


def _pairs(trained: Trained, figures: Figures) -> list[Pair]:
    """Most frequent confusions."""
    wrong = figures.labels != figures.guesses
    confusions = Counter(zip(figures.labels[wrong].tolist(), figures.guesses[wrong].tolist(), strict=True))
    return [
        Pair(trained.name_of(true), trained.name_of(guess), count, 100 * count / int(figures.support[true]))
        for (true, guess), count in confusions.most_common(MOST_PAIRS)
    ]


def _mistakes(trained: Trained, dataset: ImageDataset, rows: Rows, numbers: torch.Tensor) -> list[Mistake]:
    """Wrong guesses with the highest probability."""
    wrong = (rows.label != rows.guess).nonzero()[:, 0]
    worst = wrong[rows.confidence[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    return [
        Mistake(
            name := name_of(dataset, int(numbers[row])),
            short_name(name),
            trained.name_of(int(rows.label[row])),
            trained.name_of(int(rows.guess[row])),
            100 * float(rows.confidence[row]),
            100 * float(rows.nll[row].neg().exp()),
            data_uri(picture_of(dataset, int(numbers[row]))),
        )
        for row in worst.tolist()
    ]
