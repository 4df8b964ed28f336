"""Metrics of a finished run, read from its folder."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.config import Config, config_of_run
from utils.record.history import History, is_end, is_start, last_line
from utils.record.run_folder import read_about
from vitamp.checkpoints import CHECKPOINTS, read_index
from vitamp.meta import unchecked_meta
from vitamp.metrics import BALANCED, PLAIN, metric_named

Metrics = dict[str, Any]
"""Metrics of a finished run, as compare.json holds them."""
DIVERGED = 1.2
"""A run diverged if the mean of its last losses exceeds this multiple of that of the first, and their noise;"""
FEWEST_BATCHES = 3
"""of so many batches at least, and of a quarter of those that were reported."""


def is_finished(folder: Path) -> bool:
    return is_end(last_line(folder))


def last_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a run's last checkpoint; empty without one."""
    root = folder / CHECKPOINTS
    return unchecked_meta(root / (read_index(root)["last"] or "none"))


def metrics_of(folder: Path) -> Metrics:
    """Metrics of a finished run, as compare.json holds them."""
    about = read_about(folder)
    config = config_of_run(folder)
    history = History.of_run(folder)
    speed = history.images_per_second
    speeds = history.speeds
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    # A run that went on with another number of processes accumulates otherwise than its config.yaml says.
    saved = last_meta(folder).get("batch")
    if saved:
        batch = saved["per_process"] * saved["accumulated"] * saved["processes"]
    found: Metrics = {
        "precision": about["choices"]["precision"],
        "global_batch": batch,
        "images_per_second": speed,
        "images_per_second_quartiles": statistics.quantiles(speeds, n=4)[::2] if len(speeds) > 3 else None,
        "seconds_per_update": batch / speed if speed else None,
        "seconds_per_epoch": history.seconds_per_epoch,
        "start_up_counted": history.speed_includes_start,
        "peak_memory_gb": history.peak_memory_gb,
        "updates": max((line["update"] for line in history.lines), default=0),
        "skipped": history.skipped,
        "diverged": _diverged(history, config, about.get("largest_class_percent")),
    }
    for metric in history.metrics:
        found[f"last_{PLAIN.prefix}{metric.name}"] = None
        for which, value in history.last(metric).items():
            found[f"last_{which.prefix}{metric.name}"] = value
    for metric in history.metrics:
        best = history.best(metric)
        if best:
            found[f"best_{metric.name}"] = best.value
    found |= {
        "seconds": history.seconds,
        "starts": sum(map(is_start, history.lines)),
        "validation_images": about.get("samples", {}).get("val"),
    }
    if config.DATA.GROUP is not None:
        found["grouped"] = True
    return found | {
        "largest_class_percent": about.get("largest_class_percent"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(history: History, config: Config, largest_class: float | None) -> bool:
    """Whether the loss ended as NaN, or its mean over several batches rose by more than their noise.

    Not of a run whose metric did not fall and is above guessing: from a probe, augmentation alone raises the loss.
    """
    losses = [line["loss"] for line in history.of("train")]
    if losses and losses[-1] is None:
        return True
    by = metric_named(config.SAVE_BEST_BY)
    guess = largest_class or 0.0
    if by is BALANCED:
        guess = 100 / max(config.MODEL.NUM_CLASSES or 1, 1)
    values = [line[by.name] for line in history.of("val") if line.get(by.name) is not None]
    if len(values) > 1 and by.percent and values[-1] >= values[0] and values[-1] > guess:
        return False
    logs = [math.log(loss) for loss in losses if loss is not None and loss > 0]
    return _rose(logs or [0.0])


def _rose(logs: Sequence[float]) -> bool:
    """Whether the last of these logarithms of losses are above the first, by DIVERGED and their noise."""
    few = max(FEWEST_BATCHES, len(logs) // 4)
    # How far each is from the middle of its neighbours: a trend is no noise, nor is a jump at the end.
    steady = logs[:-few] if len(logs) > 2 * few - 1 else logs
    apart = []
    for left, one, right in zip(steady, steady[1:], steady[2:], strict=False):
        apart.append(abs(one - (left + right) / 2))
    # Of the difference of two means.
    noise = min(3 * statistics.fmean(apart or [0.0]) * math.sqrt(2 / few), math.log(3))
    rise = statistics.fmean(logs[-few:]) - statistics.fmean(logs[:few])
    return rise > max(math.log(DIVERGED), noise)
