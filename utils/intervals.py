"""95 % intervals of metrics in percent: how far chance in which images were validated on may have moved a metric."""

from __future__ import annotations

import math
from typing import NamedTuple

Z = 1.959963984540054
"""Normal quantile of 97.5 %"""


class Interval(NamedTuple):
    low: float
    high: float

    def words(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f} %"


def wilson(percent: float, images: float) -> Interval:
    """Wilson's interval of a share of `images`, which may be an effective number."""
    share, square = percent / 100, Z * Z / images
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(max(share * (1 - share), 0.0) * square + square * square / 4) / (1 + square)
    return Interval(100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0))
