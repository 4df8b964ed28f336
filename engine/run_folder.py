"""Makes and locks the folder of a run, and writes config.yaml and run.json into it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from engine.machine.device import Run, describe_devices
from engine.setup import Ready
from models.parts import count_parameters
from utils.config import Config
from utils.config.keys import nested, values_by_key, values_to_keep
from utils.config.kinds import as_yaml
from utils.config.resumed import resumed_run, target_folder
from utils.distributed.world import broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log, log_into
from utils.record.folder_lock import FolderLock
from utils.record.run_folder import (
    ABOUT,
    CONFIG,
    check_output,
    describe_run,
    is_run_folder,
    make_folder,
    missing_from,
    os_errors_as_user_errors,
    read_about,
    write_json,
)
from utils.text import redacted, some_of
from vitamp.checkpoints import CHECKPOINTS, INDEX, checkpoints_in
from vitamp.files import try_to_write, write_atomically
from vitamp.metrics import NO_LABELS


def lock_existing_folder(config: Config, lock: FolderLock) -> None:
    """Lock the run's folder if it exists, and warn of files that the run had written and that are gone.

    It is locked before a checkpoint is looked for, since another run may be writing one.
    """
    target = target_folder(config)
    if target is not None and Path(target).is_dir():
        lock.take(Path(target))
        # Checked again: another run may have begun in the folder before it was locked.
        check_output(target, config.SAVE, resumed_run(config))
        missing = missing_from(Path(target)) if checkpoints_in(Path(target) / CHECKPOINTS) else []
        if missing:
            log.warning("Missing in %s, although the run had written it: %s.", target, some_of(missing))


def make_run_folder(run: Run, kind: str, lock: FolderLock | None = None) -> Path:
    """Make the run's folder on rank 0, and log into it on all ranks. A collective call.

    `kind`: train or eval, for its name. `lock`: takes the folder, in which a training must be alone.
    """
    config = run.config
    world = run.world

    def make() -> str:
        folder = make_folder(target_folder(config), config.SAVE, kind)
        if lock is not None:
            # A folder that existed at the start is locked since then. Another one was empty or missing at the start, so
            # files of a run in it are of a run that began and ended in between.
            is_newly_locked = lock.take(folder)
            if is_newly_locked and is_run_folder(folder):
                raise UserError(f"{folder}: another run has just started in this folder; name another -output.")
            # An existing folder of checkpoints may be on another disk, or no folder: try whether it can be written.
            root = folder / CHECKPOINTS
            if root.exists() or root.is_symlink():
                with os_errors_as_user_errors(root):
                    try_to_write(root / INDEX)
        return str(folder)

    def begin_log() -> None:
        with os_errors_as_user_errors(folder):
            log_into(folder, world.rank)

    folder = Path(broadcast(on_rank_0(world, make), world))
    on_every_rank(world, begin_log)
    return folder


def largest_class(ready: Ready) -> float | None:
    """Return the percentage of validation images in the most frequent class; None without labels, or with several.

    It is the accuracy of always guessing that class.
    """
    labels = ready.val_set.sample_labels()
    if ready.task.kind == NO_LABELS or labels.ndim > 1 or not len(labels):
        return None
    return 100 * float(np.bincount(labels).max()) / len(labels)


def write_run_files(run: Run, ready: Ready, folder: Path) -> None:
    """Write config.yaml and run.json into the run's folder on rank 0."""
    config = run.config
    if not run.world.first:
        return

    # The settings come first: a run that is killed from here on resumes with them.
    with os_errors_as_user_errors(folder):
        # A training leaves out settings of one start, such as -resume: a new run with this config.yaml would otherwise
        # continue the old one. Settings that this number of processes has changed are written as given.
        values = values_by_key(config) if config.EVAL else values_to_keep(config)
        write_atomically(folder / CONFIG, redacted(as_yaml(nested({**values, **run.asked}))))

    about = _content_of_run_json(run, ready)
    with os_errors_as_user_errors(folder):
        # A resumed run keeps the command and time of its first start. If run.json is gone or damaged, it has none.
        with suppress(UserError):
            earlier = read_about(folder)
            about["begun"] = earlier.get("begun", {key: earlier.get(key) for key in ("command", "started")})
        if config.USE:
            from utils.own_code import keep_own_code

            about |= keep_own_code(folder)
        write_json(folder / ABOUT, about)


def _content_of_run_json(run: Run, ready: Ready) -> dict[str, Any]:
    """Describe the devices, choices, data and model of a run, for run.json."""
    world = run.world
    threads = run.threads
    choices = {"why": ready.precision.choice.reason, "threads": threads, "world_size": world.size, **ready.choices}
    if not ready.val_set.in_memory:
        from datasets.decoding import decoder_of_jpeg

        choices["decoder"] = decoder_of_jpeg()
    about = describe_run(describe_devices(run.device, world, threads), choices, run.config.TAG)

    train_set = getattr(ready, "train_set", None)  # an evaluation has none
    splits = {"train": train_set, "val": ready.val_set}
    about["samples"] = {name: len(split) for name, split in splits.items() if split is not None}
    images = None if train_set is None else train_set.single_images()
    if images is not None and images.relabel:
        about["relabel"] = images.relabel
    groups = set(ready.val_set.groups())
    if groups:
        about["val_groups"] = len(groups)
    about["largest_class_percent"] = largest_class(ready)
    parameter_count, trained_count = count_parameters(ready.model)
    about["parameters"] = {"all": parameter_count, "trainable": trained_count}
    return about
