"""Intervals (95 %) of proportions in percent, such as accuracy, and of other metrics with a known variance."""

import math
from collections.abc import Iterable, Sequence
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
    """Return Wilson's score interval (1927) of a percentage of images.

    images: number of images; may be an effective number
    z: normal quantile of the upper end
    """
    fraction = percent / 100  # p
    square = z * z / images  # z**2 / n
    middle = (fraction + square / 2) / (1 + square)
    half_width = math.sqrt(max(fraction * (1 - fraction), 0.0) * square + square * square / 4) / (1 + square)
    low = 100 * max(middle - half_width, 0.0)
    high = 100 * min(middle + half_width, 1.0)
    # Of 0 or 100 %, one end is the value itself, which rounding may miss.
    return Interval(min(low, percent), max(high, percent))


def images_of_mean(class_images: Iterable[float]) -> float:
    """Return the effective number of images of a mean over classes, if all classes are equally hard.

    The mean of C fractions p has the variance p * (1 - p) * sum(1 / n) / C**2, that of C**2 / sum(1 / n) images.

    class_images: number of images of each class
    """
    inverse = [1 / images for images in class_images]
    return len(inverse) ** 2 / sum(inverse)


def wilson_of_variance(
    fraction: float, variance: float, most_images: float, images_at_limit: float, inflation: float
) -> Interval:
    """Return Wilson's interval, in percent, of a metric that is no proportion of the images, such as macro F1.

    Wilson's formula takes a proportion p of n images, whose variance is p * (1 - p) / n. So n is set to the effective
    number of images: that with which a proportion of the same value would have the variance of the metric.

    fraction, variance: the metric as a fraction, and its variance
    most_images: largest effective number
    images_at_limit: effective number if the metric is 0 or 1, or has no variance
    inflation: the factor by which the variance grows because images are in groups (see `variance_inflation`). Grouped
        images tell less, so the effective number is divided by it.
    """
    variance_of_one_image = fraction * (1 - fraction)  # p * (1 - p)
    if variance > 0 and variance_of_one_image > 0:
        effective_images = min(most_images, variance_of_one_image / variance)
    else:
        effective_images = images_at_limit
    return wilson(100 * fraction, effective_images / inflation)


def newcombe(percents: tuple[float, float], images: Sequence[float], z: float = Z) -> Interval:
    """Return Newcombe's interval (1998) of the difference, first minus second, of two percentages of different images.

    The interval is in percentage points. Its ends combine, as squares, the distances of both percentages from the ends
    of their Wilson intervals.

    percents: the two percentages
    images: the number of images of each
    z: normal quantile of the upper end
    """
    first, second = percents
    first_interval = wilson(first, images[0], z)
    second_interval = wilson(second, images[1], z)
    below = math.hypot(first - first_interval.low, second_interval.high - second)
    above = math.hypot(first_interval.high - first, second - second_interval.low)
    return Interval(first - second - below, first - second + above)
