"""What a run of compare.py says of itself, read from its folder: speed, memory, accuracy, health."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tools.common.runs import Lines, best_top1, last_line, perf, read_lines, seconds, warm
from utils.config import load_config

Figures = dict[str, Any]
MUCH_MORE = 1.1
"""Times the first loss: what the last ones are where training diverged; less may be a matter of the batch."""


def is_finished(folder: Path) -> bool:
    last = last_line(folder)
    return last.get("event") == "run" and last.get("what") == "end"


def share_done(folder: Path, epochs: int, updates: int | None) -> float:
    """How much of a run is behind it, by what it told last."""
    last = last_line(folder)
    if not last:
        return 0.0
    whole = last["epoch"] - (last["event"] not in ("epoch", "val"))
    return min(1.0, max(whole / epochs, last.get("update", 0) / updates if updates else 0.0))


def figures_of(folder: Path) -> Figures:
    """Of a run that has ended."""
    lines = read_lines(folder)
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    config = load_config(str(folder / "config.yaml")).config
    train, val = ([line for line in lines if line["event"] == kind] for kind in ("train", "val"))
    rates = warm(lines, "train", "images_per_second")
    epochs = warm(lines, "epoch", "seconds")
    at_once = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * about["choices"]["world_size"]
    middle = statistics.median(rates) if rates else None
    return {
        "precision": about["choices"]["precision"],
        "images_per_second": middle,
        "images_per_second_quartiles": statistics.quantiles(rates, n=4)[::2] if len(rates) > 3 else None,
        "seconds_per_update": at_once / middle if middle else None,
        "seconds_per_epoch": statistics.median(epochs) if epochs else None,
        "start_up_counted": not warm(lines, "train", "images_per_second", strictly=True),
        "peak_memory_gb": max(perf(lines, "train", "peak_memory_gb"), default=None),
        "updates": max((line["update"] for line in lines), default=0),
        "skipped": train[-1]["skipped"] if train else 0,
        "diverged": _diverged(train),
        "last_acc1": val[-1]["acc1"] if val else None,
        "best_acc1": best[0] if (best := best_top1(lines)) else None,
        "last_loss": val[-1]["loss"] if val else None,
        "seconds": seconds(lines),
        "starts": sum(line["event"] == "run" and line["what"] in ("start", "resume") for line in lines),
        "validation_images": about.get("samples", {}).get("val"),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _diverged(train: Lines) -> bool:
    """Whether the loss is no number in the end, or clearly more than it was in the beginning."""
    if not train:
        return False
    first, last = train[0]["loss"], [line["loss"] for line in train[-3:]]
    if last[-1] is None:
        return True
    known = [loss for loss in last if loss is not None]
    return first is not None and statistics.fmean(known) > MUCH_MORE * first
