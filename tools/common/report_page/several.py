"""Evaluation of a run with several labels per image, for the report: average precision of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from datasets import ImageDataset
from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from tools.common.label_figures import LabelFigures, label_figures_of
from tools.common.parts import Part

MOST_ROWS = 100


class OfLabel(NamedTuple):
    """Metrics of one class, in percent but for the threshold."""

    name: str
    images: int
    average_precision: float
    auroc: str
    threshold: float
    recall: float
    precision: float
    f1: float


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


def evaluated(trained: Trained, dataset: ImageDataset, image: str) -> Evaluation:
    """`image`: what an image of this split is called."""
    figures = label_figures_of(trained, Part(dataset, "validation", None))
    rows = [
        OfLabel(
            trained.name_of(label),
            int(figures.support[label]),
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
    return Evaluation(
        weights=f"{trained.words()}: {trained.chosen.words}",
        thresholds=thresholds_of(trained)[1],
        figures=figures,
        labels=rows[:MOST_ROWS],
        left_out=max(0, len(rows) - MOST_ROWS),
        unmeasured=int((figures.support == 0).sum()),
        image=image,
    )
