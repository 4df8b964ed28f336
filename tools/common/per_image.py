"""What each validation image adds to a metric of a run: the noise of images comes from it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.config import config_of_run
from utils.record.history import History
from utils.record.predictions import GROUPS, read_predictions
from utils.statistics.classes import balanced_accuracy_by_image, macro_f1_by_image
from utils.statistics.ranking import ranking_of
from vitamp.metrics import AUROC, BALANCED, MACRO_F1, MAP, TOP1, TOP5, Metric, WeightSet, set_of

FEWEST_MORE = 4
"""Images of the rarer kind, positives or negatives, beyond one per class: AUROC's variance is unknown with fewer"""


class PerImage(NamedTuple):
    names: np.ndarray
    """Hashes, in ascending order"""
    values: np.ndarray
    """In percent; their mean is the metric"""
    rows: np.ndarray
    """Index of each in the run's validation split"""
    labels: np.ndarray
    groups: np.ndarray
    """Empty without DATA.GROUP"""


def per_image(folder: Path, metric: Metric, weights: WeightSet) -> PerImage | None:
    """Of a run's last validation. None without its predictions, or for a metric that is not computed by image here."""
    last = (History.of_run(folder).of("val") or [{}])[-1]
    table = read_predictions(folder, last.get("update", -1))
    if table is None:
        return None
    names = table.pop("names")
    labels = table.pop("labels").astype(np.int64)
    groups = table.pop(GROUPS, np.empty(0, np.uint64))
    if not len(groups) and config_of_run(folder).DATA.GROUP is not None:  # of a run of an earlier version
        return None
    of_one = {name: column for name, column in table.items() if set_of(name)[0] is weights}
    # A run without these weights is judged by its plain ones.
    columns = {set_of(name)[1]: column for name, column in (of_one or table).items()}
    values = values_of_images(metric, labels, columns)
    if values is None:
        return None
    order = np.argsort(names, kind="stable")
    return PerImage(names[order], values[order], order, labels[order], groups[order] if len(groups) else groups)


def values_of_images(metric: Metric, labels: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray | None:
    """`columns`: predictions of each image, as predictions.safetensors has them."""
    if metric is TOP5:
        return 100.0 * columns["in_top5"]
    if metric in (TOP1, BALANCED, MACRO_F1) and "guess" in columns:
        guesses = columns["guess"].astype(np.int64)
        if metric is TOP1:
            return 100.0 * (labels == guesses)
        of_classes = balanced_accuracy_by_image if metric is BALANCED else macro_f1_by_image
        return of_classes(labels, guesses)
    if metric.name == "exact_match":
        return 100.0 * ((columns["logits"] >= 0) == labels).all(1)
    if metric is AUROC and too_few_for_auroc(labels > 0):
        return None
    if metric in (MAP, AUROC):
        found = ranking_of(columns["logits"].astype(np.float32), labels > 0)
        if found is None:
            return None
        if metric is MAP:
            return 100 * (found.precision + len(labels) * found.of_precision)
        return 100 * (found.area + len(labels) * found.of_area)
    return None


def too_few_for_auroc(truth: np.ndarray) -> bool:
    """Whether AUROC, a mean over classes, has too few positives to compare two models. `truth`: images x classes.

    The only positive of a class shows no variance at all, and would be taken for certain.
    """
    positives = truth.sum(0)
    rarer = np.minimum(positives, len(truth) - positives)
    rarer = rarer[rarer > 0]
    return bool((rarer == 1).any()) or int((rarer - 1).sum()) < FEWEST_MORE
