"""The control groups this process is in, through which a container or a batch system sets limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTED, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Group(NamedTuple):
    folder: Path
    version: int


def groups_of(controller: str) -> Iterator[Group]:
    """Every group of version 2, and of version 1 for `controller`, from this process's own one up to the root."""
    try:
        lines = OWN.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNTED / controller if controllers else MOUNTED
        # A container may show its own group as the root, and the path as it is outside.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield Group(folder, 1 if controllers else 2)
            if folder == root:
                break
