"""Prepare the charts of a report, which templates/charts.html draws as SVG.

Colours are CSS classes, for light and dark screens.
"""

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
    from tools.common.calibration_error import Bin

HUES = 8
"""Number of colours in style.html"""
SHADES = 4
"""Variants of each colour: a shade and a marker shape"""
MOST_POINTS = 300
"""Most points of a line: more would not be visible."""
MOST_MARKERS = 60
"""Most points of a curve of which each has a marker"""
SPARSE_MARKERS = 12
"""Number of markers on a curve with more points"""
WIDTH = 360
HEIGHT = 220
LEFT = 50
RIGHT = 10
TOP = 10
BOTTOM = 36
SIZES = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
# Heights of a reliability diagram, of the gap below it, and of the bars below that, which count the images of each bin.
PLOT = 200
GAP = 10
COUNTS = 34


class Style(NamedTuple):
    """Colour of a run. Seeds of one precision share the hue and differ in the shade."""

    hue: int
    shade: int = 0

    @property
    def css(self) -> str:
        """CSS classes, as style.html defines them."""
        return f"hue{self.hue} shade{self.shade}"


@dataclass(frozen=True)
class Curve:
    """A line of a chart: a metric of a run in training or in validation."""

    points: Points
    label: str
    style: Style
    faint: bool = False
    """Thin and pale, for training beside validation"""
    dashed: bool = False
    """For validation of other weights than the plain ones"""

    @property
    def kind(self) -> str:
        """CSS class for the look of the line, which the legend explains."""
        if self.faint:
            return "faint"
        return "dashed" if self.dashed else "strong"


class Mark(NamedTuple):
    """Symbols at some points of a run's curve."""

    symbol: str
    """cross: skipped updates; diamond: the best validation"""
    points: Points
    label: str
    style: Style


@dataclass(frozen=True)
class Chart:
    """A chart of curves over epochs or updates."""

    title: str
    curves: list[Curve]
    marks: list[Mark] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    """Epochs or updates at which a run was resumed, shown as dotted vertical lines"""
    x_name: str = "update"
    logarithmic: bool = False

    @property
    def drawn(self) -> list[Curve]:
        """The curves that have points."""
        return [curve for curve in self.curves if curve.points]

    def lines(self) -> list[tuple[Curve, str]]:
        """Return each curve with the `d` attribute of its SVG path."""
        lines = []
        for curve in self.drawn:
            positions = [self._place(point) for point in thinned(curve.points, MOST_POINTS)]
            path = " ".join(f"{x},{y}" for x, y in positions)
            lines.append((curve, f"M{path}"))
        return lines

    def markers(self) -> list[tuple[float, float, Style, str]]:
        """Return (x, y, style, tooltip) of every point of a short curve, and of some points of a long one."""
        markers = []
        for curve in self.drawn:
            if curve.faint:
                continue
            is_short = len(curve.points) <= MOST_MARKERS
            marked = curve.points if is_short else thinned(curve.points, SPARSE_MARKERS)
            for point in marked:
                x, y = self._place(point)
                tooltip = f"{curve.label}, {self.x_name} {point[0]:,.6g}: {short(point[1])}"
                markers.append((x, y, curve.style, tooltip))
        return markers

    def symbols(self) -> list[tuple[str, float, float, Style, str]]:
        """Return (symbol, x, y, style, tooltip) of the marks."""
        symbols = []
        for mark in self.marks:
            for point in thinned(mark.points, MOST_POINTS):
                x, y = self._place(point)
                tooltip = f"{mark.label}, {self.x_name} {point[0]:,.6g}"
                symbols.append((mark.symbol, x, y, mark.style, tooltip))
        return symbols

    def resume_lines(self) -> list[float]:
        """Return the x position of each vertical line that marks a resume."""
        return [self._place((x, 0))[0] for x in self.resumed]

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each tick of the x axis."""
        low, high = self._x_range
        return [(self._place((tick, 0))[0], text) for tick, text in labelled(round_numbers(low, high, 5))]

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each tick of the y axis; powers of two if it is logarithmic."""
        low, high = self._y_range
        if self.logarithmic:  # then the ends are exponents of 2
            first = math.ceil(low)
            last = math.floor(high)
            step = max(1, -(-(last - first) // 5))  # a fifth of the range, rounded up
            powers = range(first, last + 1, step)
            return [(self._y_position(2.0**power), f"2^{power}") for power in powers]
        return [(self._y_position(tick), text) for tick, text in labelled(round_numbers(low, high, 5))]

    def legend(self) -> list[tuple[str, str]]:
        """Return (CSS class, meaning) of every kind of line and symbol in the chart.

        The colours of the runs are explained once per page. A single kind of line needs no explanation.
        """
        # Kinds of curves: thin for training, thick for validation, dashed for validation of other weights, such as EMA.
        kinds = {curve.kind for curve in self.drawn}
        marked = "/".join(weights.mark for weights in SETS if weights.mark)
        meanings_of_curves = (
            ("faint", "training, epoch means" if self.x_name == "epoch" else "training"),
            ("strong", "validation"),
            ("dashed", f"{marked} validation"),
        )
        legend = [(kind, meaning) for kind, meaning in meanings_of_curves if kind in kinds and len(kinds) > 1]

        # Symbols on curves, and vertical dotted lines.
        symbols = {mark.symbol for mark in self.marks if mark.points}
        if self.resumed:
            symbols.add("dotted")
        meanings_of_symbols = (("diamond", "best validation"), ("cross", "skipped update"), ("dotted", "resumed"))
        return legend + [(symbol, meaning) for symbol, meaning in meanings_of_symbols if symbol in symbols]

    def description(self) -> str:
        """Describe the chart for readers who cannot see it."""
        ends = [f"{curve.label} ends at {short(curve.points[-1][1])}" for curve in self.drawn]
        return f"{self.title}: {'; '.join(ends)}"

    @cached_property
    def _x_range(self) -> tuple[float, float]:
        """Ends of the x axis, which includes 0 and 1."""
        ends = [0.0, 1.0]
        for curve in self.curves:
            ends += [x for x, _ in curve.points]
        return min(ends), max(ends)

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        """Ends of the y axis; exponents of 2 if it is logarithmic. It starts at 0 if the values are not far from 0."""
        values: list[float] = []
        for curve in self.curves:
            values += [self._scaled(y) for _, y in curve.points]
        if not values:
            return 0.0, 1.0
        low = min(values)
        high = max(values)
        # The margin is 6 % of the range; if all values are equal, 5 % of the value, or 0.5 if they are 0.
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
        starts_at_0 = 0 <= low < 0.3 * high and not self.logarithmic
        bottom = 0.0 if starts_at_0 else low - margin
        return bottom, high + margin

    def _scaled(self, y: float) -> float:
        """Take the logarithm of a value to base 2 if the y axis is logarithmic."""
        return math.log2(max(y, 1e-12)) if self.logarithmic else y

    def _y_position(self, y: float) -> float:
        """Convert a value to its vertical position in the SVG image."""
        _x_position, y_position = self._place((0, y))
        return y_position

    def _place(self, point: tuple[float, float]) -> tuple[float, float]:
        """Convert a point of a curve to its position in the SVG image."""
        x_low, x_high = self._x_range
        y_low, y_high = self._y_range
        across = (point[0] - x_low) / ((x_high - x_low) or 1)
        up = (self._scaled(point[1]) - y_low) / ((y_high - y_low) or 1)
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
    """Sentences about the calibration error"""

    bottom_of_plot = TOP + PLOT
    height = TOP + PLOT + GAP + COUNTS + BOTTOM

    def bars(self) -> list[dict[str, Any]]:
        """Return position, heights and tooltip of the bars of each bin that has images. Sizes are in pixels.

        A bin has a bar for its accuracy, with a mark at its mean confidence, and below it a bar for its image count.
        """
        width = (WIDTH - LEFT - RIGHT) / len(self.bins)
        most = max(bin.images for bin in self.bins)
        gap = 1  # on both sides of a bar
        return [
            {
                "x": round(LEFT + number * width + gap, 1),
                "width": round(width - 2 * gap, 1),
                "accuracy": round(PLOT * bin.accuracy / 100, 1),
                "confidence": round(PLOT * bin.confidence / 100, 1),
                "count": round(COUNTS * bin.images / most, 1),
                "words": f"{bin.images:,} images: accuracy {bin.accuracy:.1f} %, confidence {bin.confidence:.1f} %",
            }
            for number, bin in enumerate(self.bins)
            if bin.images
        ]

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each tick of the x axis, the confidence."""
        return [(LEFT + fraction * (WIDTH - LEFT - RIGHT), f"{fraction:.0%}") for fraction in (0, 0.25, 0.5, 0.75, 1)]

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each tick of the y axis, the accuracy."""
        return [(TOP + PLOT * (1 - fraction), f"{fraction:.0%}") for fraction in (0, 0.25, 0.5, 0.75, 1)]

    def description(self) -> str:
        """Describe the diagram for readers who cannot see it."""
        filled = [bin for bin in self.bins if bin.images]
        bins = [f"{bin.confidence:.0f} % confident: {bin.accuracy:.0f} % accurate" for bin in filled]
        return f"Reliability diagram, calibration error {self.ece:.1f} %: {'; '.join(bins)}"


def styles_of(runs: Sequence[Run], contenders: Mapping[Path, str] | None = None) -> list[Style]:
    """Choose the colour of each run: runs of one contender, or else of one precision, share a hue in several shades.

    If each run is a group of its own, or all are one group, each run gets a hue.
    `contenders`: folder of a run -> its contender, if known; None: runs with the same settings are one contender.
    """
    precisions = [run.precision for run in runs]
    if contenders:
        contender_of_run: list[Any] = [contenders[run.folder] for run in runs]
    else:
        # A contender is the precision and the values of the settings in which runs differ, except seed and fold.
        varied = varied_settings(runs, besides=PAIRED_BY + PLACES).values()
        contender_of_run = list(zip(precisions, *varied, strict=True))
    # The first grouping that makes several groups, of which at least one has several runs.
    for group_of_run in (contender_of_run, precisions):
        groups = list(dict.fromkeys(group_of_run))
        if 1 < len(groups) < len(runs):
            styles = []
            for number, group in enumerate(group_of_run):
                earlier_runs = group_of_run[:number].count(group)
                styles.append(Style(groups.index(group) % HUES, earlier_runs % SHADES))
            return styles
    return [Style(number % HUES, number // HUES % SHADES) for number in range(len(runs))]


def charts(runs: Sequence[Run], styles: Sequence[Style]) -> list[Chart]:
    """Draw charts of all runs: metrics, speed, learning rate, gradient norm, loss scale. Empty ones are left out.

    The x axis counts epochs if every run has whole ones, else updates. `styles`: the colour of each run.
    """
    styled_runs = list(zip(runs, styles, strict=True))
    by_epoch = all(run.history.by_epoch for run in runs)
    resumed: list[float] = []
    for run in runs:
        resumed += run.history.resumes(by_epoch)

    def chart_of(title: str, curves: list[Curve], marks: Sequence[Mark] = (), logarithmic: bool = False) -> Chart:
        x_name = "epoch" if by_epoch else "update"
        return Chart(title, curves, marks=list(marks), resumed=resumed, x_name=x_name, logarithmic=logarithmic)

    def training_chart(title: str, key: str) -> Chart:
        """Draw the field `key` of the lines that training writes."""
        curves = [Curve(run.history.points("train", key, by_epoch), run.name, style) for run, style in styled_runs]
        return chart_of(title, curves)

    all_charts = []
    for metric in metrics_of(runs):
        if metric.title:  # a metric without a title has no chart
            curves, best_marks = _curves_of_metric(metric, styled_runs, by_epoch)
            all_charts.append(chart_of(metric.title, curves, best_marks))
    all_charts += [
        training_chart("Speed (images/s)", "images_per_second"),
        training_chart("Learning rate", "lr"),
        training_chart("Gradient norm, unscaled", "grad_norm"),
    ]

    # Only runs that scale the loss have a curve: without scaling, the scale is always 1.
    scale_curves = []
    skips = []
    for run, style in styled_runs:
        points = run.history.points("train", "scale", by_epoch)
        if any(scale != 1 for _, scale in points):
            scale_curves.append(Curve(points, run.name, style))
            label = _label(run, "update skipped", styled_runs)
            skips.append(Mark("cross", run.history.skips(by_epoch), label, style))
    all_charts.append(chart_of("Loss scale", scale_curves, skips, logarithmic=True))
    return [chart for chart in all_charts if chart.drawn]


def _curves_of_metric(
    metric: Metric, styled_runs: Sequence[tuple[Run, Style]], by_epoch: bool
) -> tuple[list[Curve], list[Mark]]:
    """Return the curves of a metric in training and validation of each run, and a mark at each run's best validation.

    There is a curve of the validation of each set of weights; those of other weights than the plain ones are dashed.
    The best validation is the one that is best by the metric that decides in the run (SAVE_BEST_BY), not by `metric`.
    """
    key = metric.name
    curves = []
    best_marks = []
    for run, style in styled_runs:
        history = run.history
        training_label = _label(run, "training", styled_runs)
        curves.append(Curve(history.trained(key, by_epoch), training_label, style, faint=True))
        for weights in SETS:
            points = history.points("val", f"{weights.prefix}{key}", by_epoch)
            label = _label(run, weights.marked("validation"), styled_runs)
            curves.append(Curve(points, label, style, dashed=bool(weights.mark)))
        best_point = history.best_point(key, run.deciding, by_epoch)  # a list of one point, or empty
        best_marks.append(Mark("diamond", best_point, _label(run, "best validation", styled_runs), style))
    return curves, best_marks


def _label(run: Run, what: str, styled_runs: Sequence[tuple[Run, Style]]) -> str:
    """Label a curve with `what` it shows, and with the name of the run if there are several runs."""
    return f"{run.name}, {what}" if len(styled_runs) > 1 else what


def thinned(points: Points, most: int) -> Points:
    """Choose about `most` of the points at regular distances, always with the last one."""
    step = -(-len(points) // most) if points else 1  # rounded up
    return [point for number, point in enumerate(points) if number % step == 0 or number == len(points) - 1]


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between low and high, ends included, at equal distances."""
    least_step = ((high - low) or 1) / count
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least_step)
    # The numbers are whole multiples of the step; 1e-9 keeps one at an end that division moves a little beyond it.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    digits = 2 - math.floor(math.log10(step))  # three significant digits of the step, against 0.30000000000000004
    return [round(number * step, digits) for number in range(first, last + 1)]


def labelled(ticks: list[float]) -> list[tuple[float, str]]:
    """Return each tick with its label, which has as many digits as neighbours need to differ."""
    texts = [short(tick) for tick in ticks]
    if len(set(texts)) < len(texts):
        digits = max(0, 1 - math.floor(math.log10(ticks[1] - ticks[0])))
        texts = [f"{tick:.{digits}f}" for tick in ticks]
    return list(zip(ticks, texts, strict=True))


def short(value: float) -> str:
    """Format a value briefly: 12345 -> 12.35k, 0.00012 -> 1.2e-4."""
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
