"""Metrics of a model with several labels per image (DATA.MULTI_LABEL), from one pass over the images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.saved.thresholds import thresholds_of
from engine.saved.trained import Trained
from engine.task.ranking import HALF, Scores, f1, scores_of
from tools.common.intervals import ranking_intervals
from tools.common.parts import Part, outputs_of
from utils.intervals import Interval, wilson
from utils.record.tasks import AUROC, MAP


@dataclass(frozen=True)
class LabelFigures:
    """Arrays have one value per class. `scores` are fractions; all other fractions are in percent."""

    images: int
    loss: float
    scores: Scores
    thresholds: np.ndarray
    """The model's own, from its last validation"""
    support: np.ndarray
    """Number of images with the label"""
    guessed: np.ndarray
    """Number of images for which it is predicted"""
    right: np.ndarray
    unlabelled: int
    """Images without a label"""
    f1_micro: float
    f1_macro: float
    exact_match: float
    not_finite: int
    """Number of images whose logits are NaN or infinite"""
    intervals: dict[str, Interval | None]
    """By the metric's name in JSON; None where it is unknown"""
    own: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the user's own"""

    @property
    def average_precision(self) -> np.ndarray:
        """NaN for a class without images."""
        return 100 * self.scores.average_precision

    @property
    def aurocs(self) -> np.ndarray:
        """NaN for a class that no image or every image has."""
        return 100 * self.scores.aurocs

    @property
    def precision(self) -> np.ndarray:
        return 100 * self.right / np.maximum(self.guessed, 1)

    @property
    def recall(self) -> np.ndarray:
        return 100 * self.right / np.maximum(self.support, 1)

    @property
    def f1(self) -> np.ndarray:
        return 200 * self.right / np.maximum(self.guessed + self.support, 1)


def label_figures_of(trained: Trained, part: Part) -> LabelFigures:
    """Evaluate the model on a split."""
    return label_figures_from(trained, [outputs_of(trained, part)])


def label_figures_from(trained: Trained, rows: Iterable[tuple[Tensor, Tensor]], averaged: bool = False) -> LabelFigures:
    """`rows`: logits and labels of the batches, on the host. `averaged`: means of models, which have no thresholds."""
    logits, labels = (torch.cat(column).double() for column in zip(*rows, strict=True))
    probabilities, truth = logits.sigmoid().numpy(), labels.numpy() > 0
    thresholds = np.full(truth.shape[1], HALF) if averaged else np.array(thresholds_of(trained)[0])
    chosen = probabilities >= thresholds
    _, micro, macro = f1(chosen, truth)
    scores = scores_of(probabilities, truth, trained.config.DATA.THRESHOLD_IMAGES)
    exact_match = 100 * float((chosen == truth).all(1).mean())
    of_map, of_auroc = ranking_intervals(probabilities, truth)
    return LabelFigures(
        images=len(truth),
        loss=float(F.binary_cross_entropy_with_logits(logits, labels)),
        scores=scores,
        thresholds=thresholds,
        support=truth.sum(0),
        guessed=chosen.sum(0),
        right=(chosen & truth).sum(0),
        unlabelled=int((~truth.any(1)).sum()),
        f1_micro=100 * micro,
        f1_macro=100 * macro,
        exact_match=exact_match,
        not_finite=int((~logits.isfinite().all(1)).sum()),
        intervals={
            MAP.name: of_map,
            AUROC.name: of_auroc,
            "exact_match": wilson(100 * scores.exact_match, len(truth)),
            "exact_match_at_thresholds": wilson(exact_match, len(truth)),
        },
    )
