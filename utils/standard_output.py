"""Turns a failed write to standard output into one clear error instead of a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output cannot be written, for example on a full disk. Not an OSError: argparse swallows those."""


class ClosedPipe(BrokenPipeError):
    """The reader of standard output, `| head` for example, has closed the pipe."""


def watch_standard_output() -> None:
    """From now on, a failed write to standard output raises OutputError, or ClosedPipe if its reader is gone."""
    _replace_closed_streams()
    for name in ("write", "flush"):
        setattr(sys.stdout, name, _watched(getattr(sys.stdout, name)))


def flush_after(work: Callable[[], int]) -> int:
    """Do `work` and flush what it printed, while a failed write can still be reported."""
    try:
        code = work()
    except SystemExit:  # -h
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def discard_output(stream: TextIO | None = None) -> None:
    """Discard what `stream` (default: standard output) has in its buffer, and all that is written to it later."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _replace_closed_streams() -> None:
    """Discard what is written to streams that the shell closed (`>&-`).

    Otherwise the next file that is opened would get the stream's number, and what C code prints.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


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
