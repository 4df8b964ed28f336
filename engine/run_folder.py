"""Folder of a run: made, locked, and described by config.yaml and run.json."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from datasets import decoder_of
from engine.machine.context import Run
from engine.machine.device import describe_devices
from engine.measure.mfu import Peak, as_noted, peak_of
from engine.report.in_context import Guess
from engine.report.tracking import NOTES
from engine.run_lock import FolderLock
from engine.setup import Ready
from models import count_parameters
from utils.config import Config, to_yaml
from utils.distributed.world import broadcast, on_rank_0
from utils.errors import UserError
from utils.files import kind_of_path, try_to_write, write_atomically
from utils.log import log, log_into
from utils.passwords import redacted
from utils.record.base import BASE
from utils.record.checkpoints import INDEX
from utils.record.metrics_file import METRICS
from utils.record.resumed_run import resumed_run, target_folder
from utils.record.run_folder import (
    ABOUT,
    CHECKPOINTS,
    CONFIG,
    DATA,
    check_output,
    describe_run,
    is_run_folder,
    make_folder,
    os_errors_as_user_errors,
    write_json,
)
from utils.record.tasks import NO_LABELS
from utils.terminal import DETAIL

WRITTEN_WHOLE = ("broken.txt", "curves.png", INDEX, BASE, CONFIG, ABOUT, DATA, METRICS, *NOTES.values())
"""Files of a run that are named .NAME.NUMBER until they are complete."""


def lock_existing_folder(config: Config, lock: FolderLock) -> None:
    """Lock the run's folder if it exists. Done before a checkpoint is looked for: another run may be writing one."""
    target = target_folder(config)
    if target is not None and Path(target).is_dir():
        lock.take(Path(target))
        check_output(target, config.SAVE, resumed_run(config))


def make_run_folder(run: Run, kind: str, lock: FolderLock | None = None) -> Path:
    """Make the folder on rank 0, and log into it on all ranks. `kind`: train or eval, for its name."""

    config, world = run.config, run.world

    def make() -> str:
        folder = make_folder(target_folder(config), config.SAVE, kind)
        if lock is not None and lock.take(folder) and is_run_folder(folder):
            raise UserError(f"{folder}: another run has just started in this folder; name another -output.")
        if lock is not None:  # no run is alive in this folder
            _remove_unfinished(folder)
            _check_checkpoints(folder / CHECKPOINTS)
        return str(folder)

    folder = Path(broadcast(on_rank_0(world, make), world))
    with os_errors_as_user_errors(folder):
        log_into(folder, world.rank)
    return folder


def _check_checkpoints(root: Path) -> None:
    """Raise UserError if checkpoints cannot be written into an existing folder: it may be on another disk."""
    if root.is_dir():
        with os_errors_as_user_errors(root):
            try_to_write(root / INDEX)
    elif root.exists() or root.is_symlink():
        what = kind_of_path(root) or f"a link to {os.readlink(root)}, which does not exist"
        raise UserError(f"{root}: is {what}, so no checkpoint can be saved. Fix this, or choose another -output.")


def _remove_unfinished(folder: Path) -> None:
    """Remove files that a killed run was still writing."""
    for path in (*folder.glob(".*"), *(folder / CHECKPOINTS).glob(".*")):
        name, _, number = path.name[1:].rpartition(".")
        if name in WRITTEN_WHOLE and number.isdecimal():
            with contextlib.suppress(OSError):
                path.unlink()


def largest_class(ready: Ready) -> Guess | None:
    """Always guessing the most frequent class of the validation split; None without labels, or with several."""
    labels = ready.val_set.sample_labels()
    if ready.task.kind == NO_LABELS or labels is None or labels.ndim > 1 or not len(labels):
        return None
    counts, names = np.bincount(labels), ready.val_set.classes
    label = int(counts.argmax())
    return Guess(names[label] if names else f"class {label}", 100 * float(counts[label]) / len(labels))


def write_run_files(run: Run, ready: Ready, folder: Path) -> Peak | None:
    """Write config.yaml and run.json. Returns the peak that MFU is relative to, if it is known."""
    config, world, threads = run.config, run.world, run.threads
    if not world.first:
        return None
    with os_errors_as_user_errors(folder):  # first: a run that is killed from here on resumes with these settings
        write_atomically(folder / CONFIG, redacted(to_yaml(config)))
    peak = peak_of(ready.precision)
    if peak is not None and not config.EVAL:
        log.info(peak.words(), extra=DETAIL)
    choices = {
        "precision": ready.precision.name,
        "why": ready.precision.choice.reason,
        "threads": threads,
        "world_size": world.size,
        "decoder": decoder_of(config.DATA),
        **ready.choices,
    }
    about = describe_run(describe_devices(run.device, world, threads), choices, config.TAG) | as_noted(peak)
    splits = {"train": getattr(ready, "train_set", None), "val": ready.val_set}
    about["samples"] = {name: len(split) for name, split in splits.items() if split is not None}
    guess = largest_class(ready)
    about["largest_class_percent"] = guess and guess.percent
    about["parameters"] = dict(zip(("all", "trainable"), count_parameters(ready.model), strict=True))
    with os_errors_as_user_errors(folder):
        if config.USE:
            from utils.record.own_code import keep_own_code

            about |= keep_own_code(folder)
        write_json(folder / ABOUT, about)
    return peak
