"""What each validation image adds to a metric of a run: the noise of images comes from it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.record.history import History
from utils.record.predictions import read_predictions
from vitamp.metrics import BALANCED, MACRO_F1, MAP, TOP1, TOP5, Metric, WeightSet, set_of


class PerImage(NamedTuple):
    names: np.ndarray
    """Hashes, in ascending order"""
    values: np.ndarray
    """In percent; their mean is the metric"""


def per_image(folder: Path, metric: Metric, weights: WeightSet) -> PerImage | None:
    """Of a run's last validation. None without its predictions, or for a metric that is not computed by image here."""
    last = (History.of_run(folder).of("val") or [{}])[-1]
    table = read_predictions(folder, last.get("update", -1))
    if table is None:
        return None
    names, labels = table.pop("names"), table.pop("labels").astype(np.int64)
    of_one = {name: column for name, column in table.items() if set_of(name)[0] is weights}
    # A run without these weights is judged by its plain ones.
    columns = {set_of(name)[1]: column for name, column in (of_one or table).items()}
    values = values_of_images(metric, labels, columns)
    order = np.argsort(names, kind="stable")
    return None if values is None else PerImage(names[order], values[order])


def values_of_images(metric: Metric, labels: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray | None:
    """`columns`: predictions of each image, as predictions.safetensors has them."""
    if metric is TOP5:
        return 100.0 * columns["in_top5"]
    if metric in (TOP1, BALANCED, MACRO_F1):
        guesses = columns["guess"].astype(np.int64)
        return 100.0 * (guesses == labels) if metric is TOP1 else _jackknife(*_by_class(metric, labels, guesses))
    if metric is MAP:
        with_positives = np.flatnonzero(labels.any(0))
        of_classes = [_average_precision(columns["logits"][:, label], labels[:, label] > 0) for label in with_positives]
        means, changes = (np.mean(each, axis=0) for each in zip(*of_classes, strict=True))
        return _jackknife(float(means), changes)
    if metric.name == "exact_match":
        return 100.0 * ((columns["logits"] >= 0) == labels).all(1)
    return None


def _jackknife(value: float, changes: np.ndarray) -> np.ndarray:
    """Pseudo-values in percent (Tukey). `changes`: of the metric, when each image is left out."""
    return 100 * (value - (len(changes) - 1) * (changes - changes.mean()))


def _by_class(metric: Metric, labels: np.ndarray, guesses: np.ndarray) -> tuple[float, np.ndarray]:
    """Balanced accuracy or macro F1 as fractions, and their changes when an image is left out."""
    classes, hits = int(max(labels.max(), guesses.max())) + 1, labels == guesses
    right = np.bincount(labels[hits], minlength=classes)
    counted = np.bincount(labels, minlength=classes)
    recall = metric is BALANCED
    if not recall:
        counted = (counted + np.bincount(guesses, minlength=classes)) / 2

    def of_class(right: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return right / np.maximum(counted, 0.5)

    now, number = of_class(right, counted), np.count_nonzero(counted)
    # A hit of F1 leaves both the labelled and the predicted images of its class, a miss one of each of two classes.
    less = 1.0 if recall else np.where(hits, 1.0, 0.5)
    changes = of_class(right[labels] - hits, counted[labels] - less) - now[labels]
    if not recall:
        changes += np.where(hits, 0.0, of_class(right[guesses], counted[guesses] - 0.5) - now[guesses])
    return float(now.sum()) / number, changes / number


def _average_precision(scores: np.ndarray, truth: np.ndarray) -> tuple[float, np.ndarray]:
    """Of one class, and its changes when an image is left out. Equal scores are taken in the order of the images."""
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    truth, ranks = truth[order], np.arange(1, len(order) + 1)
    hits, before = np.cumsum(truth), np.maximum(ranks - 1, 1)
    precisions = np.where(truth, hits / ranks, 0.0)
    above = np.cumsum(precisions) - precisions

    def below(changed: np.ndarray) -> np.ndarray:
        kept = np.where(truth, changed, 0.0)
        return kept.sum() - np.cumsum(kept)

    positives = hits[-1]
    value = float(precisions.sum() / positives)
    without_positive = (above + below((hits - 1) / before)) / max(positives - 1, 1)
    changes = np.empty(len(order))
    changes[order] = np.where(truth, without_positive, (above + below(hits / before)) / positives) - value
    return value, changes
