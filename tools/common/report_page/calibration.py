"""Reliability diagram of a model: accuracy against confidence, as templates/charts.html draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.common.figures import Bin
from tools.common.report_page.charts import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Column, Style, Value

PLOT, GAP, COUNTS = 200, 10, 34
"""Heights: the diagram, and below it the bars of how many images each bin has"""


class Bar(NamedTuple):
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Reliability:
    """Perfect calibration: in every bin of confidence, the accuracy equals the mean confidence."""

    bins: Sequence[Bin]
    ece: float
    """Mean distance between accuracy and confidence in percent, weighted by images"""

    bottom_of_plot = TOP + PLOT
    height = TOP + PLOT + GAP + COUNTS + BOTTOM

    def accuracy_bars(self) -> list[Bar]:
        return [self._bar(number, bin.accuracy / 100, TOP + PLOT, PLOT) for number, bin in self._filled()]

    def confidence_lines(self) -> list[Bar]:
        """Top edges of bars as high as the mean confidence."""
        return [self._bar(number, bin.confidence / 100, TOP + PLOT, PLOT) for number, bin in self._filled()]

    def count_bars(self) -> list[Bar]:
        most = max(bin.images for bin in self.bins) or 1
        bottom = TOP + PLOT + GAP + COUNTS
        return [self._bar(number, bin.images / most, bottom, COUNTS) for number, bin in self._filled()]

    def x_ticks(self) -> list[tuple[float, str]]:
        return [(LEFT + share * (WIDTH - LEFT - RIGHT), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]

    def y_ticks(self) -> list[tuple[float, str]]:
        return [(TOP + PLOT * (1 - share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]

    def columns(self) -> list[Column]:
        share = 100 / len(self.bins)
        found = []
        for number, bin in enumerate(self.bins):
            values = [Value("images", f"{bin.images:,}")]
            if bin.images:
                values += [
                    Value("accuracy", f"{bin.accuracy:.1f} %", Style(0)),
                    Value("mean confidence", f"{bin.confidence:.1f} %"),
                ]
            title = f"confidence {share * number:.0f} to {share * (number + 1):.0f} %"
            found.append(Column(round(share, 2), round(share * (number + 0.5), 2), title, values))
        return found

    def description(self) -> str:
        """Text for readers who cannot see the diagram."""
        bins = [f"{bin.confidence:.0f} % confident: {bin.accuracy:.0f} % accurate" for _, bin in self._filled()]
        return f"Reliability diagram, calibration error {self.ece:.1f} %: {'; '.join(bins)}"

    def _filled(self) -> list[tuple[int, Bin]]:
        return [(number, bin) for number, bin in enumerate(self.bins) if bin.images]

    def _bar(self, number: int, share: float, bottom: float, full: float) -> Bar:
        width = (WIDTH - LEFT - RIGHT) / len(self.bins)
        height = share * full
        return Bar(
            round(LEFT + number * width + 1, 1), round(bottom - height, 1), round(width - 2, 1), round(height, 1)
        )
