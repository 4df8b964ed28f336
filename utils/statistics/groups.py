"""Corrects the variance of metrics for images in groups (DATA.GROUP), which tell less than independent images."""

from collections.abc import Sequence

import numpy as np

from utils.statistics.proportions import Z

Groups = Sequence[str] | np.ndarray
"""The group of each image; empty if images are not in groups."""
UNKNOWN_CORRELATION = 0.5
"""Intraclass correlation to assume if all values are equal; less is assumed, the more values differ."""


def design_effect(values: np.ndarray, groups: Groups) -> tuple[float, float]:
    """Return the design effect of a mean over images, and the effective number of groups.

    The design effect is the variance of the mean, divided by its variance if the images were independent. It is the
    larger of two estimates. Kish's (1965) is 1 + (m - 1) * rho, with the mean group size m and the intraclass
    correlation rho from a one-way analysis of variance; it overlooks one large group among single images. The
    cluster-robust one (Liang and Zeger 1986) is from the sums over the groups; it overlooks that few groups may agree
    by chance. The effective number of groups is that of groups of equal size m.

    values: one per image, such as whether the image is right, or its influence on a metric
    """
    _, group_of_image, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    images = len(group_of_image)
    number_of_groups = len(sizes)
    if number_of_groups in (0, images):  # no groups, or each image is a group: independent images
        return 1.0, len(values)

    values = values.astype(float) - values[0]  # so that equal values are 0, without rounding errors
    mean_size = float((sizes**2).sum()) / images  # m: size of the group of an image, averaged over the images
    effective_groups = images / mean_size
    correlation = _intraclass_correlation(values, group_of_image, sizes, mean_size)
    deviations = values - values.mean()
    squares = deviations**2
    # The correlation is unknown if all values are equal, or if there is only one group.
    if number_of_groups < 2 or not squares.any():
        return 1 + (mean_size - 1) * max(correlation, UNKNOWN_CORRELATION), effective_groups
    # The correlation is hardly known if few images deviate from the mean, such as one mistake. The effective number of
    # deviating images is Kish's (sum w)**2 / sum w**2, with the squared deviations as w. The more deviate, the smaller
    # is the correlation that is assumed at least.
    deviating_images = float(squares.sum() ** 2 / (squares**2).sum())
    correlation = max(correlation, UNKNOWN_CORRELATION / (1 + deviating_images))

    group_sums = np.bincount(group_of_image, deviations)
    # Variance by the sums over the groups, with the correction G / (G - 1) for a small number G of groups
    cluster_robust = float((group_sums**2).sum() / squares.sum()) * number_of_groups / (number_of_groups - 1)
    return max(1 + (mean_size - 1) * correlation, cluster_robust), effective_groups


def _intraclass_correlation(
    values: np.ndarray, group_of_image: np.ndarray, sizes: np.ndarray, mean_size: float
) -> float:
    """Estimate how alike images of a group are: rho of a one-way analysis of variance; 0 if all values are equal.

    rho = (MSB - MSW) / (MSB + (n0 - 1) * MSW), with the mean squares between and within groups.

    values: one per image
    group_of_image: index of the group of each image
    sizes: number of images of each group
    mean_size: size of the group of an image, averaged over the images
    """
    images = len(values)
    number_of_groups = len(sizes)
    freedom_between = max(number_of_groups - 1, 1)
    group_means = np.bincount(group_of_image, values) / sizes
    between = float((sizes * (group_means - values.mean()) ** 2).sum()) / freedom_between  # MSB
    within = float(((values - group_means[group_of_image]) ** 2).sum()) / (images - number_of_groups)  # MSW
    anova_size = (images - mean_size) / freedom_between  # n0, the group size of unequal groups
    total = between + (anova_size - 1) * within
    return (between - within) / total if total > 0 else 0.0


def variance_inflation(values: np.ndarray, groups: Groups) -> float:
    """Return the factor by which an interval's variance grows because images are in groups; 1 if they are not.

    It is the design effect, times a correction for few groups: they estimate a variance badly. So Student's quantile,
    by the number of groups, takes the place of the normal quantile. Its ratio is squared, because a variance is.

    values: the value of each image, or its influence on a metric
    """
    effect, effective_groups = design_effect(values, groups)
    if effective_groups == len(values):
        return 1.0
    from scipy.stats import t  # It takes a second to import.

    student_quantile = float(t.ppf(0.975, max(effective_groups - 1, 1)))  # of the upper end of a 95 % interval
    return effect * (student_quantile / Z) ** 2


def effective_images(values: np.ndarray, groups: Groups) -> float:
    """The number of independent images that would tell as much about the mean as these images in groups."""
    return len(values) / variance_inflation(values, groups)
