"""How many CPU cores this process may use: its affinity, and the CPU quota of its control groups."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import NamedTuple

from utils.cgroups import groups_of
from utils.log import log


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
