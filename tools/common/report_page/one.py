"""Evaluation of a run with one label per image, for the report: confusions, calibration, classes, mistakes."""

from __future__ import annotations

import base64
import io
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from PIL import Image

from datasets import ImageDataset
from engine.saved.predictions import batches_of, name_of, picture_of
from engine.saved.trained import Trained
from tools.common.figures import Figures, Rows, figures_from
from tools.common.progress import progress_bar
from tools.common.report_page.calibration import Reliability
from tools.common.report_page.several import MOST_ROWS
from utils.record.tasks import always_guessing

BINS = 15
MOST_CLASSES = 20
"""Classes in the confusion matrix: more would not be readable on a screen."""
MOST_PAIRS, MOST_MISTAKES = 15, 12
THUMBNAIL = 112


class OfClass(NamedTuple):
    """Metrics of one class in percent."""

    name: str
    images: int
    recall: float
    precision: float
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


def evaluated(trained: Trained, dataset: ImageDataset, image: str) -> Evaluation:
    """`image`: what an image of this split is called."""
    rows, numbers = _rows(trained, dataset)
    figures = figures_from(rows, trained.config.MODEL.NUM_CLASSES, BINS)
    listed = _of_classes(trained, figures)
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


def _of_classes(trained: Trained, figures: Figures) -> list[OfClass]:
    recall, precision, support = figures.recall.tolist(), figures.precision.tolist(), figures.support.tolist()
    rows = []
    for label in range(figures.classes):
        if support[label]:
            other, count = figures.taken_for(label)
            mistaken_for = f"{trained.name_of(other)} ({count})" if count else ""
            rows.append(OfClass(trained.name_of(label), support[label], recall[label], precision[label], mistaken_for))
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
            name_of(dataset, int(numbers[row])),
            trained.name_of(int(rows.label[row])),
            trained.name_of(int(rows.guess[row])),
            100 * float(rows.confidence[row]),
            100 * float(rows.nll[row].neg().exp()),
            data_uri(picture_of(dataset, int(numbers[row]))),
        )
        for row in worst.tolist()
    ]


def data_uri(picture: Image.Image) -> str:
    """Thumbnail as a data: URI."""
    size = max(picture.size)
    if size > THUMBNAIL:
        picture = picture.copy()
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    elif size < THUMBNAIL // 2:  # so that single pixels are visible
        factor = THUMBNAIL // size
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
