"""What is prepared once and kept: where it lies, and how only one process of a machine prepares it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

DEFAULT = "~/.cache/vitamp"


def cache_folder(data: DataConfig, name: str) -> Path:
    """The folder `name` of the cache, which is made."""
    folder = Path(data.CACHE or DEFAULT).expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"DATA.CACHE: {folder} cannot be made: {error}. Name a folder that can be written.") from None
    return folder


@contextlib.contextmanager
def only_one(lock: Path, what: str) -> Iterator[None]:
    """Inside, this process is alone among those that name the same `lock`; the others wait. The lock ends with it."""
    guard = FileLock(lock)
    try:
        try:
            guard.acquire(timeout=1)
        except Timeout:
            log.info("Waiting for another process, which %s.", what)
            guard.acquire()
    except OSError as error:
        raise UserError(f"{lock} cannot be locked: {error}. Its folder must let us write.") from None
    try:
        yield
    finally:
        guard.release()
