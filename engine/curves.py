"""curves.png: what happened, at a glance, drawn from metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from utils.config import Config
from utils.line_file import json_lines
from utils.log import log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = list[dict[str, Any]]
MOST_POINTS = 2000
"""Of a curve; more are drawn for nobody and take their time."""
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
    """Loss, accuracy, learning rate, gradient norm, loss scale with skips, speed; None if there is nothing to draw."""
    lines = json_lines(folder / "metrics.jsonl")
    train, val = ([line for line in lines if line["event"] == kind] for kind in ("train", "val"))
    if not train and not val:
        return None
    import matplotlib  # slow to import, and training is not to wait for it before its first update

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    figure.suptitle(title, parse_math=False)  # a TAG may have dollars in it
    (loss, accuracy, rate), (norm, scale, speed) = axes
    _curve(loss, train, "loss", "train")
    _curve(loss, val, "loss", "validation")
    _curve(loss, val, "ema_loss", "validation (EMA)")
    _finish(loss, "loss")
    _curve(accuracy, train, "acc1", "train top-1")
    _curve(accuracy, val, "acc1", "validation top-1")
    _curve(accuracy, val, "ema_acc1", "validation top-1 (EMA)")
    _finish(accuracy, "accuracy (%)")
    _curve(rate, train, "lr", "learning rate")
    _finish(rate, "learning rate")
    _curve(norm, train, "grad_norm", "gradient norm, unscaled")
    _finish(norm, "gradient norm")
    if any(line["scale"] not in (None, 1) for line in train):
        _curve(scale, train, "scale", "loss scale")
        _mark_skips(scale, train)
        scale.set_yscale("log", base=2)
        _finish(scale, "loss scale")
    else:  # the loss is not scaled
        _curve(scale, [{**line, **line["perf"]} for line in train], "data_wait_percent", "waiting for data")
        _finish(scale, "time (%)")
    _curve(speed, [{**line, **line["perf"]} for line in train], "images_per_second", "images/s")
    _finish(speed, "images/s")
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


def _curve(axes: Axes, lines: Lines, key: str, label: str) -> None:
    points = [(line["update"], line[key]) for line in lines if line.get(key) is not None]
    if len(points) > MOST_POINTS:
        points = [*points[:: -(-len(points) // MOST_POINTS)], points[-1]]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.4, marker="." if len(points) < 3 else None)


def _mark_skips(axes: Axes, train: Lines) -> None:
    """A mark where updates were skipped since the line before."""
    before = 0
    where: list[tuple[int, float]] = []
    for line in train:
        if line["skipped"] > before and line["scale"] is not None:
            where.append((line["update"], line["scale"]))
        before = line["skipped"]
    if where:
        axes.plot(*zip(*where, strict=True), "x", color="tab:red", label="updates skipped")


def _finish(axes: Axes, name: str) -> None:
    axes.set_xlabel("update")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
