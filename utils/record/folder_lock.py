"""A lock on a run's folder, so that two runs never train in the same one."""

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

from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import os_errors_as_user_errors
from vitamp.files import leads_to, only_regular, parse_json, read_regular

LOCK = ".lock"
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
        path = folder / LOCK
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
