"""Download of data sets: once per machine, and an incomplete download is never used."""

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
"""Seconds without data after which a download fails."""
ARCHIVES = (".tgz", ".tar.gz", ".tar", ".zip")


def fetch_once(target: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    """Make the folder `target` with `fetch(scratch)`, which creates a folder of that name in `scratch`.

    Any number of processes may call this at once: one downloads and the others wait. It downloads into a folder beside
    the target and renames it at the end, so `target` is complete or absent. `by_hand` ends the message of a failure.
    """
    scratch = target.parent / f".{target.name}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(target.parent / f".{target.name}.lock", f"fetches {target}"):
            if target.exists():
                return
            if scratch.exists():
                # Left by a process that died: otherwise it would hold the lock.
                log.warning("An earlier download was interrupted: removing %s and starting again.", scratch)
                shutil.rmtree(scratch)
            _fetch(target, scratch, fetch, by_hand)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error}. {by_hand}") from None


def _fetch(target: Path, scratch: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    log.info("Fetching %s.", target)
    scratch.mkdir()
    try:
        with _network_timeout():
            fetch(scratch)
        if not (scratch / target.name).is_dir():
            raise RuntimeError(f"the download left no folder {target.name}")
        _drop_archives(scratch / target.name)
        os.replace(scratch / target.name, target)
    except Exception as error:  # the network, the disk and archives have errors of many types
        reason = str(error) or type(error).__name__
        raise UserError(f"DATA.DOWNLOAD: {target.name} could not be fetched: {reason}. {by_hand}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _network_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALLED_AFTER)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _drop_archives(folder: Path) -> None:
    """Remove archives that are unpacked by now."""
    for path in folder.iterdir():
        if path.is_file() and path.name.endswith(ARCHIVES):
            path.unlink()
