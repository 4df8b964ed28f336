"""Other processes of this machine, as Linux's /proc shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A number alone does not name a process: the kernel gives it again, and each container has its own numbers."""

    pid: int
    birth: str
    """As `birth_of` gives it."""


def birth_of(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it is gone, or where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the program's name before it may have any character
    return None if state in ("Z", "X") else rest[18]


def ancestor_without(variable: str) -> Process | None:
    """The nearest ancestor of this process that has no such variable in its environment: whoever set it."""
    pid = os.getppid()
    while pid > 0:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return None
        if not any(word.startswith(f"{variable}=".encode()) for word in words):
            birth = birth_of(pid)
            return None if birth is None else Process(pid, birth)
        pid = parent
    return None
