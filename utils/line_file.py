"""Append-only text files of a running training. Lines that the disk refuses are kept in memory and written later."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

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
        with contextlib.suppress(OSError):  # reported with the first line
            self._open()

    def add(self, line: str) -> None:
        self._unwritten.append(f"{line}\n".encode())
        try:
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
                lines, self._unwritten = len(self._unwritten), []
                log.warning("%s: its last %d lines could not be written (%s).", self._path, lines, error.strerror)
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._file

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
