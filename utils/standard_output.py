"""Writes that fail: to standard output, one clear error; to the files of a run, lines are kept and written later."""

import contextlib
import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from vitamp.files import NotRegular, leads_to, only_regular


class OutputError(Exception):
    """Standard output cannot be written, for example on a full disk. Not an OSError: argparse swallows those."""


class ClosedPipe(BrokenPipeError):
    """The reader of standard output, `| head` for example, has closed the pipe."""


def watch_standard_output() -> None:
    """From now on, a failed write to standard output raises OutputError, or ClosedPipe if its reader is gone.

    What is written to a closed standard stream (`>&-`) is discarded; a closed standard input is empty.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file opened would get its number
        pass
    os.close(free)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if sys.stdout.errors == "strict" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of names that its encoding lacks
    for name in ("write", "flush"):
        setattr(sys.stdout, name, _watched(getattr(sys.stdout, name)))


def flush_after(work: Callable[[], int]) -> int:
    """Do `work` and flush what it printed, while a failed write can still be reported."""
    try:
        code = work()
    except (SystemExit, KeyboardInterrupt):  # -h, Ctrl-C
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def discard_output(stream: TextIO | None = None) -> None:
    """Discard what `stream` (default: standard output) has in its buffer, and all that is written to it later."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _watched(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def call(*arguments: Any) -> Any:
        try:
            return write(*arguments)
        except BrokenPipeError as error:
            raise ClosedPipe(*error.args) from None
        except OSError as error:
            raise OutputError(f"standard output cannot be written ({error.strerror or error})") from None

    return call


log = logging.getLogger("vitamp")  # not from utils.log, which imports this file


class LineFile:
    """One writer, unbuffered: when `add` returns, the line is in the file, or a warning was logged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._whole_bytes: int | None = None
        """Length of all whole lines; after a failed write, half a line may follow them."""
        self._unwritten: list[bytes] = []
        self._warned = False
        try:
            self._open()
        except OSError as error:  # reported with the first line, but for a link or a pipe from someone else
            if isinstance(error, NotRegular):
                raise

    def add(self, line: str) -> None:
        self._unwritten.append(f"{line}\n".encode())
        try:
            lost = self._lost()
            self._write()
        except OSError as error:
            self._release()
            if not self._warned:
                self._warned = True  # first: the warning may be written to this very file
                log.warning(
                    "%s cannot be written (%s). Its lines are kept in memory and retried; training continues.",
                    self._path,
                    error.strerror,
                )
            return
        if self._warned:
            self._warned = False
            log.info("%s can be written again; no line is lost.", self._path)
        if lost:
            log.warning("%s %s.", self._path, lost)

    def sync(self) -> None:
        """Flush to the disk; a failure is reported with the next line."""
        if self._file is not None and not self._unwritten:
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def close(self) -> None:
        """Write what is still unwritten, or warn that it is lost."""
        if self._unwritten:
            try:
                self._write()
            except OSError as error:
                lines = len(self._unwritten)
                self._unwritten = []
                log.warning("%s: its last %d lines could not be written (%s).", self._path, lines, error.strerror)
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # For reading too, by `_lost`. No link is followed: the folder may come from someone else.
            self._file = only_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        return self._file

    def _lost(self) -> str:
        """What happened to the file, if its path no longer leads to it, else ''. Its lines are then written again."""
        if self._file is None or leads_to(self._path, self._file):
            return ""
        lines = b"" if os.path.lexists(self._path) else os.pread(self._file, self._whole_bytes or 0, 0)
        self._release()
        self._whole_bytes = None
        if not lines:
            return "was replaced while the run was writing it; later lines go to the new file"
        self._unwritten.insert(0, lines)
        return "was removed or moved while the run was writing it; all its lines are written there again"

    def _write(self) -> None:
        file = self._open()
        end = os.fstat(file).st_size
        if self._whole_bytes is None:
            self._whole_bytes = end
        if end > self._whole_bytes and self._warned:
            os.ftruncate(file, self._whole_bytes)
        rest = memoryview(b"".join(self._unwritten))
        while rest:
            rest = rest[os.write(file, rest) :]
        self._whole_bytes = os.fstat(file).st_size
        self._unwritten.clear()
