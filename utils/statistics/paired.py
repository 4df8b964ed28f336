"""Intervals and tests of the difference between two models on the same images."""

import math

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Z

WHOLE_IMAGE = 100.0
"""Contribution of an image to accuracy, whose mean over images is in percent, if the image becomes right."""
SIGNIFICANCE = 0.05
"""Significance level of McNemar's test: the probability of a false claim, which belongs to a 95 % interval."""


def agresti_min(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """Return the first model's accuracy minus the second's, as a fraction, and the low and high end of its interval.

    The 95 % interval is that of Agresti and Min (2005) for two proportions of the same images.

    first, second: for each image, whether the first model, or the second, is right
    groups: the group of each image; empty if images are not in groups
    """
    from scipy.special import ndtri  # It takes a moment to import.

    lost = int((first & ~second).sum())
    won = int((second & ~first).sum())
    difference = (lost - won) / len(first)
    # Images in groups tell as much as fewer independent images, so all counts are divided.
    inflation = variance_inflation(first.astype(float) - second, groups)
    # Two images are added: half an image to each of the four outcomes (both right, lost, won, both wrong).
    images = len(first) / inflation + 2
    adjusted_lost = lost / inflation + 0.5
    adjusted_won = won / inflation + 0.5
    middle = (adjusted_lost - adjusted_won) / images
    standard_error = math.sqrt((adjusted_lost + adjusted_won - images * middle**2) / images**2)
    half_width = float(ndtri(0.975)) * standard_error
    return difference, middle - half_width, middle + half_width


def mcnemar(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> float:
    """Return the p-value of McNemar's exact test that two models are right equally often.

    See `agresti_min` for the parameters.
    """
    from scipy.special import betainc  # It takes a moment to import.

    inflation = variance_inflation(first.astype(float) - second, groups)
    lost = int((first & ~second).sum()) / inflation
    won = int((second & ~first).sum()) / inflation
    if lost + won == 0:
        return 1.0
    # Under the null hypothesis, each image that only one model has right is lost or won with probability 0.5. The
    # p-value is twice P(X <= k), where X is binomial with n = lost + won, and k is the smaller of the two counts.
    # P(X <= k) = I(n - k, k + 1), the regularised incomplete beta function at 0.5. Unlike a binomial sum, it is also
    # defined for fractions, which the counts are if images are in groups.
    smaller_or_equal = float(betainc(max(lost, won), min(lost, won) + 1, 0.5))
    return min(1.0, 2 * smaller_or_equal)


def interval_and_test(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """Return how many more images the first model has right than the second, and the low and high end of the interval.

    The interval of `agresti_min` is extended to contain 0, unless McNemar's test rejects that the models are equal. See
    `agresti_min` for the parameters.
    """
    value, low, high = (len(first) * fraction for fraction in agresti_min(first, second, groups))
    p_value = mcnemar(first, second, groups)
    if p_value > SIGNIFICANCE:
        return value, min(low, 0.0), max(high, 0.0)
    return value, low, high


def variance_of_mean(differences: np.ndarray) -> float:
    """Estimate the variance of the mean difference between two models on the same images.

    If few images differ, their sample variance is too small. So two imagined images are added, as Bonett and Price
    (2012) do for proportions: each model wins one of them, by the same size.

    differences: for each image, the difference of its contributions to the metric, in percent
    """
    squares = differences**2
    total = float(squares.sum())
    # The squared size of the imagined images: the mean of d**2, weighted by d**2. So large differences count most:
    # those of images of rare classes, each of which has much of its class's weight.
    square_size = float((squares**2).sum()) / total if total > 0 else 0.0
    # Effective number of images that differ: (sum of d**2)**2 / (sum of d**4)
    different_images = total / square_size if square_size > 0 else 0.0
    # In means over seeds, an image may differ in part. If no image differs, nothing is known of the size, and the
    # imagined images differ as whole ones. The more images differ, the less is added to their own size.
    square_to_add = max(WHOLE_IMAGE**2 - square_size, 0.0) / (1 + different_images)
    size = math.sqrt(square_size + square_to_add)
    return float(np.append(differences, [size, -size]).var(ddof=1)) / len(differences)


def half_width_of_mean(differences: np.ndarray, groups: Groups = ()) -> float:
    """Return half the width of the 95 % interval of a mean difference, by the normal distribution.

    See `variance_of_mean` for the parameters.
    """
    return Z * math.sqrt(variance_of_mean(differences) * variance_inflation(differences, groups))
