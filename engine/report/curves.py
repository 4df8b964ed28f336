"""curves.png: what happened, at a glance, drawn from metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.report.course import EMA_PREFIX, Course, Points
from utils.config import Config
from utils.line_file import read_json_lines
from utils.log import log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 2000
"""Of a curve; more are drawn for nobody and take their time."""
FEW = 60
"""Points that are marked each."""
SHARE = 0.03
"""Of the time since the last drawing that the next may take: short epochs are not to wait for their picture."""
SECONDS = 0.5
"""That the first drawing is expected to take."""


def title_of(config: Config, precision: str, amp: bool) -> str:
    """What the run is, and in which precision: 'vit_digits on digits, AMP bf16'."""
    what = f"{config.MODEL.NAME} on {config.DATA.DATASET}, {f'AMP {precision}' if amp else f'{precision}, no AMP'}"
    return f"{config.TAG}: {what}" if config.TAG else what


class Curves:
    """Draws after each epoch, as far as that costs next to nothing beside training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drawn, self._took = perf_counter(), SECONDS

    def draw(self, title: str, force: bool = False) -> None:
        """`force`: however long it takes."""
        began = perf_counter()
        if force or self._took <= SHARE * (began - self._drawn):
            draw_curves(self._folder, title)
            self._drawn = perf_counter()
            self._took = self._drawn - began


def draw_curves(folder: Path, title: str) -> Path | None:
    """Loss and accuracy by epoch means, learning rate, gradient norm, loss scale with skips, speed.

    Over epochs, or over updates until the first epoch is whole. None if there is nothing to draw.
    """
    course = Course(read_json_lines(folder / "metrics.jsonl"))
    train = course.of("train")
    if not train and not course.of("val"):
        return None
    import matplotlib  # slow to import, and training is not to wait for it before its first update

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    figure.suptitle(title, parse_math=False)  # a TAG may have dollars in it
    (loss, accuracy, rate), (norm, scale, speed) = axes
    _train_and_validation(loss, course, "loss", "")
    _finish(loss, course, "loss")
    _train_and_validation(accuracy, course, "acc1", " top-1")
    _finish(accuracy, course, "accuracy (%)")
    _curve(rate, course.points("train", "lr"), "learning rate")
    _finish(rate, course, "learning rate")
    _curve(norm, course.points("train", "grad_norm"), "gradient norm, unscaled")
    _finish(norm, course, "gradient norm")
    if any(line["scale"] not in (None, 1) for line in train):
        _curve(scale, course.points("train", "scale"), "loss scale")
        if skips := course.skips():
            scale.plot(*zip(*skips, strict=True), "x", color="tab:red", label="updates skipped")
        scale.set_yscale("log", base=2)
        _finish(scale, course, "loss scale")
    else:  # the loss is not scaled
        _curve(scale, course.points("train", "data_wait_percent"), "waiting for data")
        _finish(scale, course, "time (%)")
    _curve(speed, course.points("train", "images_per_second"), "images/s")
    _finish(speed, course, "images/s")
    path = folder / "curves.png"
    whole = path.with_name(f".{path.name}.{os.getpid()}")  # whoever is killed here leaves the picture before
    try:
        figure.savefig(whole, dpi=110, format="png")
        whole.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            whole.unlink(missing_ok=True)
        _tell_once(path, str(error.strerror))
    plt.close(figure)
    return path


@cache
def _tell_once(path: Path, reason: str) -> None:
    log.warning("%s cannot be written (%s); training goes on.", path, reason)


def _train_and_validation(axes: Axes, course: Course, key: str, what: str) -> None:
    """Training pale and validation strong, as in the report."""
    _curve(axes, course.trained(key), f"train{what}", alpha=0.5)
    _curve(axes, course.points("val", key), f"validation{what}", color="tab:blue")
    _curve(axes, course.points("val", f"{EMA_PREFIX}{key}"), f"validation{what} (EMA)", linestyle="--")
    if best := course.best(key):
        axes.plot(*zip(*best, strict=True), "*", color="tab:red", markersize=11, label="best validation")


def _curve(axes: Axes, points: Points, label: str, **look: Any) -> None:
    if len(points) > MOST_POINTS:
        points = [*points[:: -(-len(points) // MOST_POINTS)], points[-1]]
    if points:
        look = {"color": "tab:blue", "linewidth": 1.4, "marker": "." if len(points) < FEW else None, **look}
        axes.plot(*zip(*points, strict=True), label=label, **look)


def _finish(axes: Axes, course: Course, name: str) -> None:
    for number, place in enumerate(course.resumes()):
        axes.axvline(place, color="tab:gray", linestyle=":", linewidth=1, label="" if number else "resumed")
    axes.set_xlabel("epoch" if course.by_epoch else "update")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
