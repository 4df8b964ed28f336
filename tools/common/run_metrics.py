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
    # The last checkpoint knows the batch better than config.yaml: a run that was resumed with another number of
    # processes accumulates another number of batches, so that its global batch stays.
    saved = last_meta(folder).get("batch")
    if saved:
        batch = saved["per_process"] * saved["accumulated"] * saved["processes"]
    metrics: Metrics = {
        "precision": about["choices"]["precision"],
        "global_batch": batch,
        "images_per_second": speed,
        "images_per_second_quartiles": _outer_quartiles(speeds) if len(speeds) > 3 else None,
        "seconds_per_update": batch / speed if speed else None,
        "seconds_per_epoch": history.seconds_per_epoch,
        "start_up_counted": history.speed_includes_start,
        "peak_memory_gb": history.peak_memory_gb,
        "updates": max((line["update"] for line in history.lines), default=0),
        "skipped": history.skipped,
        "diverged": _diverged(history, config, about.get("largest_class_percent")),
    }
    # Each metric of the last validation, by all sets of weights; None if it has none by the plain weights.
    for metric in history.metrics:
        metrics[f"last_{PLAIN.prefix}{metric.name}"] = None
        for weights, value in history.last(metric).items():
            metrics[f"last_{weights.prefix}{metric.name}"] = value
    # Each metric of the best validation, whichever weights reached it.
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


def _outer_quartiles(speeds: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    first, _median, third = statistics.quantiles(speeds, n=4)
    return [first, third]


def _diverged(history: History, config: Config, largest_class: float | None) -> bool:
    """Whether the loss ended as NaN, or rose from the beginning to the end of the run by more than its noise.

    A rise does not count if validation shows that the model still works: the metric of SAVE_BEST_BY did not fall, and
    is better than that of guessing. So a run that starts at a linear probe has a low loss at first, which augmentation
    alone raises. `largest_class`: percent of the images in the largest class; None if unknown.
    """
    losses = [line["loss"] for line in history.of("train")]
    if losses and losses[-1] is None:  # NaN or infinite, which JSON does not have
        return True

    metric = metric_named(config.SAVE_BEST_BY)
    guessing = largest_class or 0.0  # always guessing the largest class
    if metric is BALANCED:
        guessing = 100 / max(config.MODEL.NUM_CLASSES or 1, 1)
    values = [line[metric.name] for line in history.of("val") if line.get(metric.name) is not None]
    # Metrics in percent are better the higher they are; the loss is not in percent.
    if len(values) > 1 and metric.percent:
        first_value = values[0]
        last_value = values[-1]
        if last_value >= first_value and last_value > guessing:
            return False

    logs = [math.log(loss) for loss in losses if loss is not None and loss > 0]
    return _rose(logs or [0.0])


def _rose(logs: Sequence[float]) -> bool:
    """Whether the last losses of a run are clearly above its first ones, given the logarithms of all losses.

    That is, the mean of the last ones exceeds that of the first ones by more than a factor of DIVERGED, and by more
    than noise.
    """
    count = max(FEWEST_BATCHES, len(logs) // 4)  # number of losses in each of the two means

    # The noise of one loss is its distance from the mean of its two neighbours, which a trend does not change. The last
    # losses are left out, so that a jump at the end, a divergence, is not taken for noise; unless the first and the
    # last losses overlap, because the run has so few.
    before_end = logs[:-count] if len(logs) >= 2 * count else logs
    distances = []
    for left, middle, right in zip(before_end, before_end[1:], before_end[2:], strict=False):
        distances.append(abs(middle - (left + right) / 2))
    noise_of_loss = statistics.fmean(distances or [0.0])

    # The noise of a mean over `count` losses is 1 / sqrt(count) of that, and of the difference of two means sqrt(2)
    # times as much. A rise must be three times as large; a rise by a factor of 3 is always enough.
    least_rise_by_noise = min(3 * noise_of_loss * math.sqrt(2 / count), math.log(3))
    rise = statistics.fmean(logs[-count:]) - statistics.fmean(logs[:count])
    return rise > max(math.log(DIVERGED), least_rise_by_noise)
