"""Metrics of one run of compare.py, read from its folder: speed, memory, accuracy, health."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from utils.config import config_of_run
from utils.record.history import History
from utils.record.metrics_file import Line, is_end, is_start, last_line, read_lines
from utils.record.run_folder import read_about
from utils.record.weight_sets import PLAIN

Metrics = dict[str, Any]
DIVERGED = 1.1
"""A run diverged if its last losses exceed this multiple of the first; smaller rises may be noise of the batches."""


def is_finished(folder: Path, updates: int | None = None) -> bool:
    """Whether the run ended. `updates`: so far, or further."""
    last = last_line(folder)
    return is_end(last) and (updates is None or last["update"] >= updates)


def fraction_done(folder: Path, epochs: int, updates: int | None) -> float:
    """Progress of a run by its last line; `updates`: TRAIN.MAX_UPDATES."""
    last = last_line(folder)
    if not last:
        return 0.0
    whole = last["epoch"] - (last["event"] not in ("epoch", "val"))
    return min(1.0, max(whole / epochs, last.get("update", 0) / updates if updates else 0.0))


def metrics_of(folder: Path, updates: int | None = None) -> Metrics:
    """Metrics of a finished run, as compare.json holds them. `updates`: only of these first ones."""
    about, config = read_about(folder), config_of_run(folder)
    history = History([line for line in read_lines(folder) if updates is None or line.get("update", 0) <= updates])
    speed, speeds = history.images_per_second, history.speeds
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    return {
        "precision": about["choices"]["precision"],
        "images_per_second": speed,
        "images_per_second_quartiles": statistics.quantiles(speeds, n=4)[::2] if len(speeds) > 3 else None,
        "seconds_per_update": batch / speed if speed else None,
        "seconds_per_epoch": history.seconds_per_epoch,
        "start_up_counted": history.speed_includes_start,
        "peak_memory_gb": history.peak_memory_gb,
        "updates": max((line["update"] for line in history.lines), default=0),
        "skipped": history.skipped,
        "diverged": _diverged(history.of("train")),
        **{
            f"last_{which.prefix}{metric.name}": value
            for metric in history.metrics
            for which, value in {PLAIN: None, **history.last(metric)}.items()
        },
        **{f"best_{metric.name}": best.value for metric in history.metrics if (best := history.best(metric))},
        "seconds": history.seconds,
        "starts": sum(map(is_start, history.lines)),
        "validation_images": about.get("samples", {}).get("val"),
        "largest_class_percent": about.get("largest_class_percent"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(train: list[Line]) -> bool:
    """Whether the loss ended as NaN, or clearly above its start."""
    if not train:
        return False
    first, last = train[0]["loss"], [line["loss"] for line in train[-3:]]
    if last[-1] is None:
        return True
    known = [loss for loss in last if loss is not None]
    return first is not None and statistics.fmean(known) > DIVERGED * first
