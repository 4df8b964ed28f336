"""The cache folder, and a lock so that only one process of a machine prepares what is cached."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

DEFAULT = "~/.cache/vitamp"


def cache_folder(data: DataConfig, name: str) -> Path:
    """The folder `name` in the cache, created if needed."""
    folder = Path(data.CACHE or DEFAULT).expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"DATA.CACHE: {folder} cannot be created: {error}. Name a writable folder.") from None
    return folder


@contextlib.contextmanager
def process_lock(file: Path, task: str) -> Iterator[None]:
    """Hold the lock `file`; other processes wait for it. `task`: what its holder does, for their log ("fetches x")."""
    lock = FileLock(file)
    try:
        try:
            lock.acquire(timeout=1)
        except Timeout:
            log.info("Waiting for another process, which %s.", task)
            lock.acquire()
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {error}. Its folder must be writable.") from None
    try:
        yield
    finally:
        lock.release()
