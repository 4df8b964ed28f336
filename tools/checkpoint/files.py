"""scripts/checkpoint.py list and verify."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.find import OtherVersion, resumable
from engine.checkpoint.host_copy import size_words
from tools.common.turns import progress
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log
from utils.text import aligned, counted
from vitamp.checkpoints import META, checkpoints_at, inspect, read_index
from vitamp.metrics import LOSS, SETS, Metric, task_of


def list_checkpoints(path: Path) -> int:
    """Log a table of the checkpoints in `path`."""
    folders = checkpoints_at(path)
    index = read_index(folders[0].parent)
    best = task_of(_metrics(folder) for folder in folders).best
    shown = {LOSS.words: (LOSS.name, LOSS)}
    shown |= {which.marked(best.words): (which.prefix + best.name, best) for which in SETS}
    columns = ["checkpoint", "epoch", "update", *shown, "size", "written", ""]
    rows = [
        _row(folder, [*shown.values()], [name for name in ("last", "best") if index.get(name) == folder.name])
        for folder in folders
    ]
    for line in aligned([columns, *rows]):
        log.info("%s", line)
    total = sum(_size(folder) for folder in folders)
    log.info("%s, %s", counted(len(folders), "checkpoint"), size_words(total))
    return EXIT_DONE


def _metrics(folder: Path) -> dict[str, float | None]:
    try:
        return inspect(folder).meta.get("metrics") or {}
    except UserError:  # its row says why
        return {}


def _row(folder: Path, shown: Sequence[tuple[str, Metric]], marks: list[str]) -> tuple[str, ...]:
    try:
        meta = inspect(folder).meta
    except UserError as error:
        reason = str(error).removeprefix(f"{folder}: ")
        return (folder.name, *["-"] * (2 + len(shown)), size_words(_size(folder)), "-", reason)
    metrics = meta.get("metrics", {})
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / META).stat().st_mtime))
    epoch = f"{meta['epoch']}" if meta.get("epoch_finished") else f"in {meta['epoch']}"
    return (
        folder.name,
        epoch,
        f"{meta.get('update', '-')}",
        *(metric.number_in_table(metrics[key]) if metrics.get(key) is not None else "-" for key, metric in shown),
        size_words(_size(folder)),
        written,
        ", ".join(marks),
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def verify_checkpoints(paths: list[Path]) -> int:
    """Verify every checkpoint, also after a damaged one. Exit code 1 if any is damaged."""
    damaged = 0
    for folder in progress([folder for path in paths for folder in checkpoints_at(path)], "checkpoints"):
        began = time.perf_counter()
        try:
            resumable(inspect(folder))
        except OtherVersion as error:
            log.info("%s", error)
        except UserError as error:
            log.error("%s", error)
            damaged += 1
            continue
        log.info("%s: good, %s in %.1f s", folder, size_words(_size(folder)), time.perf_counter() - began)
    return EXIT_FAILED if damaged else EXIT_DONE
