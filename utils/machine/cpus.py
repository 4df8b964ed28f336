"""How many CPU cores this process may use, by affinity and control groups; and its freed memory.

Containers and batch systems set their limits, those of memory too, through control groups (cgroups).
"""

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import sys
from pathlib import Path

from utils.log import warn_once

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores() -> int:
    """Cores this process may use: a batch system, `taskset` or a container's quota may limit them."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, file = cpu_quota() or (math.inf, None)
    if quota >= visible:
        return visible
    warn_once(
        f"CPU quota: this process may use {quota:g} of the {visible} visible cores ({file}). Without -threads and "
        "-num_workers, the numbers of threads and loading processes follow from the quota.",
        logging.INFO,
    )
    return math.ceil(quota)  # a fraction of a core is worth a thread, which then idles at times


def core_seconds() -> tuple[float, float]:
    """Seconds that this process's cores have been idle so far, and have worked for others than it and its workers.

    Zeros where that is unknown: not on Linux, or where a quota limits the process rather than the cores it may use.
    """
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0.0, 0.0
    workers = list[list[str]]()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # it has just ended
            workers.append(Path(f"/proc/{child.pid}/stat").read_text(errors="replace").rpartition(")")[2].split())
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    if (cpu_quota() or (math.inf,))[0] < len(allowed):
        return 0.0, 0.0
    # user, nice, system, idle, iowait, irq, softirq, steal
    idle = 0
    every = 0
    for line in lines:
        if line and line[0] in allowed:
            ticks = [int(field) for field in line[1:9]]
            idle += sum(ticks[3:5])
            every += sum(ticks)
    times = os.times()
    second = os.sysconf("SC_CLK_TCK")
    ours = sum(times[:4]) + sum(int(one[11]) + int(one[12]) for one in workers) / second
    return idle / second, (every - idle) / second - ours


def cpu_quota() -> tuple[float, Path] | None:
    """The smallest limit on CPU time, as a number of cores, of all control groups of this process; and its file."""
    quotas: list[tuple[float, Path]] = []
    for file in (folder / "cpu.max" for folder in control_groups()):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, file.read_text(encoding="ascii").split())  # 'max' is not a number
            if quota > 0 and period > 0:
                quotas.append((quota / period, file))
    return min(quotas, default=None)


def control_groups() -> list[Path]:
    """Folders of this process's control group and of all around it; none without version 2 of cgroups."""
    try:
        lines = OWN.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    # A container may show its own group as the root, but the path as seen from outside.
    own = [MOUNTED / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    folders: list[Path] = []
    for group in own:
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(MOUNTED)]
    return folders


M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
KEPT_BYTES = 2**31 - 1
"""Freed memory that a process may keep."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the rest of this process; without glibc, do nothing.

    A decoded photograph is a large block, and so are the activations of a layer on a CPU. By default such memory goes
    back to the system when freed, and is mapped again, page by page, for the next image or layer. That takes a third
    of the time for large images or an evaluation, and a few percent of an update.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Give the memory that glibc keeps back to the system."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
