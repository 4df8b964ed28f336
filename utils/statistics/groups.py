"""Images in groups (DATA.GROUP) tell less than as many independent ones: by how much."""

from collections.abc import Sequence

import numpy as np

from utils.statistics.proportions import Z

Groups = Sequence[str] | np.ndarray
"""Of each image; empty: it is in none"""
UNKNOWN = 0.5
"""How alike images of a group are taken to be, if none differs; less, the more do"""


def design_effect(values: np.ndarray, groups: Groups) -> tuple[float, float]:
    """How many times larger the variance of their mean is than that of independent images; effective number of groups.

    The larger of two: by the intraclass correlation of one-way analysis of variance, and by the sums over the groups
    (cluster-robust variance). The first overlooks one large group among single images, the second that few groups may
    agree by chance.
    """
    _, of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    images = len(of)
    number = len(sizes)
    if number in (0, images):
        return 1.0, len(values)
    values = values.astype(float) - values[0]  # equal ones are 0, without errors of rounding
    mean = np.bincount(of, values) / sizes
    size = float((sizes**2).sum()) / images
    between = float((sizes * (mean - values.mean()) ** 2).sum()) / max(number - 1, 1)
    within = float(((values - mean[of]) ** 2).sum()) / (images - number)
    total = between + ((images - size) / max(number - 1, 1) - 1) * within
    alike = (between - within) / total if total > 0 else 0.0
    # How alike they are is unknown if all are equal or of one group, and hardly known by one mistake.
    apart = values - values.mean()
    squares = apart**2
    if number < 2 or not squares.any():
        return 1 + (size - 1) * max(alike, UNKNOWN), images / size
    different = float(squares.sum() ** 2 / (squares**2).sum())
    alike = max(alike, UNKNOWN / (1 + different))
    of_sums = float((np.bincount(of, apart) ** 2).sum() / squares.sum()) * number / (number - 1)
    return max(1 + (size - 1) * alike, of_sums), images / size


def variance_inflation(values: np.ndarray, groups: Groups) -> float:
    """The design effect for an interval. `values`: of each image, or its influence on a metric.

    Few groups know the variance badly: Student's t, by their number, takes the place of the normal distribution.
    """
    effect, number = design_effect(values, groups)
    if number == len(values):
        return 1.0
    from scipy.stats import t  # a second to import

    return effect * (float(t.ppf(0.975, max(number - 1, 1))) / Z) ** 2


def effective_images(values: np.ndarray, groups: Groups) -> float:
    """How many independent images tell as much of the mean as these do, which are in groups."""
    return len(values) / variance_inflation(values, groups)
