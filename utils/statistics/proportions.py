"""Intervals (95 %) of proportions in percent, such as accuracy, and of other metrics with a known variance."""

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""Normal quantile of 97.5 %"""


class Interval(NamedTuple):
    """A confidence interval, in percent or percentage points."""

    low: float
    high: float

    def words(self) -> str:
        """The interval as text: '70.10 to 74.52 %'."""
        return f"{self.low:.2f} to {self.high:.2f} %"


def wilson(percent: float, images: float, z: float = Z) -> Interval:
    """Wilson's interval of a percentage of `images`, which may be an effective number."""
    fraction = percent / 100
    square = z * z / images
    middle = (fraction + square / 2) / (1 + square)
    half_width = math.sqrt(max(fraction * (1 - fraction), 0.0) * square + square * square / 4) / (1 + square)
    return Interval(100 * max(middle - half_width, 0.0), 100 * min(middle + half_width, 1.0))


def wilson_of_variance(fraction: float, variance: float, most: float, inflation: float) -> Interval:
    """Wilson's interval of a metric that is no proportion of the images, in percent, by an effective number of images.

    With that number of images, a proportion of the same value would have the variance of the metric.

    fraction, variance: the metric and its variance
    most: largest effective number; used if the metric is 0 or 1, or has no variance
    inflation: of `variance_inflation`
    """
    variance_of_one_image = fraction * (1 - fraction)
    if variance > 0 and variance_of_one_image > 0:
        effective_images = min(most, variance_of_one_image / variance)
    else:
        effective_images = most
    return wilson(100 * fraction, effective_images / inflation)


def newcombe(percents: tuple[float, float], images: Sequence[float], z: float = Z) -> Interval:
    """Newcombe's interval of the difference, first minus second, of two percentages, in percentage points.

    percents: the two percentages
    images: the number of images of each, which are different images
    """
    first, second = percents
    first_interval = wilson(first, images[0], z)
    second_interval = wilson(second, images[1], z)
    below = math.hypot(first - first_interval.low, second_interval.high - second)
    above = math.hypot(first_interval.high - first, second - second_interval.low)
    return Interval(first - second - below, first - second + above)
