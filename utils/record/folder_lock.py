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
    """A lock on a run's folder, held until the end of `with FolderLock() as lock`, or until the process dies.

    A second run gets an error that names the first. On one machine, the kernel holds the lock, and releases it when the
    process dies. Other machines may share the folder over a network file system without locks between machines. So the
    holder also writes a heartbeat into the lock file, and a run on another machine watches whether it changes. No
    clocks are compared.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        """The open lock file; None before `take`."""
        self._holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        """The description of this process in the lock file."""
        self._heartbeats = 0
        """Number of heartbeats so far, which each heartbeat has."""
        self._released = threading.Event()
        """Ends the thread of `_keep_alive`."""

    def take(self, folder: Path) -> bool:
        """Lock a run's folder, and return whether it was not locked by this object before.

        If another run has locked it, a UserError names that run.
        """
        if self._handle is not None:
            return False
        path = folder / LOCK
        with os_errors_as_user_errors(path):
            handle = only_regular(path, LOCK_FLAGS)
        is_locked_here = _lock(handle, seconds=SECONDS_TO_EXIT)
        holder = _read(path)
        # The lock may not be seen by other machines. So if the holder is on another machine, its heartbeats decide.
        is_from_elsewhere = holder.get("host", platform.node()) != platform.node()
        if not is_locked_here or (is_from_elsewhere and _is_alive(path, holder)):
            os.close(handle)
            who = "another process"
            if holder.keys() >= self._holder.keys():
                who = f"pid {holder['pid']} on host {holder['host']}, since {holder['since']}"
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
        """Release the lock, and end the thread that writes heartbeats."""
        self._released.set()
        if self._handle is not None:
            with contextlib.suppress(OSError):
                # The file is not removed, because two runs could then lock two files of this name.
                os.ftruncate(self._handle, 0)
                # Closing alone would not unlock the file while a data worker that was forked meanwhile has it open.
                fcntl.flock(self._handle, fcntl.LOCK_UN)
                os.close(self._handle)

    def _keep_alive(self, path: Path, handle: int) -> None:
        """Write heartbeats until the lock is released; runs in a thread."""
        while not self._released.wait(SECONDS_BETWEEN_HEARTBEATS):
            with contextlib.suppress(OSError):  # A network file system may be unavailable for a while.
                # If the lock file was removed or moved, a second run would create and lock a new file at this path. So
                # this run locks a new file there itself.
                if not leads_to(path, handle):
                    new_handle = only_regular(path, LOCK_FLAGS)
                    if _lock(new_handle, seconds=0):
                        # `handle` is now a second descriptor of the new file, which keeps the lock after the close.
                        os.dup2(new_handle, handle, inheritable=False)
                    os.close(new_handle)
                self._write_heartbeat(handle)

    def _write_heartbeat(self, handle: int) -> None:
        """Write the description of this process into the lock file, with a number that grows each time."""
        self._heartbeats += 1
        text = json.dumps({**self._holder, "sign": self._heartbeats}) + "\n"
        os.pwrite(handle, text.encode(), 0)
        os.ftruncate(handle, len(text))
        os.fsync(handle)


def _lock(handle: int, seconds: float) -> bool:
    """Try to lock a file for up to `seconds`, and return whether it is locked; True on a file system without locks.

    A killed holder and its data workers may take a moment to exit.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
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
    """Read the holder's description from the lock file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        holder = parse_json(read_regular(path))
        return holder if isinstance(holder, dict) else {}
    return {}


def _is_alive(path: Path, holder: dict[str, Any]) -> bool:
    """Whether a holder on another machine still writes heartbeats, by watching the lock file.

    holder: its description in the lock file, in which each heartbeat changes the number "sign"
    """
    log.info(
        "%s: held by a run on host %s, pid %s; waiting up to %.0f s to see whether that run is alive.",
        path,
        holder.get("host"),
        holder.get("pid"),
        SECONDS_TO_WATCH,
    )
    deadline = time.monotonic() + SECONDS_TO_WATCH
    while time.monotonic() < deadline:
        time.sleep(0.5)
        current_holder = _read(path)
        if not current_holder:  # The holder has released the lock.
            return False
        if current_holder.get("sign") != holder.get("sign"):
            return True
    return False
