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
    """Return how many CPU cores this process may use, by the limits of a batch system, `taskset` or a container."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, file = cpu_quota() or (math.inf, None)  # without a quota: all visible cores
    if quota >= visible:
        return visible
    warn_once(
        f"CPU quota: this process may use {quota:g} of the {visible} visible cores ({file}). Without -threads and "
        "-num_workers, the numbers of threads and loading processes follow from the quota.",
        logging.INFO,
    )
    return math.ceil(quota)  # For a fraction of a core, one more thread is used: the system pauses it at times.


def core_seconds() -> tuple[float, float]:
    """Return the seconds of CPU time that the cores of this process have been idle, and have worked for other programs.

    Both are sums over the cores that this process may use, since the machine booted. The time of this process and of
    its workers is not that of other programs. Both are 0 if unknown: not on Linux, or with a quota of CPU time, which
    limits a process without limiting its cores.
    """
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0.0, 0.0
    worker_ticks = 0
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # it has just ended
            stat = Path(f"/proc/{child.pid}/stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()  # from the third field of proc(5), the state, on
            user_ticks, system_ticks = fields[11:13]
            worker_ticks += int(user_ticks) + int(system_ticks)
    core_names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    quota, _ = cpu_quota() or (math.inf, None)
    if quota < len(core_names):
        return 0.0, 0.0

    idle_ticks = 0
    all_ticks = 0
    for line in lines:
        if line and line[0] in core_names:
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = [int(field) for field in line[1:9]]
            idle_ticks += sum(ticks[3:5])
            all_ticks += sum(ticks)
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    # User and system time of this process and of its children that have ended, and the time of those that run
    own_seconds = sum(os.times()[:4]) + worker_ticks / ticks_per_second
    return idle_ticks / ticks_per_second, (all_ticks - idle_ticks) / ticks_per_second - own_seconds


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
    # A line "0::/path" is that of version 2. In a container, the path may be that on the host, which does not exist in
    # the container: there, the limits of its own group are in MOUNTED, which is around every path.
    groups = [MOUNTED / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    folders: list[Path] = []
    for group in groups:
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
