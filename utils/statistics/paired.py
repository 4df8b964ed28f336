"""Intervals and tests of the difference between two models on the same images."""

import math

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Z

WHOLE = 100.0
"""Contribution of an image to accuracy, whose mean over images is in percent, if the image becomes right."""
FALSE_CLAIMS = 0.05
"""Level of McNemar's test, which belongs to a 95 % interval."""


def agresti_min(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """The accuracy that the second model loses, as a fraction, and the low and high end of its interval.

    The interval is that of Agresti and Min (2005).

    first, second: whether each image is right, by the first and the second model
    """
    from scipy.special import ndtri  # It takes a moment to import.

    lost = int((first & ~second).sum())
    won = int((second & ~first).sum())
    inflation = variance_inflation(first.astype(float) - second, groups)
    # Two images are added: half an image to each of the four outcomes.
    images = len(first) / inflation + 2
    adjusted_lost = lost / inflation + 0.5
    adjusted_won = won / inflation + 0.5
    middle = (adjusted_lost - adjusted_won) / images
    error = math.sqrt((adjusted_lost + adjusted_won - images * middle**2) / images**2)
    half_width = float(ndtri(0.975)) * error
    return (lost - won) / len(first), middle - half_width, middle + half_width


def mcnemar(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> float:
    """p-value of McNemar's exact test that two models are right equally often; see `agresti_min` for the parameters."""
    from scipy.special import betainc  # It takes a moment to import.

    inflation = variance_inflation(first.astype(float) - second, groups)
    lost = int((first & ~second).sum()) / inflation
    won = int((second & ~first).sum()) / inflation
    if lost + won == 0:
        return 1.0
    # Twice the binomial probability of a number as small as the smaller of the two. The incomplete beta function
    # continues it to fractions, which the numbers are if images are in groups.
    return min(1.0, 2 * float(betainc(max(lost, won), min(lost, won) + 1, 0.5)))


def interval_and_test(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """The number of images that the second model loses, and the low and high end of its interval.

    The interval of `agresti_min` is extended to contain 0, unless McNemar's test rejects that the models are equal.
    """
    value, low, high = (len(first) * fraction for fraction in agresti_min(first, second, groups))
    if mcnemar(first, second, groups) > FALSE_CLAIMS:
        return value, min(low, 0.0), max(high, 0.0)
    return value, low, high


def variance_of_mean(differences: np.ndarray) -> float:
    """Variance of the mean difference of two models.

    differences: difference of the contributions of each image to the metric, in percent
    """
    # If few images differ, their variance is too small. So two images are added, as Bonett and Price (2012) do: each
    # model wins one of them. Their size is a mean that large differences dominate: those of images of rare classes,
    # each of which has much of its class's weight.
    squares = differences**2
    total = float(squares.sum())
    square_size = float((squares**2).sum()) / total if total > 0 else 0.0
    # If no image differs, the size is that of whole images. It shrinks as more images differ, because in means over
    # seeds an image may differ in part.
    different_images = total / square_size if square_size > 0 else 0.0
    size = math.sqrt(square_size + max(WHOLE**2 - square_size, 0.0) / (1 + different_images))
    return float(np.append(differences, [size, -size]).var(ddof=1)) / len(differences)


def half_width_of_mean(differences: np.ndarray, groups: Groups = ()) -> float:
    """Half the width of the interval of the mean difference, by the normal distribution; see `variance_of_mean`."""
    return Z * math.sqrt(variance_of_mean(differences) * variance_inflation(differences, groups))
