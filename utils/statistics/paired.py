"""Two models on the same images: intervals of their difference, and a test of it."""

import math

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Z

WHOLE = 100.0
"""What an image adds to a metric in percent, times their number, if it becomes right"""
FALSE_CLAIMS = 0.05
"""Of McNemar's test, beside a 95 % interval"""


def agresti_min(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """By how much the second is right less often, and the ends of the interval (Agresti and Min, 2005)."""
    from scipy.special import ndtri  # a moment to import

    lost = int((first & ~second).sum())
    won = int((second & ~first).sum())
    inflation = variance_inflation(first.astype(float) - second, groups)
    count = len(first) / inflation + 2
    one = lost / inflation + 0.5
    other = won / inflation + 0.5
    middle = (one - other) / count
    half = float(ndtri(0.975)) * math.sqrt((one + other - count * middle**2) / count**2)
    return (lost - won) / len(first), middle - half, middle + half


def mcnemar(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> float:
    """p-value of McNemar's exact test that two models are right equally often."""
    from scipy.special import betainc  # a moment to import

    inflation = variance_inflation(first.astype(float) - second, groups)
    lost = int((first & ~second).sum()) / inflation
    won = int((second & ~first).sum()) / inflation
    if not lost + won:
        return 1.0
    # Chance of as few as the fewer, by the binomial distribution; groups make their number a fraction.
    return min(1.0, 2 * float(betainc(max(lost, won), min(lost, won) + 1, 0.5)))


def interval_and_test(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """That of `agresti_min`, times the images; with 0 in it, unless McNemar's test rejects that they are equal."""
    value, low, high = (len(first) * one for one in agresti_min(first, second, groups))
    if mcnemar(first, second, groups) > FALSE_CLAIMS:
        return value, min(low, 0.0), max(high, 0.0)
    return value, low, high


def variance_of_mean(apart: np.ndarray) -> float:
    """Of the mean difference of two models. `apart`: what each image adds to it, in percent."""
    # Two made-up images, one for each side, as Bonett and Price (2012) do: few images that differ are no certainty.
    # Their size is a mean that large differences dominate: that of rare images in which a class has all its weight.
    squares = apart**2
    total = float(squares.sum())
    size = float((squares**2).sum()) / total if total > 0 else 0.0
    # Of whole images if none differs; less, the more do, as those of several seeds differ in part.
    different = total / size if size > 0 else 0.0
    size = math.sqrt(size + max(WHOLE**2 - size, 0.0) / (1 + different))
    return float(np.append(apart, [size, -size]).var(ddof=1)) / len(apart)


def half_width_of_mean(apart: np.ndarray, groups: Groups = ()) -> float:
    """Half the width of the interval of that mean, as of a large sample."""
    return Z * math.sqrt(variance_of_mean(apart) * variance_inflation(apart, groups))
