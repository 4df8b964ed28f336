"""The CPUs: what Linux says of them, and how many cores this process may use by its affinity and its control groups.

A container or a batch system sets limits, those of memory too, through control groups.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.log import log

MOUNTED, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PROCESSORS = Path("/proc/cpuinfo")


class Group(NamedTuple):
    folder: Path
    version: int


class Quota(NamedTuple):
    """CPU time a control group may take, as a number of cores."""

    cores: float
    file: Path


def cores() -> int:
    """Cores this process may use: a batch system, `taskset` or a container's quota may leave it only some."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    if quota is None or quota.cores >= visible:
        return visible
    _tell(quota, visible)
    return math.ceil(quota.cores)  # what is left of a core is worth a thread, which then rests at times


def cpu_quota() -> Quota | None:
    """The smallest quota of all groups this process is in; None without one."""
    quotas = [quota for group in groups_of("cpu") if (quota := _quota_of(*group)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path, version: int) -> Quota | None:
    try:
        if version == 2:
            file = folder / "cpu.max"
            quota, period = map(int, file.read_text(encoding="ascii").split())  # 'max' is not a number
        else:
            file = folder / "cpu.cfs_quota_us"
            quota = int(file.read_text(encoding="ascii"))  # -1: no quota
            period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return Quota(quota / period, file) if quota > 0 and period > 0 else None


@functools.cache
def _tell(quota: Quota, visible: int) -> None:
    log.info(
        "CPU quota: %g of the %d cores seen here may be used (%s); threads and loading processes are counted by it.",
        quota.cores,
        visible,
        quota.file,
    )


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


def processors() -> list[dict[str, str]]:
    """What Linux says of each CPU ("model name", "flags", "cpu MHz", ...) at this moment; nothing on other systems."""
    try:
        blocks = PROCESSORS.read_text(encoding="ascii", errors="replace").strip().split("\n\n")
    except OSError:
        return []
    pairs = ((line.partition(":") for line in block.splitlines()) for block in blocks)
    return [{key.strip(): value.strip() for key, _, value in block} for block in pairs]


@functools.cache
def first_processor() -> dict[str, str]:
    """The same of the first CPU, read once; on every machine that is known the others have the same features."""
    return next(iter(processors()), {})
