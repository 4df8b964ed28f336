"""Corrects the variance of metrics for images in groups (DATA.GROUP), which tell less than independent images."""

from collections.abc import Sequence

import numpy as np

from utils.statistics.proportions import Z

Groups = Sequence[str] | np.ndarray
"""The group of each image; empty if images are not in groups."""
UNKNOWN = 0.5
"""Intraclass correlation to assume if all values are equal; less is assumed, the more values differ."""


def design_effect(values: np.ndarray, groups: Groups) -> tuple[float, float]:
    """Return the design effect of the mean of `values`, one per image, and the effective number of groups.

    The design effect is the variance of the mean, divided by that for independent images. It is the larger of two: by
    the intraclass correlation of one-way analysis of variance, and by the sums over the groups (cluster-robust
    variance). The first overlooks one large group among single images; the second overlooks that few groups may agree
    by chance.
    """
    _, group_of_image, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    images = len(group_of_image)
    number = len(sizes)
    if number in (0, images):
        return 1.0, len(values)

    # Intraclass correlation: how alike images of a group are.
    values = values.astype(float) - values[0]  # so that equal values are 0, without rounding errors
    means = np.bincount(group_of_image, values) / sizes
    size = float((sizes**2).sum()) / images  # mean over the images of the size of their group
    between = float((sizes * (means - values.mean()) ** 2).sum()) / max(number - 1, 1)
    within = float(((values - means[group_of_image]) ** 2).sum()) / (images - number)
    total = between + ((images - size) / max(number - 1, 1) - 1) * within
    correlation = (between - within) / total if total > 0 else 0.0
    deviations = values - values.mean()
    squares = deviations**2
    # The correlation is unknown if all values are equal, or if there is only one group.
    if number < 2 or not squares.any():
        return 1 + (size - 1) * max(correlation, UNKNOWN), images / size
    # It is hardly known if few values differ, such as one mistake.
    different_images = float(squares.sum() ** 2 / (squares**2).sum())
    correlation = max(correlation, UNKNOWN / (1 + different_images))

    group_sums = np.bincount(group_of_image, deviations)
    cluster_robust = float((group_sums**2).sum() / squares.sum()) * number / (number - 1)
    return max(1 + (size - 1) * correlation, cluster_robust), images / size


def variance_inflation(values: np.ndarray, groups: Groups) -> float:
    """The factor by which an interval's variance grows because images are in groups; 1 if they are not.

    It is the design effect, times a correction for few groups, from which a variance is estimated badly: Student's t
    for their number replaces the normal distribution.

    values: the value of each image, or its influence on a metric
    """
    effect, number = design_effect(values, groups)
    if number == len(values):
        return 1.0
    from scipy.stats import t  # It takes a second to import.

    student_quantile = float(t.ppf(0.975, max(number - 1, 1)))
    return effect * (student_quantile / Z) ** 2


def effective_images(values: np.ndarray, groups: Groups) -> float:
    """The number of independent images that would tell as much about the mean as these images in groups."""
    return len(values) / variance_inflation(values, groups)
