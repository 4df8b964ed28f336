"""Standard output that refuses a write: one clear error instead of a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any


class OutputError(Exception):
    """Standard output cannot be written, on a full disk say. No OSError: argparse and others swallow those."""


def watch_standard_output() -> None:
    """From now on, a write that standard output refuses raises OutputError. A closed pipe stays a BrokenPipeError."""
    for name in ("write", "flush"):
        setattr(sys.stdout, name, _watched(getattr(sys.stdout, name)))


def flushed(work: Callable[[], int]) -> int:
    """Do `work` and write all that it printed, while a refusal can still be reported."""
    try:
        code = work()
    except SystemExit:  # -h
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def discard_output() -> None:
    """Send what Python still has in its buffer, and would write at exit, nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _watched(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def call(*arguments: Any) -> Any:
        try:
            return write(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written ({error.strerror or error})") from None

    return call
