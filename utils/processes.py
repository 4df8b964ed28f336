"""Other processes of this machine, as Linux's /proc shows them."""

from __future__ import annotations

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
