"""Intervals (95 %) of proportions in percent, and of what has the variance of one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""Normal quantile of 97.5 %"""


class Interval(NamedTuple):
    low: float
    high: float

    def words(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f} %"


def wilson(percent: float, images: float, z: float = Z) -> Interval:
    """Wilson's interval of a share of `images`, which may be an effective number."""
    share = percent / 100
    square = z * z / images
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(max(share * (1 - share), 0.0) * square + square * square / 4) / (1 + square)
    return Interval(100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0))


def wilson_of_variance(fraction: float, variance: float, most: float, inflation: float) -> Interval:
    """Wilson's interval of a metric that is no share of the images, with an effective number of images.

    It is as many as would give a share the variance that the metric has. `most`: the largest such number, used where
    no image had another outcome. `inflation`: of `variance_inflation`.
    """
    of_one = fraction * (1 - fraction)
    images = min(most, of_one / variance) if variance > 0 and of_one > 0 else most
    return wilson(100 * fraction, images / inflation)


def newcombe(percents: tuple[float, float], images: Sequence[float], z: float = Z) -> Interval:
    """Newcombe's interval of the difference of two shares of different images, in percentage points."""
    ours, theirs = percents
    one = wilson(ours, images[0], z)
    other = wilson(theirs, images[1], z)
    below = math.hypot(ours - one.low, other.high - theirs)
    above = math.hypot(one.high - ours, theirs - other.low)
    return Interval(ours - theirs - below, ours - theirs + above)
