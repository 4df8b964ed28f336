"""Evaluation of a run with several labels per image, for the report: metrics of each class, and example images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from datasets import ImageDataset
from datasets.labels import images_of_classes
from engine.saved.predictions import batches_of, name_of, picture_of, split_of_run
from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from tools.common.label_figures import LabelFigures, label_figures_from
from tools.common.progress import progress_bar
from tools.common.report_page.opening import Headline
from tools.common.report_page.pictures import data_uri, short_name
from utils.errors import UserError
from utils.record.tasks import AUROC, MAP, Metric

MOST_ROWS = 100
MOST_EXAMPLES, MOST_WRONG = 12, 9
"""Example images, and how many of them may have a wrong label while others have none"""


class OfLabel(NamedTuple):
    """Metrics of one class, in percent but for the threshold."""

    name: str
    training: str
    """Number of training images, if it is known"""
    images: int
    prevalence: float
    average_precision: float
    auroc: str
    threshold: float
    recall: float
    precision: float
    f1: float


class Marked(NamedTuple):
    """A label of an image: "right", "extra" (predicted, but not true) or "missed" (true, but not predicted)."""

    name: str
    kind: str
    probability: float
    """Percent"""


class Example(NamedTuple):
    image: str
    short: str
    labels: list[Marked]
    picture: str
    """A data: URI"""

    @property
    def wrong(self) -> bool:
        return any(label.kind != "right" for label in self.labels)


@dataclass(frozen=True)
class Evaluation:
    template: ClassVar[str] = "several.html"
    weights: str
    """Model, checkpoint, and which of its weights were used"""
    thresholds: str
    """Where the thresholds are from"""
    figures: LabelFigures
    labels: list[OfLabel]
    """Lowest average precision first; classes without images are left out"""
    left_out: int
    """Classes beyond MOST_ROWS"""
    unmeasured: int
    """Classes without images"""
    image: str
    """What an image of its split is called"""
    examples: list[Example]
    """The most wrong ones first"""
    wrong: int
    """Images with a wrong label"""

    def headline(self, deciding: Metric) -> Headline:
        """By mAP, or AUROC where that decides."""
        figures, scores = self.figures, self.figures.scores
        metric, value, guess = MAP, 100 * scores.map, 100 * float(figures.support[figures.support > 0].mean())
        guess, guessing = guess / figures.images, "ordering the images at random"
        if deciding is AUROC:
            metric, value, guess = AUROC, 100 * scores.auroc, 50.0
        remarks = [f"Its macro F1 is {figures.f1_macro:.2f} %."]
        if len(self.labels) > 1:
            weakest = self.labels[0]
            precision, images = f"{weakest.average_precision:.1f} %", f"{weakest.images:,} of {figures.images:,} images"
            remarks.append(f"Weakest class: {weakest.name} (average precision {precision}, {images}).")
        at = figures.intervals[metric.name]
        return Headline(metric, value, at, figures.images, self.image, guess, guessing, remarks)


def evaluated(trained: Trained, dataset: ImageDataset, image: str) -> Evaluation:
    """`image`: what an image of this split is called."""
    logits, labels, numbers = _outputs(trained, dataset)
    figures = label_figures_from(trained, [(logits, labels)])
    training = training_images(trained)
    rows = [
        OfLabel(
            trained.name_of(label),
            training[label],
            int(figures.support[label]),
            100 * int(figures.support[label]) / figures.images,
            float(figures.average_precision[label]),
            f"{auroc:.1f} %" if np.isfinite(auroc := figures.aurocs[label]) else "-",
            float(figures.thresholds[label]),
            float(figures.recall[label]),
            float(figures.precision[label]),
            float(figures.f1[label]),
        )
        for label in np.flatnonzero(figures.support).tolist()
    ]
    rows.sort(key=lambda row: (row.average_precision, row.name))
    probabilities, truth = logits.double().sigmoid().numpy(), labels.numpy() > 0
    predicted = probabilities >= figures.thresholds
    return Evaluation(
        weights=f"{trained.words()}: {trained.chosen.words}",
        thresholds=thresholds_of(trained)[1],
        figures=figures,
        labels=rows[:MOST_ROWS],
        left_out=max(0, len(rows) - MOST_ROWS),
        unmeasured=int((figures.support == 0).sum()),
        image=image,
        examples=_examples(trained, dataset, numbers, probabilities, truth, predicted),
        wrong=int((predicted != truth).any(1).sum()),
    )


def training_images(trained: Trained) -> list[str]:
    """Number of training images of each class; empty texts if it is unknown before the images are read."""
    classes = int(trained.config.MODEL.NUM_CLASSES)
    try:
        labels = split_of_run(trained, "train").sample_labels()
    except UserError:  # only the images that are evaluated are there
        labels = None
    if labels is None:
        return [""] * classes
    return [f"{count:,}" for count in images_of_classes(labels, classes).tolist()]


def _outputs(trained: Trained, dataset: ImageDataset) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Logits and labels of each image, and its index in the data set."""
    rows = []
    with progress_bar(len(dataset), "images") as bar:
        for logits, labels, indices in batches_of(trained, dataset):
            rows.append((logits.cpu(), labels.cpu(), indices.cpu()))
            bar.update(len(labels))
    logits, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
    return logits, labels, indices.tolist()


def _examples(
    trained: Trained,
    dataset: ImageDataset,
    numbers: list[int],
    probabilities: np.ndarray,
    truth: np.ndarray,
    predicted: np.ndarray,
) -> list[Example]:
    """Images with wrong labels, those with the most first, of equally many the most confident; then right ones."""
    wrong = predicted != truth
    error = np.where(wrong, np.abs(probabilities - truth), 0)
    order = np.lexsort((-error.max(1), -wrong.sum(1)))
    mistaken = int(wrong.any(1).sum())
    most = max(MOST_WRONG, MOST_EXAMPLES - (len(order) - mistaken))
    shown = [*order[: min(mistaken, most)], *order[mistaken:]][:MOST_EXAMPLES]
    found = []
    for row in map(int, shown):
        name = name_of(dataset, numbers[row])
        labels = [
            Marked(
                trained.name_of(label),
                "missed" if not predicted[row, label] else "right" if truth[row, label] else "extra",
                100 * float(probabilities[row, label]),
            )
            for label in np.flatnonzero(predicted[row] | truth[row]).tolist()
        ]
        found.append(Example(name, short_name(name), labels, data_uri(picture_of(dataset, numbers[row]))))
    return found
