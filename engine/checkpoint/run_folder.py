"""Folder of a run: made, locked, and described by config.yaml and run.json."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.machine.device import Run, describe_devices
from engine.setup import Ready
from models.parts import count_parameters
from utils.config import Config
from utils.config.keys import nested, values_by_key, values_to_keep
from utils.config.kinds import as_yaml
from utils.distributed.world import broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log, log_into
from utils.record.resumed_run import resumed_run, target_folder
from utils.record.run_folder import (
    ABOUT,
    CONFIG,
    check_output,
    describe_run,
    is_run_folder,
    make_folder,
    missing_from,
    os_errors_as_user_errors,
    write_json,
)
from utils.text import redacted, some_of
from vitamp.checkpoints import CHECKPOINTS, INDEX, checkpoints_in
from vitamp.files import leads_to, only_regular, parse_json, read_regular, try_to_write, write_atomically
from vitamp.metrics import NO_LABELS


def lock_existing_folder(config: Config, lock: FolderLock) -> None:
    """Lock the run's folder if it exists. Done before a checkpoint is looked for: another run may be writing one."""
    target = target_folder(config)
    if target is not None and Path(target).is_dir():
        lock.take(Path(target))
        check_output(target, config.SAVE, resumed_run(config))
        if checkpoints_in(Path(target) / CHECKPOINTS) and (gone := missing_from(Path(target))):
            log.warning("Missing in %s, although the run had written it: %s.", target, some_of(gone))


def make_run_folder(run: Run, kind: str, lock: FolderLock | None = None) -> Path:
    """Make the folder on rank 0, and log into it on all ranks. `kind`: train or eval, for its name."""

    config, world = run.config, run.world

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
    config, world, threads = run.config, run.world, run.threads
    if not world.first:
        return
    with os_errors_as_user_errors(folder):  # first: a run that is killed from here on resumes with these settings
        # What is of this start alone would let a new run with these settings continue this one.
        values = values_by_key(config) if config.EVAL else values_to_keep(config)
        write_atomically(folder / CONFIG, redacted(as_yaml(nested({**values, **run.asked}))))
    choices = {
        "why": ready.precision.choice.reason,
        "threads": threads,
        "world_size": world.size,
        **ready.choices,
    }
    if not ready.val_set.in_memory:
        from datasets.decoding import decoder_of_jpeg

        choices["decoder"] = decoder_of_jpeg()
    train_set = getattr(ready, "train_set", None)
    splits, images = {"train": train_set, "val": ready.val_set}, train_set and train_set.single_images()
    about = {
        **describe_run(describe_devices(run.device, world, threads), choices, config.TAG),
        "samples": {name: len(split) for name, split in splits.items() if split is not None},
        **({"relabel": images.relabel} if images and images.relabel else {}),
        "largest_class_percent": largest_class(ready),
        "parameters": dict(zip(("all", "trainable"), count_parameters(ready.model), strict=True)),
    }
    with os_errors_as_user_errors(folder):
        if config.USE:
            from utils.own_code import keep_own_code

            about |= keep_own_code(folder)
        write_json(folder / ABOUT, about)


NAME = ".lock"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # the folder may come from someone else
SECONDS_BETWEEN_HEARTBEATS = 5.0
SECONDS_TO_WATCH = 20.0
SECONDS_TO_EXIT = 3.0


class FolderLock:
    """Lock on a run's folder, until the end of `with FolderLock() as lock`, or until the process dies.

    A second run gets an error that names the first. On one machine the kernel holds the lock, and releases it when the
    process dies. Other machines may share the folder over a network file system without locks between machines. So the
    holder also writes a heartbeat into the lock file, and a run on another machine watches whether it changes. No
    clocks are compared.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._about = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._heartbeats = 0
        self._released = threading.Event()

    def take(self, folder: Path) -> bool:
        """Lock a run's folder, or raise UserError that names the run that has it. False: this object had it already."""
        if self._handle is not None:
            return False
        path = folder / NAME
        with os_errors_as_user_errors(path):
            handle = only_regular(path, LOCK_FLAGS)
        free = _locked(handle, SECONDS_TO_EXIT)
        about = _read(path)
        if not free or (about.get("host", platform.node()) != platform.node() and _is_alive(path, about)):
            os.close(handle)
            who = "another process"
            if about.keys() >= self._about.keys():
                who = f"pid {about['pid']} on host {about['host']}, since {about['since']}"
            raise UserError(
                f"{folder}: a run is training in this folder ({who}). Wait for it, end it, or name another -output."
            )
        self._handle = handle
        with os_errors_as_user_errors(path):
            self._write_heartbeat(handle)
        threading.Thread(target=self._keep_alive, args=(path, handle), name="lock", daemon=True).start()
        return True

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)  # not removed: two runs could then lock two files of this name
                # Unlock explicitly: closing is not enough while a data worker that was forked meanwhile has the file
                # open.
                fcntl.flock(self._handle, fcntl.LOCK_UN)
                os.close(self._handle)

    def _keep_alive(self, path: Path, handle: int) -> None:
        while not self._released.wait(SECONDS_BETWEEN_HEARTBEATS):
            with contextlib.suppress(OSError):  # a network file system may be away for a while
                if not leads_to(path, handle):  # it was removed or moved: lock what a second run would find
                    new = only_regular(path, LOCK_FLAGS)
                    if _locked(new, 0):
                        os.dup2(new, handle, inheritable=False)
                    os.close(new)
                self._write_heartbeat(handle)

    def _write_heartbeat(self, handle: int) -> None:
        self._heartbeats += 1
        text = json.dumps({**self._about, "sign": self._heartbeats}) + "\n"
        os.pwrite(handle, text.encode(), 0)
        os.ftruncate(handle, len(text))
        os.fsync(handle)


def _locked(handle: int, patience: float) -> bool:
    """Try to lock, for up to `patience` seconds: a killed holder and its data workers may take a moment to exit."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)
        except OSError as error:
            log.warning(
                "The run's folder is on a file system without locks (%s): it is not protected from a second run on "
                "this machine.",
                error.strerror,
            )
            return True


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(read_regular(path))
        return found if isinstance(found, dict) else {}
    return {}


def _is_alive(path: Path, about: dict[str, Any]) -> bool:
    """Whether the holder on another machine still writes heartbeats."""
    log.info(
        "%s: held by a run on host %s, pid %s; waiting up to %.0f s to see whether that run is alive.",
        *(path, about.get("host"), about.get("pid"), SECONDS_TO_WATCH),
    )
    end = time.monotonic() + SECONDS_TO_WATCH
    while time.monotonic() < end:
        time.sleep(0.5)
        now = _read(path)
        if not now or now.get("sign") != about.get("sign"):
            return bool(now)
    return False
