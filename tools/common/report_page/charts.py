"""Geometry of the charts that templates/charts.html draws as SVG. Colours are CSS classes, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from utils.record.history import Points
from utils.record.weight_sets import SETS

HUES, SHADES = 8, 4
"""Colours in style.html, and variants of each: a shade and a marker shape."""
MOST_POINTS = 300
"""Points of a line: more would not be visible."""
MOST_MARKERS, SPARSE_MARKERS = 60, 12
MOST_COLUMNS, MOST_VALUES = 60, 600
"""Limits of what is shown under the pointer, for the size of the page"""
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 36


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


class Mark(NamedTuple):
    """Symbols of a run at some points."""

    points: Points
    label: str
    style: Style


class Value(NamedTuple):
    """One line of what is shown under the pointer."""

    label: str
    text: str
    style: Style | None = None


class Column(NamedTuple):
    """Vertical strip of a chart that shows its values while the pointer is over it. Sizes in percent of the plot."""

    width: float
    x: float
    title: str
    values: list[Value]


@dataclass(frozen=True)
class Chart:
    title: str
    curves: list[Curve]
    skips: list[Mark] = field(default_factory=list)
    """Skipped updates: crosses"""
    best: list[Mark] = field(default_factory=list)
    """Best validations: diamonds"""
    resumed: list[tuple[float, str]] = field(default_factory=list)
    """(where, label): dotted vertical lines"""
    x_name: str = "update"
    logarithmic: bool = False
    shared_axes: Sequence[Chart] = ()
    """Charts in the same row, whose axes this one shares"""

    @property
    def empty(self) -> bool:
        return not any(curve.points for curve in self.curves)

    @property
    def drawn(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.points]

    def lines(self) -> list[tuple[Curve, str]]:
        """Each curve with the `d` of its SVG path."""
        return [(curve, self._path(thinned(curve.points, MOST_POINTS))) for curve in self.drawn]

    def markers(self) -> list[tuple[float, float, Style]]:
        """(x, y, style): every point of a short curve, some points of a long one."""
        found = []
        for curve in self.drawn:
            few = len(curve.points) <= MOST_MARKERS
            if not curve.faint:
                points = curve.points if few else thinned(curve.points, SPARSE_MARKERS)
                found += [(*self._place(point), curve.style) for point in points]
        return found

    def crosses(self) -> list[tuple[float, float, Style]]:
        return [(*self._place(point), mark.style) for mark in self.skips for point in thinned(mark.points, MOST_POINTS)]

    def diamonds(self) -> list[tuple[float, float, Style]]:
        return [(*self._place(point), mark.style) for mark in self.best for point in mark.points]

    def resume_lines(self) -> list[float]:
        return [self._place((x, 0))[0] for x, _ in self.resumed]

    def x_ticks(self) -> list[tuple[float, str]]:
        low, high = self._x_range
        return [(self._place((tick, 0))[0], text) for tick, text in labelled(round_numbers(low, high, 5))]

    def y_ticks(self) -> list[tuple[float, str]]:
        low, high = self._y_range
        if self.logarithmic:
            return [(self._place((0, 2.0**power))[1], f"2^{power}") for power in _powers(low, high)]
        return [(self._place((0, tick))[1], text) for tick, text in labelled(round_numbers(low, high, 5))]

    def legend(self) -> list[tuple[str, str]]:
        """(symbol, meaning) of every kind of line and symbol in the chart; the runs' colours are the page's legend."""
        entries = {
            "faint": ("training, epoch means" if self.x_name == "epoch" else "training", "faint"),
            "strong": ("validation", "strong"),
            "dashed": (f"{'/'.join(filter(None, (which.mark for which in SETS)))} validation", "dashed"),
        }
        kinds = ["faint" if curve.faint else "dashed" if curve.dashed else "strong" for curve in self.drawn]
        found = [(symbol, meaning) for kind, (meaning, symbol) in entries.items() if kind in kinds]
        found = found if len(found) > 1 else []
        for symbol, meaning, present in (
            ("diamond", "best validation", any(mark.points for mark in self.best)),
            ("cross", "skipped update", any(mark.points for mark in self.skips)),
            ("dotted", "resumed", bool(self.resumed)),
        ):
            found += [(symbol, meaning)] if present else []
        return found

    def columns(self) -> list[Column]:
        """Strips around the curves' points, or around some of them where they are many."""
        curves = [(curve, thinned(curve.points, MOST_POINTS)) for curve in self.drawn]
        places = sorted({x for _, points in curves for x, _ in points})
        most = max(2, min(MOST_COLUMNS, MOST_VALUES // max(1, len(curves))))
        places = [x for x, _ in thinned([(x, 0.0) for x in places], most)]
        low, high = self._x_range
        borders = [low, *((a + b) / 2 for a, b in pairwise(places)), high]
        events = [(x, Value(label, "")) for x, label in self.resumed]
        for mark in (*self.best, *self.skips):
            events += [(x, Value(mark.label, "", mark.style)) for x, _ in mark.points]
        found = []
        for x, (start, end) in zip(places, pairwise(borders), strict=True):
            values = []
            for curve, points in curves:
                near = [point for point in points if start <= point[0] <= end]
                if near:
                    _, y = min(near, key=lambda point: abs(point[0] - x))
                    values.append(Value(curve.label, short(y), curve.style))
            values += dict.fromkeys(value for at, value in events if start < at <= end)
            share = (end - start) / ((high - low) or 1)
            across = (x - low) / ((high - low) or 1)
            title = f"{self.x_name} {x:,.6g}"
            found.append(Column(round(100 * share, 2), round(100 * across, 2), title, values))
        return found

    def description(self) -> str:
        """Text for readers who cannot see the chart."""
        ends = [f"{curve.label} ends at {short(curve.points[-1][1])}" for curve in self.drawn]
        return f"{self.title}: {'; '.join(ends)}"

    @property
    def _on_these_axes(self) -> list[Curve]:
        return [curve for chart in (self.shared_axes or (self,)) for curve in chart.curves]

    @cached_property
    def _x_range(self) -> tuple[float, float]:
        found = [x for curve in self._on_these_axes for x, _ in curve.points]
        return (min(0.0, *found), max(1.0, *found)) if found else (0.0, 1.0)

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        found = [self._scaled(y) for curve in self._on_these_axes for _, y in curve.points]
        if not found:
            return 0.0, 1.0
        low, high = min(found), max(found)
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
        return (0.0 if 0 <= low < 0.3 * high and not self.logarithmic else low - margin), high + margin

    def _scaled(self, y: float) -> float:
        return math.log2(max(y, 1e-12)) if self.logarithmic else y

    def _place(self, point: tuple[float, float]) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self._x_range, self._y_range
        across = (point[0] - x0) / ((x1 - x0) or 1)
        up = (self._scaled(point[1]) - y0) / ((y1 - y0) or 1)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    def _path(self, points: Points) -> str:
        return "M" + " ".join(f"{x},{y}" for x, y in map(self._place, points))


def thinned(points: Points, most: int) -> Points:
    """About `most` of the points, evenly chosen, always with the last one."""
    step = -(-len(points) // most) if points else 1
    return [point for number, point in enumerate(points) if number % step == 0 or number == len(points) - 1]


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    span = (high - low) or 1
    rough = span / count
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


def _powers(low: float, high: float) -> list[int]:
    first, last = math.ceil(low), math.floor(high)
    return list(range(first, last + 1, max(1, -(-(last - first) // 5))))


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
