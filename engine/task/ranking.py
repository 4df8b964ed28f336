"""Metrics of several labels per sample, from the scores of a whole split: mAP, AUROC, F1 and exact match.

Classes without a positive sample have no average precision: means over classes leave them out. The mean AUROC also
leaves out classes without a negative sample. Classes with few
positives keep a threshold of 0.5 (DATA.THRESHOLD_IMAGES). In simulations with calibrated scores, thresholds from 1 to
10 positives had a lower F1 on other images than 0.5 in 14 % to 54 % of the cases; from 20 positives, in 5 % to 9 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from utils.text import counted

HALF = 0.5
"""Threshold of a class without one of its own."""
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


class Ranked(NamedTuple):
    """Of one class; NaN where it is undefined."""

    average_precision: float
    """As scikit-learn defines it"""
    threshold: float
    """The one with the highest F1"""
    auroc: float


def scores_of(probabilities: np.ndarray, truth: np.ndarray, least: int) -> Scores:
    """`probabilities`: float64, N x C. `truth`: bool, N x C. `least`: DATA.THRESHOLD_IMAGES."""
    ranked = [rank(probabilities[:, label], truth[:, label]) for label in range(truth.shape[1])]
    precision, thresholds, aurocs = (np.array(column, dtype=np.float64) for column in zip(*ranked, strict=True))
    thresholds = np.where(truth.sum(0) < least, HALF, thresholds)
    chosen = probabilities >= HALF
    _, micro, macro = f1(chosen, truth)
    _, best_micro, best_macro = f1(probabilities >= thresholds, truth)
    exact = float((chosen == truth).all(1).mean())
    return Scores(
        map=_mean(precision, truth),
        auroc=_mean(aurocs, truth & ~truth.all(0)),
        f1_micro=micro,
        f1_macro=macro,
        exact_match=exact,
        f1_micro_tuned=best_micro,
        f1_macro_tuned=best_macro,
        thresholds=thresholds,
        average_precision=precision,
        aurocs=aurocs,
    )


def describe_untuned(untuned: Sequence[int] | np.ndarray, names: Sequence[object], least: int) -> str:
    """Which of the classes keep HALF, for log and tools; '' for none. `least`: DATA.THRESHOLD_IMAGES."""
    if not len(untuned):
        return ""
    named = ", ".join(str(names[label]) for label in untuned[:MOST_NAMED])
    more = f" and {len(untuned) - MOST_NAMED} more" if len(untuned) > MOST_NAMED else ""
    return (
        f"{len(untuned)} of {len(names)} classes keep a threshold of {HALF}, with fewer than "
        f"{counted(least, 'validation image')}: {named}{more}"
    )


def rank(scores: np.ndarray, truth: np.ndarray) -> Ranked:
    positives = int(truth.sum())
    if not positives or np.isnan(scores).any():
        return Ranked(np.nan, HALF, np.nan)
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(truth[order])
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # equal scores are predicted together
    scores, hits, predicted = scores[last], hits[last], last + 1
    average = float((np.diff(hits, prepend=0) * (hits / predicted)).sum() / positives)
    best = int(np.argmax(2 * hits / (predicted + positives)))
    below = float(scores[best + 1]) if best + 1 < len(scores) else 0.0
    between = (float(scores[best]) + below) / 2  # halfway, because other samples score a little lower or higher
    threshold = between if between > below else float(scores[best])
    return Ranked(average, threshold, _area(hits, predicted - hits))


def _area(hits: np.ndarray, misses: np.ndarray) -> float:
    """Area under the ROC curve through these counts of true and false positives, from the highest score on."""
    if not misses[-1]:
        return np.nan
    heights = hits - np.diff(hits, prepend=0) / 2  # a positive and a negative of equal score count as half right
    return float((heights * np.diff(misses, prepend=0)).sum() / (hits[-1] * misses[-1]))


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
