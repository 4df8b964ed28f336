"""A file that lines are added to while a run goes on. Lines that the disk refuses are kept, and written later."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger("vitamp")  # utils.log is made of this


class LineFile:
    """One writer, unbuffered: a line is in the file when `add` returns, or the trouble was told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._good: int | None = None
        """Bytes of whole lines; what stands after them is half a line that the disk had no room for."""
        self._waiting: list[bytes] = []
        self._told = False
        with contextlib.suppress(OSError):  # told with the first line
            self._open()

    def add(self, line: str) -> None:
        self._waiting.append(f"{line}\n".encode())
        try:
            self._write()
        except OSError as error:
            self._let_go()
            if not self._told:
                self._told = True  # before it is told: this may be the file that it is told to
                log.warning(
                    "%s cannot be written (%s). Its lines are kept and added when it can be; training goes on.",
                    self._path,
                    error.strerror,
                )
            return
        if self._told:
            self._told = False
            log.info("%s can be written again, and lacks nothing.", self._path)

    def sync(self) -> None:
        """Have everything reach the disk; where it refuses, that is told with the next line."""
        if self._file is not None and not self._waiting:
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def close(self) -> None:
        """Write what is still waiting, or tell that it is lost."""
        if self._waiting:
            try:
                self._write()
            except OSError as error:
                lines, self._waiting = len(self._waiting), []
                log.warning("%s lacks its last %d lines (%s).", self._path, lines, error.strerror)
        self._let_go()

    def _let_go(self) -> None:
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
        if self._good is None:
            self._good = end
        if end > self._good and self._told:
            os.ftruncate(file, self._good)
        whole = b"".join(self._waiting)
        rest = memoryview(whole)
        while rest:
            rest = rest[os.write(file, rest) :]
        self._good = os.fstat(file).st_size
        self._waiting.clear()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of such a file that are whole; it may be missing, or be written just now."""
    try:
        return whole_lines(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def whole_lines(text: str) -> list[dict[str, Any]]:
    found: list[Any] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]
