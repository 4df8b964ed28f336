"""Compute what each validation image adds to a metric of a run, from which the noise of images is estimated."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.config import config_of_run
from utils.record.history import History
from utils.record.predictions import GROUPS, read_predictions
from utils.statistics.classes import balanced_accuracy_by_image, macro_f1_by_image
from utils.statistics.ranking import ranking_of
from vitamp.metrics import AUROC, BALANCED, MACRO_F1, MAP, TOP1, TOP5, Metric, WeightSet, set_of

FEWEST_BEYOND_ONE = 4
"""AUROC needs this many images of the rarer kind, positives or negatives, beyond one per class, in all classes
together: its variance is unknown with fewer."""


class PerImage(NamedTuple):
    """What each image of a validation split adds to a metric of a run, in ascending order of the images' hashes."""

    names: np.ndarray
    """Hash of each image's name"""
    values: np.ndarray
    """In percent; their mean is the metric"""
    rows: np.ndarray
    """Index of each image in the run's validation split"""
    labels: np.ndarray
    groups: np.ndarray
    """Empty without DATA.GROUP"""


def per_image(folder: Path, metric: Metric, weights: WeightSet) -> PerImage | None:
    """Read what each image adds to a metric in the last validation of the run in `folder`.

    Returns None if the run did not store its predictions, and for a metric that cannot be divided among images.
    """
    validations = History.of_run(folder).of("val")
    last_update = validations[-1].get("update", -1) if validations else -1  # predictions of update -1 do not exist
    table = read_predictions(folder, last_update)
    if table is None:
        return None
    names = table.pop("names")
    labels = table.pop("labels").astype(np.int64)
    groups = table.pop(GROUPS, np.empty(0, np.uint64))
    if not len(groups) and config_of_run(folder).DATA.GROUP is not None:
        return None  # an earlier version, which did not store the groups
    # The name of a column has the prefix of the weights that predicted it. A run without the weights `weights` is
    # judged by its plain ones.
    columns_of_weights = dict[str, np.ndarray]()
    all_columns = dict[str, np.ndarray]()
    for name, column in table.items():
        column_weights, name_without_prefix = set_of(name)
        all_columns[name_without_prefix] = column
        if column_weights is weights:
            columns_of_weights[name_without_prefix] = column
    columns = columns_of_weights or all_columns
    values = values_of_images(metric, labels, columns)
    if values is None:
        return None
    order = np.argsort(names, kind="stable")
    return PerImage(names[order], values[order], order, labels[order], groups[order] if len(groups) else groups)


def values_of_images(metric: Metric, labels: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray | None:
    """Compute what each image adds to a metric, in percent; their mean is the metric.

    `labels`: one per image, or rows of zeros and ones (images x classes). `columns`: predictions of each image, under
    the names that predictions.safetensors uses. Returns None for a metric that cannot be divided among images.
    """
    if metric is TOP5:
        return 100.0 * columns["in_top5"]
    if metric in (TOP1, BALANCED, MACRO_F1) and "guess" in columns:
        guesses = columns["guess"].astype(np.int64)
        if metric is TOP1:
            return 100.0 * (labels == guesses)
        by_image = balanced_accuracy_by_image if metric is BALANCED else macro_f1_by_image
        return by_image(labels, guesses)
    if metric.name == "exact_match":
        is_predicted = columns["logits"] >= 0  # a probability of at least 0.5
        return 100.0 * (is_predicted == labels).all(1)
    if metric is AUROC and too_few_for_auroc(labels > 0):
        return None
    if metric in (MAP, AUROC):
        ranking = ranking_of(columns["logits"].astype(np.float32), labels > 0)
        if ranking is None:
            return None
        # The sum of the images' influences on the metric is 0. The metric plus the influence times the number of images
        # makes values whose mean is the metric.
        if metric is MAP:
            return 100 * (ranking.precision + len(labels) * ranking.precision_influence)
        return 100 * (ranking.area + len(labels) * ranking.area_influence)
    return None


def too_few_for_auroc(truth: np.ndarray) -> bool:
    """Whether classes have too few positives or negatives to compare two models by AUROC, the mean over classes.

    That is so if a class has a single positive or a single negative, whose result would be taken for certain because
    one image shows no variance; or if all classes together have too few of them. Classes that no image or every image
    has do not count, because they have no AUROC. `truth`: whether an image has a class, images x classes.
    """
    positives = truth.sum(0)
    negatives = len(truth) - positives
    rarer_kind = np.minimum(positives, negatives)
    rarer_kind_of_counted = rarer_kind[rarer_kind > 0]
    has_single_image = bool((rarer_kind_of_counted == 1).any())
    beyond_one = int((rarer_kind_of_counted - 1).sum())
    return has_single_image or beyond_one < FEWEST_BEYOND_ONE
