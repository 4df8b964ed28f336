"""Draws curves.png: a run's metrics, read from metrics.jsonl."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from utils.config import Config
from utils.log import warn_once
from utils.record.history import History, Points
from vitamp.files import write_atomically
from vitamp.metrics import LOSS, PLAIN, SETS, TOP1, Metric, metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 2000
"""Per curve; more cannot be seen, and take time to draw."""
FEW_POINTS = 60
"""A curve of fewer points has a marker at each."""
TIME_FRACTION = 0.03
"""Drawing takes at most this fraction of the time since the last drawing, so that short epochs do not wait for it."""
FIRST_SECONDS = 0.5
"""Expected duration of the first drawing."""
FURTHER_COLOURS = ("tab:green", "tab:purple", "tab:olive", "tab:cyan")
"""Colours of further metrics in the plot of accuracy"""


def title_of(config: Config, precision: str, amp: bool) -> str:
    """Name a run by its tag, model, data and precision: 'vit_digits on digits, AMP bf16'."""
    precision_words = f"AMP {precision}" if amp else f"{precision}, no AMP"
    title = f"{config.MODEL.NAME} on {config.DATA.DATASET}, {precision_words}"
    return f"{config.TAG}: {title}" if config.TAG else title


class Curves:
    """Draws the curves after an epoch, unless they were drawn so recently that it would cost noticeable time."""

    def __init__(self, folder: Path, by: str) -> None:
        """`by`: SAVE_BEST_BY."""
        self._folder = folder
        self._by = by
        self._last_drawn = perf_counter()
        self._seconds_to_draw = FIRST_SECONDS

    def draw(self, title: str, force: bool = False) -> None:
        """Draw the curves, if enough time has passed, or with `force`. A failure causes only a warning.

        Enough time has passed if drawing takes at most TIME_FRACTION of it.
        """
        began = perf_counter()
        seconds_since = began - self._last_drawn
        if force or self._seconds_to_draw <= TIME_FRACTION * seconds_since:
            try:
                draw_curves(self._folder, title, metric_named(self._by))
            except Exception as error:  # of matplotlib, its fonts, or the disk: no picture is worth a run
                reason = f"{type(error).__name__}: {error}"
                warn_once(f"{self._folder / 'curves.png'} cannot be drawn ({reason}); training continues.")
            self._last_drawn = perf_counter()
            self._seconds_to_draw = self._last_drawn - began


def draw_curves(folder: Path, title: str, by: Metric = TOP1) -> Path | None:
    """Draw loss, accuracy, learning rate, gradient norm, loss scale with skipped updates, and speed.

    The horizontal axis has epochs, or updates until the first epoch is complete. `by`: the metric that decides which
    validation is marked as the best. Returns the path of the picture; None if there is nothing to draw.
    """
    history = History.of_run(folder)
    train = history.of("train")
    if not train and not history.of("val"):
        return None
    import matplotlib  # here, since it is slow to import and would delay the first update

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Six plots. Without a loss scale, the place of its plot is free for the time.
    figure, axes = plt.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    figure.suptitle(title, parse_math=False)  # a TAG may contain dollar signs
    (loss, accuracy, rate), (norm, scale_or_time, speed) = axes
    _train_and_validation(loss, history, LOSS.name, by)
    _train_and_validation(accuracy, history, history.task.best.name, by)

    # In the plot of accuracy, also the metric of SAVE_BEST_BY and those that the run asks for, dashed for the EMA.
    further_metrics = {metric for metric in history.metrics if metric.beside} | {by}
    further_metrics -= {LOSS, history.task.best}
    for metric, colour in zip(sorted(further_metrics), itertools.cycle(FURTHER_COLOURS), strict=False):
        for weight_set in SETS:
            points = history.points("val", f"{weight_set.prefix}{metric.name}")
            style = "-" if weight_set == PLAIN else "--"
            _curve(accuracy, points, f"validation, {weight_set.marked(metric.words)}", color=colour, linestyle=style)

    _curve(rate, history.points("train", "lr"), "learning rate")
    _curve(norm, history.points("train", "grad_norm"), "gradient norm, unscaled")
    has_loss_scale = any(line["scale"] not in (None, 1) for line in train)
    if has_loss_scale:
        scale_or_time_name = "loss scale"
        _curve(scale_or_time, history.points("train", "scale"), "loss scale")
        _plot(scale_or_time, history.skips(), "x", color="tab:red", label="updates skipped")
        scale_or_time.set_yscale("log", base=2)
    else:
        scale_or_time_name = "time (%)"
        _curve(scale_or_time, history.points("train", "data_wait_percent"), "waiting for data")
    _curve(speed, history.points("train", "images_per_second"), "images/s")

    # Axes, grid and legend of each plot, and lines where the run was resumed.
    names = ("loss", history.task.axis, "learning rate", "gradient norm", scale_or_time_name, "images/s")
    for plot, name in zip((loss, accuracy, rate, norm, scale_or_time, speed), names, strict=True):
        for number, position in enumerate(history.resumes()):
            label = "" if number else "resumed"  # once in the legend
            plot.axvline(position, color="tab:gray", linestyle=":", linewidth=1, label=label)
        plot.set_xlabel("epoch" if history.by_epoch else "update")
        plot.set_ylabel(name)
        plot.grid(alpha=0.3)
        if plot.lines:
            plot.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    path = folder / "curves.png"
    write_atomically(path, picture.getvalue())
    return path


def _train_and_validation(axes: Axes, history: History, key: str, by: Metric) -> None:
    """Draw a metric in training and in the validations of each set of weights, and mark the best validation.

    Line styles and words are those of the report. `key`: name of the metric. `by`: the metric that decides which
    validation is the best.
    """
    means = ", means of epochs" if history.by_epoch else ""
    _curve(axes, history.trained(key), f"training{means}", alpha=0.45, linewidth=1)
    for weight_set in SETS:
        points = history.points("val", f"{weight_set.prefix}{key}")
        if weight_set == PLAIN:
            _curve(axes, points, "validation")
        else:
            _curve(axes, points, f"validation of {weight_set.words}", linestyle="--")
    _plot(axes, history.best_point(key, by), "D", color="tab:red", markersize=6, label="best validation")


def _curve(axes: Axes, points: Points, label: str, **style: Any) -> None:
    """Draw a line through the points, if there are any. Of very many, only some are drawn, and the last one."""
    if len(points) > MOST_POINTS:
        every = math.ceil(len(points) / MOST_POINTS)
        points = points[::every] + points[-1:]
    if points:
        marker = "." if len(points) < FEW_POINTS else None
        x, y = zip(*points, strict=True)
        axes.plot(x, y, label=label, **{"color": "tab:blue", "linewidth": 1.4, "marker": marker, **style})


def _plot(axes: Axes, points: Points, marker: str, **style: Any) -> None:
    """Draw markers at the points, if there are any."""
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker, **style)
