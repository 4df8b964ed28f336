"""Plain text for the log and the console: numbers with their nouns, intervals, and aligned tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


def counted(number: float, noun: str) -> str:
    """'1 update', '1,234 updates', '2 processes'."""
    plural = noun + ("es" if noun.endswith(("s", "x", "tch", "sh")) else "s")
    return f"{number:{'g' if isinstance(number, float) else ','}} {noun if number == 1 else plural}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns two blanks apart, padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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
