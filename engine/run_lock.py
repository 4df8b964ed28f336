"""One run at a time in a folder: the second one is told who the first is.

On one machine the kernel keeps the lock and takes it back when its holder dies, however it dies. Other machines may
share the folder over a network whose file system keeps no locks between them; so the holder also shows a sign of life
in the file, and a newcomer from elsewhere watches whether that goes on. No clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from utils.errors import UserError
from utils.log import log
from utils.run_folder import os_errors_as_user_errors

NAME = ".lock"
SECONDS_BETWEEN_SIGNS = 5.0
SECONDS_TO_WATCH = 20.0
SECONDS_FOR_THE_DYING = 3.0


class FolderLock:
    """`with FolderLock() as lock`: what it took is free again at the end, or when the process is gone."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._about = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._signs = 0
        self._over = threading.Event()

    def take(self, folder: Path) -> bool:
        """Lock a run's folder, or raise `UserError` that names who has it. False: it was taken before."""
        if self._handle is not None:
            return False
        path = folder / NAME
        with os_errors_as_user_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        free = _locked(handle, SECONDS_FOR_THE_DYING)
        about = _read(path)
        if not free or (about.get("host", platform.node()) != platform.node() and _lives(path, about)):
            os.close(handle)
            raise UserError(_taken(folder, about))
        self._handle = handle
        with os_errors_as_user_errors(path):
            self._show(handle)
        threading.Thread(target=self._live, args=(handle,), name="lock", daemon=True).start()
        return True

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)  # the file stays: of one removed, two runs could hold a lock each
                _unlock(self._handle)
                os.close(self._handle)

    def _live(self, handle: int) -> None:
        while not self._over.wait(SECONDS_BETWEEN_SIGNS):
            with contextlib.suppress(OSError):  # a network file system that is away for a while
                self._show(handle)

    def _show(self, handle: int) -> None:
        self._signs += 1
        text = json.dumps({**self._about, "sign": self._signs}) + "\n"
        os.pwrite(handle, text.encode(), 0)
        os.ftruncate(handle, len(text))
        os.fsync(handle)


def _locked(handle: int, patience: float) -> bool:
    """A holder that was just killed may take a moment to be gone, with the loading processes it had forked."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return True
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
            log.warning("The run's folder is on a file system that keeps no locks (%s).", error.strerror)
            return True


def _unlock(handle: int) -> None:
    """Closing would not do: a loading process that was forked meanwhile holds the file open, too."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return found if isinstance(found, dict) else {}
    return {}


def _lives(path: Path, about: dict[str, Any]) -> bool:
    """Whether the holder on another machine still shows signs of life."""
    log.info(
        "%s: left by a run on host %s, pid %s; looking for %.0f s whether it still lives.",
        *(path, about.get("host"), about.get("pid"), SECONDS_TO_WATCH),
    )
    end = time.monotonic() + SECONDS_TO_WATCH
    while time.monotonic() < end:
        time.sleep(0.5)
        now = _read(path)
        if now and now.get("sign") != about.get("sign"):
            return True
        if not now:
            return False
    return False


def _taken(folder: Path, about: dict[str, Any]) -> str:
    who = f"pid {about['pid']} on host {about['host']}, since {about['since']}" if "pid" in about else "another process"
    return (
        f"{folder}: another run is at work in this folder ({who}). Wait for it or end it, or give this one another "
        "-output."
    )
