"""scripts/report.py: what a run's best weights say of its validation images."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from datasets import ImageDataset
from engine.saved.predictions import batches_of, name_of, picture_of, validation_part
from engine.saved.trained import Trained, load_trained
from tools.common.figures import Figures, Rows, figures_from
from tools.common.progress import progress_bar
from utils.errors import TrainingError, UserError

BINS = 15
MOST_CLASSES = 20
"""Of which a matrix can be read on a screen."""
MOST_PAIRS, MOST_MISTAKES, MOST_ROWS = 15, 12, 100
THUMBNAIL = 112


class OfClass(NamedTuple):
    """Shares in percent."""

    name: str
    images: int
    recall: float
    precision: float
    taken_for: str


class Cell(NamedTuple):
    images: int
    percent: float
    """Of the true class's images"""


class Mistake(NamedTuple):
    name: str
    true: str
    guess: str
    sure: float
    sure_of_true: float
    picture: str
    """A data: URI"""


@dataclass(frozen=True)
class Seen:
    """The best weights on the validation part."""

    words: str
    figures: Figures
    classes: list[OfClass]
    """Worst first"""
    left_out: int
    """Classes that are not listed"""
    names: list[str]
    """Rows and columns of the matrix"""
    matrix: list[list[Cell]]
    whole: bool
    """False: the matrix is of those classes that are confused most"""
    pairs: list[tuple[str, str, int, float]]
    """(true, taken for, images, percent of the true class's)"""
    mistakes: list[Mistake]


def look(folder: Path) -> Seen | str:
    """Or why nothing can be seen."""
    try:
        trained = load_trained(folder)
        dataset = validation_part(trained)
        rows, numbers = _rows(trained, dataset)
    except (UserError, TrainingError) as error:
        return str(error)
    figures = figures_from(rows, trained.config.MODEL.NUM_CLASSES, BINS)
    listed = _of_classes(trained, figures)
    chosen = _chosen(figures)
    return Seen(
        words=f"{trained.words()}: {trained.choice}",
        figures=figures,
        classes=listed[:MOST_ROWS],
        left_out=max(0, len(listed) - MOST_ROWS),
        names=[trained.name_of(label) for label in chosen],
        matrix=_matrix(figures, chosen),
        whole=len(chosen) == figures.classes,
        pairs=_pairs(trained, figures),
        mistakes=_mistakes(trained, dataset, rows, numbers),
    )


def _rows(trained: Trained, dataset: ImageDataset) -> tuple[Rows, torch.Tensor]:
    """What is kept of each image, and its number in the data set."""
    found = []
    with progress_bar(len(dataset), "images") as bar:
        for logits, labels, indices in batches_of(trained, dataset):
            found.append((Rows.of(logits, labels), indices.cpu()))
            bar.update(len(labels))
    rows, numbers = zip(*found, strict=True)
    return Rows(*(torch.cat(column) for column in zip(*rows, strict=True))), torch.cat(numbers)


def _of_classes(trained: Trained, figures: Figures) -> list[OfClass]:
    recall, precision, support = figures.recall.tolist(), figures.precision.tolist(), figures.support.tolist()
    rows = []
    for label in range(figures.classes):
        if support[label]:
            other, count = figures.taken_for(label)
            taken = f"{trained.name_of(other)} ({count})" if count else ""
            rows.append(OfClass(trained.name_of(label), support[label], recall[label], precision[label], taken))
    return sorted(rows, key=lambda row: (row.recall, row.precision))


def _chosen(figures: Figures) -> list[int]:
    """All classes, or of many those that are confused most, in the order of their labels."""
    if figures.classes <= MOST_CLASSES:
        return list(range(figures.classes))
    wrong = figures.support + figures.guessed - 2 * figures.right
    return sorted(wrong.topk(MOST_CLASSES).indices.tolist())


def _matrix(figures: Figures, chosen: list[int]) -> list[list[Cell]]:
    place = torch.full((figures.classes,), -1)
    place[chosen] = torch.arange(len(chosen))
    true, guess = place[figures.labels], place[figures.guesses]
    both = (true >= 0) & (guess >= 0)
    counts = torch.bincount(true[both] * len(chosen) + guess[both], minlength=len(chosen) ** 2)
    of_class = figures.support[chosen].clamp(min=1).tolist()
    return [
        [Cell(count, 100 * count / total) for count in row]
        for row, total in zip(counts.reshape(len(chosen), -1).tolist(), of_class, strict=True)
    ]


def _pairs(trained: Trained, figures: Figures) -> list[tuple[str, str, int, float]]:
    wrong = figures.labels != figures.guesses
    keys, counts = (figures.labels * figures.classes + figures.guesses)[wrong].unique(return_counts=True)
    found = []
    for place in counts.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist():
        true, guess, count = int(keys[place]) // figures.classes, int(keys[place]) % figures.classes, int(counts[place])
        share = 100 * count / int(figures.support[true])
        found.append((trained.name_of(true), trained.name_of(guess), count, share))
    return found


def _mistakes(trained: Trained, dataset: ImageDataset, rows: Rows, numbers: torch.Tensor) -> list[Mistake]:
    """Those of which the model was surest that they are something else."""
    wrong = (rows.label != rows.guess).nonzero()[:, 0]
    worst = wrong[rows.nll[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
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
    """The picture, small, inside the text that shows it."""
    size = max(picture.size)
    if size > THUMBNAIL:
        picture = picture.copy()
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    elif size < THUMBNAIL // 2:  # pixels that can be seen
        factor = THUMBNAIL // size
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
