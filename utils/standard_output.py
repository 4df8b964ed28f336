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
    # The descriptors of the standard streams are 0, 1 and 2. A new file gets the lowest free number, and would take the
    # place of a closed stream. So the null device is opened until the number is above 2.
    descriptor = -1
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    # For a closed stream, Python's object is None.
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if sys.stdout.errors == "strict" and isinstance(sys.stdout, io.TextIOWrapper):
        # The encoding may lack characters in names of files.
        sys.stdout.reconfigure(errors="backslashreplace")
    for name in ("write", "flush"):
        setattr(sys.stdout, name, _raising_output_errors(getattr(sys.stdout, name)))


def flush_after(work: Callable[[], int]) -> int:
    """Do `work`, flush what it printed, and return its exit code.

    Python itself would flush only when it exits, where a failed write could no longer be reported as an error of ours.
    """
    try:
        code = work()
    except (SystemExit, KeyboardInterrupt):  # by -h or Ctrl-C, which are no failures, unlike other exceptions
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def discard_output(stream: TextIO | None = None) -> None:
    """Discard what `stream` (default: standard output) has in its buffer, and all that is written to it later."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _raising_output_errors(write: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `write` or `flush` of standard output in a function that raises ClosedPipe or OutputError if it fails."""

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
    """A file of a run to which lines are added, unbuffered; a failed write does not stop the run.

    When `add` returns, the line is in the file, or a warning was logged, and the line is written with a later one.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        A failure is reported with the first line. Only a link or a pipe at this path is an error at once, because the
        folder may come from someone else.
        """
        self._path = path
        self._file: int | None = None
        """The descriptor of the file; None if it is not open."""
        self._whole_bytes: int | None = None
        """Length of all whole lines; after a failed write, half a line may follow them. None until the first write."""
        self._unwritten: list[bytes] = []
        """Lines that are not in the file yet."""
        self._has_failed = False
        """Whether the last write failed, which a warning has reported."""
        try:
            self._open()
        except OSError as error:
            if isinstance(error, NotRegular):
                raise

    def add(self, line: str) -> None:
        """Write a line, after the lines whose write has failed before; a failure is logged once, not raised."""
        self._unwritten.append(f"{line}\n".encode())
        try:
            what_happened = self._leave_moved_file()
            self._write()
        except OSError as error:
            self._release()
            if not self._has_failed:
                self._has_failed = True  # This is set first, because the warning may be written to this very file.
                log.warning(
                    "%s cannot be written (%s). Its lines are kept in memory and retried; training continues.",
                    self._path,
                    error.strerror,
                )
            return
        if self._has_failed:
            self._has_failed = False
            log.info("%s can be written again; no line is lost.", self._path)
        if what_happened:
            log.warning("%s %s.", self._path, what_happened)

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
            # For reading too, by `_leave_moved_file`. No link is followed: the folder may come from someone else.
            self._file = only_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        return self._file

    def _leave_moved_file(self) -> str:
        """Close the file if its path no longer leads to it, so that the next write opens the path again.

        If the path leads to nothing, all lines so far are written there again. If it leads to another file, only later
        lines go there. Returns what happened, for the log; '' if the file is still there.
        """
        if self._file is None or leads_to(self._path, self._file):
            return ""
        is_replaced = os.path.lexists(self._path)
        lines = b"" if is_replaced else os.pread(self._file, self._whole_bytes or 0, 0)
        self._release()
        self._whole_bytes = None
        if not lines:
            return "was replaced while the run was writing it; later lines go to the new file"
        self._unwritten.insert(0, lines)
        return "was removed or moved while the run was writing it; all its lines are written there again"

    def _write(self) -> None:
        """Write all unwritten lines at the end of the file, instead of half a line that a failed write has left.

        If this fails, too, all lines stay unwritten, and the next call removes what it has written of them.
        """
        file = self._open()
        end = os.fstat(file).st_size
        if self._whole_bytes is None:
            self._whole_bytes = end
        if end > self._whole_bytes and self._has_failed:  # Otherwise, another program has added something.
            os.ftruncate(file, self._whole_bytes)
        rest = memoryview(b"".join(self._unwritten))
        while rest:
            written_bytes = os.write(file, rest)
            rest = rest[written_bytes:]
        self._whole_bytes = os.fstat(file).st_size
        self._unwritten.clear()
