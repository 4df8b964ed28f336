"""Read the metrics of a finished run from its folder."""

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
"""A run diverged if the mean of its last losses is above this multiple of that of its first ones, and above noise."""
FEWEST_BATCHES = 3
"""Least number of reported losses in each of these means, which else take a quarter of the reported losses."""


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has reached its end."""
    return is_end(last_line(folder))


def last_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json of a run's last checkpoint; empty if the run has none."""
    root = folder / CHECKPOINTS
    return unchecked_meta(root / (read_index(root)["last"] or "none"))


def metrics_of(folder: Path) -> Metrics:
    """Read the metrics of the finished run in `folder`, as compare.json stores them. Unknown ones are None."""
    about = read_about(folder)
    config = config_of_run(folder)
    history = History.of_run(folder)
    speed = history.images_per_second
    speeds = history.speeds
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    # A run that was resumed with another number of processes accumulates otherwise than its config.yaml says.
    saved = last_meta(folder).get("batch")
    if saved:
        batch = saved["per_process"] * saved["accumulated"] * saved["processes"]
    metrics: Metrics = {
        "precision": about["choices"]["precision"],
        "global_batch": batch,
        "images_per_second": speed,
        # The first and the third of the three quartiles.
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
        metrics[f"last_{PLAIN.prefix}{metric.name}"] = None
        for weights, value in history.last(metric).items():
            metrics[f"last_{weights.prefix}{metric.name}"] = value
    for metric in history.metrics:
        best = history.best(metric)
        if best:
            metrics[f"best_{metric.name}"] = best.value
    metrics |= {
        "seconds": history.seconds,
        "starts": sum(map(is_start, history.lines)),
        "validation_images": about.get("samples", {}).get("val"),
    }
    if config.DATA.GROUP is not None:
        metrics["grouped"] = True
    return metrics | {
        "largest_class_percent": about.get("largest_class_percent"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(history: History, config: Config, largest_class: float | None) -> bool:
    """Whether the loss ended as NaN, or its mean over several batches rose by more than their noise.

    A rise does not count if the metric did not fall and is above guessing: a run that starts at a linear probe begins
    with a low loss, which augmentation alone raises. `largest_class`: percent of the images in the largest class.
    """
    losses = [line["loss"] for line in history.of("train")]
    if losses and losses[-1] is None:
        return True
    metric = metric_named(config.SAVE_BEST_BY)
    guessing = largest_class or 0.0
    if metric is BALANCED:
        guessing = 100 / max(config.MODEL.NUM_CLASSES or 1, 1)
    values = [line[metric.name] for line in history.of("val") if line.get(metric.name) is not None]
    if len(values) > 1 and metric.percent and values[-1] >= values[0] and values[-1] > guessing:
        return False
    logs = [math.log(loss) for loss in losses if loss is not None and loss > 0]
    return _rose(logs or [0.0])


def _rose(logs: Sequence[float]) -> bool:
    """Whether the mean of the last of these logarithms of losses is above that of the first, by DIVERGED and noise."""
    count = max(FEWEST_BATCHES, len(logs) // 4)
    # The noise of one loss is its distance from the middle of its neighbours. So neither a trend is noise, nor, since
    # the last losses are left out, a jump at the end.
    before_end = logs[:-count] if len(logs) > 2 * count - 1 else logs
    distances = []
    for left, middle, right in zip(before_end, before_end[1:], before_end[2:], strict=False):
        distances.append(abs(middle - (left + right) / 2))
    # Three times the noise of the difference of two means over `count` losses, but at most a factor of 3.
    noise = min(3 * statistics.fmean(distances or [0.0]) * math.sqrt(2 / count), math.log(3))
    rise = statistics.fmean(logs[-count:]) - statistics.fmean(logs[:count])
    return rise > max(math.log(DIVERGED), noise)
