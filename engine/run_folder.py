"""The folder of a run: locked, made, and described by config.yaml and run.json."""

from contextlib import suppress
from pathlib import Path

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
    """Lock the run's folder if it exists. Done before a checkpoint is looked for: another run may be writing one."""
    target = target_folder(config)
    if target is not None and Path(target).is_dir():
        lock.take(Path(target))
        check_output(target, config.SAVE, resumed_run(config))
        gone = missing_from(Path(target)) if checkpoints_in(Path(target) / CHECKPOINTS) else []
        if gone:
            log.warning("Missing in %s, although the run had written it: %s.", target, some_of(gone))


def make_run_folder(run: Run, kind: str, lock: FolderLock | None = None) -> Path:
    """Make the folder on rank 0, and log into it on all ranks. `kind`: train or eval, for its name."""

    config = run.config
    world = run.world

    def make() -> str:
        folder = make_folder(target_folder(config), config.SAVE, kind)
        if lock is not None and lock.take(folder) and is_run_folder(folder):
            raise UserError(f"{folder}: another run has just started in this folder; name another -output.")
        if lock is not None:  # no run is alive in this folder
            # An existing folder of checkpoints may be on another disk, or something else: can they be written?
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
    """Percent of the validation images in the most frequent class; None without labels, or with several."""
    labels = ready.val_set.sample_labels()
    if ready.task.kind == NO_LABELS or labels.ndim > 1 or not len(labels):
        return None
    return 100 * float(np.bincount(labels).max()) / len(labels)


def write_run_files(run: Run, ready: Ready, folder: Path) -> None:
    """Write config.yaml and run.json."""
    config = run.config
    world = run.world
    threads = run.threads
    if not world.first:
        return
    with os_errors_as_user_errors(folder):  # first: a run that is killed from here on resumes with these settings
        # What is of this start alone would let a new run with these settings continue this one.
        values = values_by_key(config) if config.EVAL else values_to_keep(config)
        write_atomically(folder / CONFIG, redacted(as_yaml(nested({**values, **run.asked}))))
    choices = {"why": ready.precision.choice.reason, "threads": threads, "world_size": world.size, **ready.choices}
    if not ready.val_set.in_memory:
        from datasets.decoding import decoder_of_jpeg

        choices["decoder"] = decoder_of_jpeg()
    about = describe_run(describe_devices(run.device, world, threads), choices, config.TAG)
    train_set = getattr(ready, "train_set", None)
    splits = {"train": train_set, "val": ready.val_set}
    about["samples"] = {name: len(split) for name, split in splits.items() if split is not None}
    images = None if train_set is None else train_set.single_images()
    if images is not None and images.relabel:
        about["relabel"] = images.relabel
    groups = set(ready.val_set.groups())
    if groups:
        about["val_groups"] = len(groups)
    about["largest_class_percent"] = largest_class(ready)
    every, trained = count_parameters(ready.model)
    about["parameters"] = {"all": every, "trainable": trained}
    with os_errors_as_user_errors(folder):
        with suppress(UserError):  # of a resumed run; without it, or damaged, it is only not said
            begun = read_about(folder)
            about["begun"] = begun.get("begun", {key: begun.get(key) for key in ("command", "started")})
        if config.USE:
            from utils.own_code import keep_own_code

            about |= keep_own_code(folder)
        write_json(folder / ABOUT, about)
