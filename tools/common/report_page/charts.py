"""Charts of a report, which templates/charts.html draws as SVG. Colours are CSS classes, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.common.contenders import PAIRED_BY, PLACES
from tools.common.report_page.runs import Run, metrics_of, varied_settings
from utils.record.history import Points
from vitamp.metrics import SETS, Metric

if TYPE_CHECKING:
    from tools.common.evaluation import Bin

HUES = 8
"""Colours in style.html"""
SHADES = 4
"""Variants of each: a shade and a marker shape"""
MOST_POINTS = 300
"""Points of a line: more would not be visible."""
MOST_MARKERS = 60
SPARSE_MARKERS = 12
WIDTH = 360
HEIGHT = 220
LEFT = 50
RIGHT = 10
TOP = 10
BOTTOM = 36
SIZES = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
# Heights: a reliability diagram, and below it the bars of how many images each bin has.
PLOT = 200
GAP = 10
COUNTS = 34


class Style(NamedTuple):
    """Colour of a run. Seeds of one precision share the hue and differ in the shade."""

    hue: int
    shade: int = 0

    @property
    def css(self) -> str:
        return f"hue{self.hue} shade{self.shade}"


@dataclass(frozen=True)
class Curve:
    points: Points
    label: str
    style: Style
    faint: bool = False
    """Thin and pale: training beside validation"""
    dashed: bool = False
    """Validation of other weights than the plain ones"""

    @property
    def kind(self) -> str:
        """Look of the line, for the legend."""
        if self.faint:
            return "faint"
        return "dashed" if self.dashed else "strong"


class Mark(NamedTuple):
    """Symbols of a run at some points."""

    symbol: str
    """cross: skipped updates; diamond: the best validation"""
    points: Points
    label: str
    style: Style


@dataclass(frozen=True)
class Chart:
    title: str
    curves: list[Curve]
    marks: list[Mark] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    """Dotted vertical lines"""
    x_name: str = "update"
    logarithmic: bool = False

    @property
    def drawn(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.points]

    def lines(self) -> list[tuple[Curve, str]]:
        """Each curve with the `d` of its SVG path."""
        found = []
        for curve in self.drawn:
            places = [self._place(point) for point in thinned(curve.points, MOST_POINTS)]
            path = " ".join(f"{x},{y}" for x, y in places)
            found.append((curve, f"M{path}"))
        return found

    def markers(self) -> list[tuple[float, float, Style, str]]:
        """(x, y, style, words for the pointer): every point of a short curve, some points of a long one."""
        found = []
        for curve in self.drawn:
            if curve.faint:
                continue
            few = len(curve.points) <= MOST_MARKERS
            for point in curve.points if few else thinned(curve.points, SPARSE_MARKERS):
                x, y = self._place(point)
                words = f"{curve.label}, {self.x_name} {point[0]:,.6g}: {short(point[1])}"
                found.append((x, y, curve.style, words))
        return found

    def symbols(self) -> list[tuple[str, float, float, Style, str]]:
        """(symbol, x, y, style, words for the pointer) of the marks."""
        found = []
        for mark in self.marks:
            for point in thinned(mark.points, MOST_POINTS):
                x, y = self._place(point)
                found.append((mark.symbol, x, y, mark.style, f"{mark.label}, {self.x_name} {point[0]:,.6g}"))
        return found

    def resume_lines(self) -> list[float]:
        return [self._place((x, 0))[0] for x in self.resumed]

    def x_ticks(self) -> list[tuple[float, str]]:
        low, high = self._x_range
        return [(self._place((tick, 0))[0], text) for tick, text in labelled(round_numbers(low, high, 5))]

    def y_ticks(self) -> list[tuple[float, str]]:
        low, high = self._y_range
        if self.logarithmic:
            first = math.ceil(low)
            last = math.floor(high)
            powers = range(first, last + 1, max(1, -(-(last - first) // 5)))
            return [(self._place((0, 2.0**power))[1], f"2^{power}") for power in powers]
        return [(self._place((0, tick))[1], text) for tick, text in labelled(round_numbers(low, high, 5))]

    def legend(self) -> list[tuple[str, str]]:
        """(symbol, meaning) of every kind of line and symbol in the chart; the runs' colours are the page's legend."""
        kinds = {curve.kind for curve in self.drawn}
        marked = "/".join(which.mark for which in SETS if which.mark)
        lines = (
            ("faint", "training, epoch means" if self.x_name == "epoch" else "training"),
            ("strong", "validation"),
            ("dashed", f"{marked} validation"),
        )
        found = [line for line in lines if line[0] in kinds and len(kinds) > 1]
        present = {mark.symbol for mark in self.marks if mark.points}
        if self.resumed:
            present.add("dotted")
        symbols = (("diamond", "best validation"), ("cross", "skipped update"), ("dotted", "resumed"))
        return found + [symbol for symbol in symbols if symbol[0] in present]

    def description(self) -> str:
        """Text for readers who cannot see the chart."""
        ends = [f"{curve.label} ends at {short(curve.points[-1][1])}" for curve in self.drawn]
        return f"{self.title}: {'; '.join(ends)}"

    @cached_property
    def _x_range(self) -> tuple[float, float]:
        ends = [0.0, 1.0]
        for curve in self.curves:
            ends += [x for x, _ in curve.points]
        return min(ends), max(ends)

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        found: list[float] = []
        for curve in self.curves:
            found += [self._scaled(y) for _, y in curve.points]
        if not found:
            return 0.0, 1.0
        low = min(found)
        high = max(found)
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
        starts_at_0 = 0 <= low < 0.3 * high and not self.logarithmic
        return 0.0 if starts_at_0 else low - margin, high + margin

    def _scaled(self, y: float) -> float:
        return math.log2(max(y, 1e-12)) if self.logarithmic else y

    def _place(self, point: tuple[float, float]) -> tuple[float, float]:
        x0, x1 = self._x_range
        y0, y1 = self._y_range
        across = (point[0] - x0) / ((x1 - x0) or 1)
        up = (self._scaled(point[1]) - y0) / ((y1 - y0) or 1)
        x = LEFT + across * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram. Perfect calibration: in every bin of confidence, accuracy equals the mean confidence."""

    bins: Sequence[Bin]
    ece: float
    """Mean distance between accuracy and confidence in percent, weighted by images"""
    about_error: str
    """Sentences"""

    bottom_of_plot = TOP + PLOT
    height = TOP + PLOT + GAP + COUNTS + BOTTOM

    def bars(self) -> list[dict[str, Any]]:
        """Heights and words of the bins that have images."""
        width = (WIDTH - LEFT - RIGHT) / len(self.bins)
        most = max(bin.images for bin in self.bins)
        return [
            {
                "x": round(LEFT + number * width + 1, 1),
                "width": round(width - 2, 1),
                "accuracy": round(PLOT * bin.accuracy / 100, 1),
                "confidence": round(PLOT * bin.confidence / 100, 1),
                "count": round(COUNTS * bin.images / most, 1),
                "words": f"{bin.images:,} images: accuracy {bin.accuracy:.1f} %, confidence {bin.confidence:.1f} %",
            }
            for number, bin in enumerate(self.bins)
            if bin.images
        ]

    def x_ticks(self) -> list[tuple[float, str]]:
        return [(LEFT + share * (WIDTH - LEFT - RIGHT), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]

    def y_ticks(self) -> list[tuple[float, str]]:
        return [(TOP + PLOT * (1 - share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]

    def description(self) -> str:
        """Text for readers who cannot see the diagram."""
        filled = [bin for bin in self.bins if bin.images]
        bins = [f"{bin.confidence:.0f} % confident: {bin.accuracy:.0f} % accurate" for bin in filled]
        return f"Reliability diagram, calibration error {self.ece:.1f} %: {'; '.join(bins)}"


def styles_of(runs: Sequence[Run], contenders: Mapping[Path, str] | None = None) -> list[Style]:
    """One hue per run, or, where settings or a precision have several runs (seeds), one hue for these, in shades.

    `contenders`: by the folder of each run, if known; else they are taken from the settings.
    """
    precisions = [run.precision for run in runs]
    if contenders:
        known: list[Any] = [contenders[run.folder] for run in runs]
    else:
        different = varied_settings(runs, PAIRED_BY + PLACES).values()
        known = list(zip(precisions, *different, strict=True))
    for groups in (known, precisions):
        order = list(dict.fromkeys(groups))
        if 1 < len(order) < len(runs):
            places = [(order.index(group), groups[:number].count(group)) for number, group in enumerate(groups)]
            return [Style(hue % HUES, shade % SHADES) for hue, shade in places]
    return [Style(number % HUES, number // HUES % SHADES) for number in range(len(runs))]


def charts(runs: Sequence[Run], styles: Sequence[Style]) -> list[Chart]:
    """Charts of all runs: loss, accuracy, speed, learning rate, gradient norm, loss scale. Empty ones are left out.

    The x axis counts epochs if every run has whole ones, else updates.
    """
    styled = list(zip(runs, styles, strict=True))
    by_epoch = all(run.history.by_epoch for run in runs)
    resumed: list[float] = []
    for run in runs:
        resumed += run.history.resumes(by_epoch)

    def chart(title: str, curves: list[Curve], marks: Sequence[Mark] = (), logarithmic: bool = False) -> Chart:
        x_name = "epoch" if by_epoch else "update"
        return Chart(title, curves, marks=list(marks), resumed=resumed, x_name=x_name, logarithmic=logarithmic)

    def training(title: str, key: str) -> Chart:
        curves = [Curve(run.history.points("train", key, by_epoch), run.name, style) for run, style in styled]
        return chart(title, curves)

    found = []
    for metric in metrics_of(runs):
        if metric.title:
            curves, best = _of_metric(metric, styled, by_epoch)
            found.append(chart(metric.title, curves, best))
    found += [
        training("Speed (images/s)", "images_per_second"),
        training("Learning rate", "lr"),
        training("Gradient norm, unscaled", "grad_norm"),
    ]
    # of the runs that scale the loss: without scaling, the scale is always 1
    curves = []
    skips = []
    for run, style in styled:
        points = run.history.points("train", "scale", by_epoch)
        if any(scale != 1 for _, scale in points):
            curves.append(Curve(points, run.name, style))
            label = _label(run, "update skipped", styled)
            skips.append(Mark("cross", run.history.skips(by_epoch), label, style))
    found.append(chart("Loss scale", curves, skips, logarithmic=True))
    return [chart for chart in found if chart.drawn]


def _of_metric(metric: Metric, styled: Sequence[tuple[Run, Style]], by_epoch: bool) -> tuple[list[Curve], list[Mark]]:
    """Training and validation of each run, and its best validation."""
    key = metric.name
    curves = []
    best = []
    for run, style in styled:
        history = run.history
        curves.append(Curve(history.trained(key, by_epoch), _label(run, "training", styled), style, faint=True))
        for which in SETS:
            points = history.points("val", f"{which.prefix}{key}", by_epoch)
            label = _label(run, which.marked("validation"), styled)
            curves.append(Curve(points, label, style, dashed=bool(which.mark)))
        at = history.best_point(key, run.deciding, by_epoch)
        best.append(Mark("diamond", at, _label(run, "best validation", styled), style))
    return curves, best


def _label(run: Run, what: str, styled: Sequence[tuple[Run, Style]]) -> str:
    """Name of the run, where there are several, and of the curve."""
    return f"{run.name}, {what}" if len(styled) > 1 else what


def thinned(points: Points, most: int) -> Points:
    """About `most` of the points, evenly chosen, always with the last one."""
    step = -(-len(points) // most) if points else 1
    return [point for number, point in enumerate(points) if number % step == 0 or number == len(points) - 1]


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = ((high - low) or 1) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(number * step, digits) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def labelled(ticks: list[float]) -> list[tuple[float, str]]:
    """Each tick with a label, which has as many digits as neighbours need to differ."""
    texts = [short(tick) for tick in ticks]
    if len(set(texts)) < len(texts):
        digits = max(0, 1 - math.floor(math.log10(ticks[1] - ticks[0])))
        texts = [f"{tick:.{digits}f}" for tick in ticks]
    return list(zip(ticks, texts, strict=True))


def short(value: float) -> str:
    """12345 -> 12.35k, 0.00012 -> 1.2e-4."""
    size = abs(value)
    if size >= 1e10:
        return f"{value:.2e}".replace("e+", "e")
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"
