"""Charts of a report: which curves of the runs are drawn, and in which style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.common.comparison.of_runs import PAIRED_BY, PLACES
from tools.common.report_page.charts import HUES, SHADES, Chart, Curve, Mark, Style
from tools.common.report_page.runs import Run, differing_settings, metrics_of
from utils.record.tasks import LOSS, TASKS
from utils.record.weight_sets import SETS

MOST_SIDE_BY_SIDE = 6


def styles_of(runs: Sequence[Run]) -> list[Style]:
    """One hue per run, or, where settings or a precision have several runs (seeds), one hue for these, in shades."""
    by_precision: list[tuple[str, ...]] = [(run.precision,) for run in runs]
    for groups in (_settings_of(runs), by_precision):
        order = list(dict.fromkeys(groups))
        if 1 < len(order) < len(runs):
            places = [(order.index(group), groups[:number].count(group)) for number, group in enumerate(groups)]
            return [Style(hue % HUES, shade % SHADES) for hue, shade in places]
    return [Style(number % HUES, number // HUES % SHADES) for number in range(len(runs))]


def _settings_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Precision of each run, and the settings in which it differs from others, without seed and fold."""
    different = [texts for key, texts in differing_settings(runs) if key not in (*PAIRED_BY, *PLACES)]
    return list(zip([run.precision for run in runs], *different, strict=True))


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Charts of all runs: loss, accuracy, speed, learning rate, gradient norm, loss scale. Empty ones are left out."""
    axis = _Axis.of(runs)
    found = [
        *(_training_and_validation(metric.title, axis, metric.name) for metric in metrics_of(runs) if metric.title),
        _training("Speed (images/s)", axis, "images_per_second"),
        _training("Learning rate", axis, "lr"),
        _training("Gradient norm, unscaled", axis, "grad_norm"),
        _loss_scale(axis),
    ]
    return [chart for chart in found if not chart.empty]


def side_by_side(runs: Sequence[Run]) -> list[list[Chart]]:
    """A row of losses and a row of accuracies, one chart per run, on shared axes. Nothing for many runs."""
    if not 1 < len(runs) <= MOST_SIDE_BY_SIDE:
        return []
    together = _Axis.of(runs)
    rows = []
    for metric in (LOSS, *(kind.best for kind in TASKS)):
        row = []
        for run, style in together.runs:
            alone = _Axis([(run, style)], together.by_epoch)
            row.append(_training_and_validation(f"{run.name}: {metric.heading}", alone, metric.name))
        rows.append([replace(chart, shared_axes=row) for chart in row if not chart.empty])
    return [row for row in rows if row]


@dataclass(frozen=True)
class _Axis:
    """Runs in one chart, and whether its x axis counts epochs or updates."""

    runs: list[tuple[Run, Style]]
    by_epoch: bool

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Axis:
        """Epochs if every run has whole ones, else updates."""
        return cls(list(zip(runs, styles_of(runs), strict=True)), all(run.history.by_epoch for run in runs))

    def label(self, run: Run, what: str) -> str:
        """Name of the run, where there are several, and of the curve."""
        return f"{run.name}, {what}" if len(self.runs) > 1 else what

    def chart(self, title: str, curves: list[Curve], **more: Any) -> Chart:
        resumed = [(x, self.label(run, "resumed")) for run, _ in self.runs for x in run.history.resumes(self.by_epoch)]
        return Chart(title, curves, resumed=resumed, x_name="epoch" if self.by_epoch else "update", **more)


def _training_and_validation(title: str, axis: _Axis, key: str) -> Chart:
    curves, best = [], []
    for run, style in axis.runs:
        history = run.history
        curves.append(Curve(history.trained(key, axis.by_epoch), axis.label(run, "training"), style, faint=True))
        for which in SETS:
            points = history.points("val", f"{which.prefix}{key}", axis.by_epoch)
            curves.append(Curve(points, axis.label(run, which.marked("validation")), style, dashed=bool(which.mark)))
        best.append(
            Mark(history.best_point(key, run.deciding, axis.by_epoch), axis.label(run, "best validation"), style)
        )
    return axis.chart(title, curves, best=best)


def _training(title: str, axis: _Axis, key: str) -> Chart:
    curves = [Curve(run.history.points("train", key, axis.by_epoch), run.name, style) for run, style in axis.runs]
    return axis.chart(title, curves)


def _loss_scale(axis: _Axis) -> Chart:
    """Loss scale of the runs that scale the loss: without scaling it is always 1."""
    curves, skips = [], []
    for run, style in axis.runs:
        points = run.history.points("train", "scale", axis.by_epoch)
        if any(scale != 1 for _, scale in points):
            curves.append(Curve(points, run.name, style))
            skips.append(Mark(run.history.skips(axis.by_epoch), axis.label(run, "update skipped"), style))
    return axis.chart("Loss scale", curves, skips=skips, logarithmic=True)
