"""Processes of this machine, read from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process by pid and start time: the kernel reuses pids, and each container has its own."""

    pid: int
    started: str
    """As `start_time_of` returns it."""


def start_time_of(pid: int) -> str | None:
    """The start time of a process, in the kernel's ticks; None if it has ended, or where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the program's name before it may contain any character
    return None if state in ("Z", "X") else rest[18]


def ancestor_without(variable: str) -> Process | None:
    """The nearest ancestor of this process without this environment variable: the process that set it for its children.

    None if it cannot be read.
    """
    pid = os.getppid()
    while pid > 0:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return None
        if not any(word.startswith(f"{variable}=".encode()) for word in words):
            started = start_time_of(pid)
            return None if started is None else Process(pid, started)
        pid = parent
    return None
