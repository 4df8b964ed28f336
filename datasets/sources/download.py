"""Data sets that are fetched once a machine, and never taken for whole when they are not."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from utils.cache import process_lock
from utils.errors import UserError
from utils.log import log

STALLED_AFTER = 60.0
"""Seconds without a byte after which a server counts as dead."""
ARCHIVES = (".tgz", ".tar.gz", ".tar", ".zip")


def fetch_once(target: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    """Make the folder `target` by `fetch(scratch)`, which leaves it in `scratch` under its own name.

    Any number of processes may call this at once: one works, the others wait for it. The work is done in a folder
    beside the target, so that the target is there whole or not at all. `by_hand` ends the message of a failure.
    """
    scratch = target.parent / f".{target.name}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(target.parent / f".{target.name}.lock", f"fetches {target}"):
            if target.exists():
                return
            if scratch.exists():
                # Its maker is dead: the lock would not be ours otherwise.
                log.warning("An earlier download was broken off: %s is removed, and it begins anew.", scratch)
                shutil.rmtree(scratch)
            _fetch(target, scratch, fetch, by_hand)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error}. {by_hand}") from None


def _fetch(target: Path, scratch: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    log.info("Fetching %s.", target)
    scratch.mkdir()
    try:
        with _no_endless_wait():
            fetch(scratch)
        if not (scratch / target.name).is_dir():
            raise RuntimeError(f"it left no folder {target.name}")
        _drop_archives(scratch / target.name)
        os.replace(scratch / target.name, target)
    except Exception as error:  # whatever the network, the disk or an archive may come up with
        reason = str(error) or type(error).__name__
        raise UserError(f"DATA.DOWNLOAD: {target.name} could not be fetched: {reason}. {by_hand}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _no_endless_wait() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALLED_AFTER)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _drop_archives(folder: Path) -> None:
    """Once unpacked they only take room."""
    for path in folder.iterdir():
        if path.is_file() and path.name.endswith(ARCHIVES):
            path.unlink()
