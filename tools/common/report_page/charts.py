"""scripts/report.py: charts as SVG inside the page. Colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.report.course import EMA_PREFIX, Points
from tools.common.report_page.runs import Run

COLOURS = 8
MOST_POINTS = 300
"""Of a line; more would be seen by nobody."""
WIDTH, HEIGHT = 360, 220
MOST_SIDE_BY_SIDE = 6
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 36


@dataclass(frozen=True)
class Curve:
    points: Points
    label: str
    colour: int
    """0 to COLOURS - 1"""
    faint: bool = False
    """Training beside validation: thin and pale"""
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture: the page's template draws what is here."""

    title: str
    curves: list[Curve]
    marks: list[tuple[Points, str, int]] = field(default_factory=list)
    """(where, what it means, colour): crosses"""
    best: list[tuple[Points, str, int]] = field(default_factory=list)
    """The same, of the best validations: diamonds"""
    resumed: list[tuple[float, str]] = field(default_factory=list)
    """(where, which run): upright lines"""
    below: str = "update"
    """What x is"""
    logarithmic: bool = False
    note: str = ""
    beside: Sequence[Chart] = ()
    """Those it stands beside, whose axes it shares"""

    @property
    def empty(self) -> bool:
        return not any(curve.points for curve in self.curves)

    def lines(self) -> list[tuple[Curve, str]]:
        """Each curve as the path of an SVG."""
        return [(curve, self._path(thinned(curve.points))) for curve in self.curves if curve.points]

    def dots(self) -> list[tuple[float, float, Curve, str]]:
        """Where a curve has few points, each by itself: (x, y, curve, what it says)."""
        few = [curve for curve in self.curves if not curve.faint and 0 < len(curve.points) <= 60]
        return [
            (*self._place(point), curve, f"{curve.label}, {self.below} {point[0]:,.6g}: {short(point[1])}")
            for curve in few
            for point in curve.points
        ]

    def crosses(self) -> list[tuple[float, float, int, str]]:
        return [
            (*self._place(point), colour, f"{what}, {self.below} {point[0]:,.6g}")
            for where, what, colour in self.marks
            for point in thinned(where)
        ]

    def diamonds(self) -> list[tuple[float, float, int, str]]:
        return [
            (*self._place(point), colour, f"{what}, {self.below} {point[0]:,.6g}: {short(point[1])}")
            for where, what, colour in self.best
            for point in where
        ]

    def upright(self) -> list[tuple[float, str]]:
        return [(self._place((x, 0))[0], f"{who}: resumed, {self.below} {x:,.6g}") for x, who in self.resumed]

    def x_ticks(self) -> list[tuple[float, str]]:
        low, high = self._x_range
        return [(self._place((tick, 0))[0], text) for tick, text in told(nice(low, high, 5))]

    def y_ticks(self) -> list[tuple[float, str]]:
        low, high = self._y_range
        if self.logarithmic:
            return [(self._place((0, 2.0**power))[1], f"2^{power}") for power in _powers(low, high)]
        return [(self._place((0, tick))[1], text) for tick, text in told(nice(low, high, 5))]

    def words(self) -> str:
        """For those who do not see it."""
        told = [f"{curve.label} ends at {short(curve.points[-1][1])}" for curve in self.curves if curve.points]
        return f"{self.title}: {'; '.join(told)}"

    @property
    def _measured(self) -> list[Curve]:
        return [curve for chart in (self.beside or (self,)) for curve in chart.curves]

    @property
    def _x_range(self) -> tuple[float, float]:
        found = [x for curve in self._measured for x, _ in curve.points]
        return (min(0.0, *found), max(1.0, *found)) if found else (0.0, 1.0)

    @property
    def _y_range(self) -> tuple[float, float]:
        found = [self._scaled(y) for curve in self._measured for _, y in curve.points]
        if not found:
            return 0.0, 1.0
        low, high = min(found), max(found)
        room = (high - low) * 0.06 or max(abs(high) * 0.05, 0.5)
        return (0.0 if 0 <= low < 0.3 * high and not self.logarithmic else low - room), high + room

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

    def _path(self, found: Points) -> str:
        return "M" + " ".join(f"{x},{y}" for x, y in map(self._place, found))


def thinned(found: Points) -> Points:
    """At most MOST_POINTS of them, the last one always."""
    step = -(-len(found) // MOST_POINTS) if found else 1
    return [point for number, point in enumerate(found) if number % step == 0 or number == len(found) - 1]


def nice(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    span = (high - low) or 1
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def told(ticks: list[float]) -> list[tuple[float, str]]:
    """Each with as many digits as tell it from the next one."""
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


def colours_of(runs: Sequence[Run]) -> list[int]:
    """Runs of one precision share a colour where there are several of each, as with several seeds."""
    kinds = list(dict.fromkeys(run.precision for run in runs))
    grouped = 1 < len(kinds) < len(runs)
    return [(kinds.index(run.precision) if grouped else number) % COLOURS for number, run in enumerate(runs)]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Loss, accuracy, speed, and what mixed precision did; those that would be empty are left out."""
    axis = _Axis.of(runs)
    all_of_them = [
        _two_parts("Loss", runs, "loss", axis),
        _two_parts("Accuracy, top-1 (%)", runs, "acc1", axis),
        _trained("Speed (images/s)", runs, "images_per_second", axis),
        _trained("Learning rate", runs, "lr", axis),
        _trained("Gradient norm, unscaled", runs, "grad_norm", axis),
        _scale(runs, axis),
    ]
    return [chart for chart in all_of_them if chart is not None and not chart.empty]


@dataclass(frozen=True)
class _Axis:
    """Epochs, where all runs have whole ones, else updates; and where the runs were resumed."""

    by_epoch: bool
    resumed: list[tuple[float, str]]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Axis:
        by_epoch = all(run.course.by_epoch for run in runs)
        return cls(by_epoch, [(x, run.name) for run in runs for x in run.course.resumes(by_epoch)])

    def chart(self, title: str, curves: list[Curve], **more: Any) -> Chart:
        return Chart(title, curves, resumed=self.resumed, below="epoch" if self.by_epoch else "update", **more)


def side_by_side(runs: Sequence[Run]) -> list[list[Chart]]:
    """A row of losses and one of accuracies, each run by itself on the axes of its row; only of a few runs."""
    if not 1 < len(runs) <= MOST_SIDE_BY_SIDE:
        return []
    by_epoch = _Axis.of(runs).by_epoch
    found = []
    for title, key in (("loss", "loss"), ("top-1 (%)", "acc1")):
        each = [
            _Axis(by_epoch, [(x, run.name) for x in run.course.resumes(by_epoch)]).chart(
                f"{run.name}: {title}", _parts(run, colour, key, by_epoch), best=_best(run, colour, key, by_epoch)
            )
            for run, colour in zip(runs, colours_of(runs), strict=True)
        ]
        found.append([replace(chart, beside=each) for chart in each if not chart.empty])
    return [row for row in found if row]


def _two_parts(title: str, runs: Sequence[Run], key: str, axis: _Axis) -> Chart:
    by_colour = list(zip(runs, colours_of(runs), strict=True))
    curves = [c for run, colour in by_colour for c in _parts(run, colour, key, axis.by_epoch)]
    dashes = any(curve.dashed and curve.points for curve in curves)
    note = f"pale: training{', means of epochs' * axis.by_epoch}; strong: validation"
    note += "; dashed: validation of the EMA" * dashes + "; diamond: best validation"
    best = [mark for run, colour in by_colour for mark in _best(run, colour, key, axis.by_epoch)]
    return axis.chart(title, curves, best=best, note=note)


def _best(run: Run, colour: int, key: str, by_epoch: bool) -> list[tuple[Points, str, int]]:
    return [(run.course.best(key, by_epoch), f"{run.name}, best validation", colour)]


def _parts(run: Run, colour: int, key: str, by_epoch: bool) -> list[Curve]:
    course = run.course
    ema = course.points("val", f"{EMA_PREFIX}{key}", by_epoch)
    return [
        Curve(course.trained(key, by_epoch), f"{run.name}, training", colour, faint=True),
        Curve(course.points("val", key, by_epoch), f"{run.name}, validation", colour),
        Curve(ema, f"{run.name}, validation of the EMA", colour, dashed=True),
    ]


def _trained(title: str, runs: Sequence[Run], key: str, axis: _Axis) -> Chart:
    curves = [
        Curve(run.course.points("train", key, axis.by_epoch), run.name, colour)
        for run, colour in zip(runs, colours_of(runs), strict=True)
    ]
    return axis.chart(title, curves)


def _scale(runs: Sequence[Run], axis: _Axis) -> Chart | None:
    """Only where a loss was scaled: without scaling it is 1 all the time."""
    curves, marks = [], []
    for run, colour in zip(runs, colours_of(runs), strict=True):
        found = run.course.points("train", "scale", axis.by_epoch)
        if any(scale != 1 for _, scale in found):
            curves.append(Curve(found, run.name, colour))
            marks.append((run.course.skips(axis.by_epoch), f"{run.name}: updates skipped", colour))
    if not curves:
        return None
    return axis.chart("Loss scale", curves, marks=marks, logarithmic=True, note="crosses: updates were skipped")
