"""Reads the memory of a device, in total and at the peak, and recognises errors that mean out of memory."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from utils.machine.cpus import control_groups, return_freed_memory

GIB = 2**30
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
# Texts of out-of-memory errors other than torch.OutOfMemoryError: on CPUs, on Apple GPUs, and of CUDA's libraries.
MARKS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
)
IN_VALIDATION = "in a validation"
"""Note on errors that were raised during validation."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of a device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)


def in_gib(size: float) -> str:
    """Format a number of bytes: '1.5 GiB', or MiB or KiB for a small one."""
    if size >= GIB / 2:
        return f"{size / GIB:.1f} GiB"
    if size >= 2**19:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def total_memory(device: torch.device) -> int | None:
    """Return the total bytes of `device`; None if unknown. On a CPU, at most the limit of this process's cgroups."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    limits = [limit for limit, _ in cgroups()]
    installed = meminfo("MemTotal")
    if installed is not None:
        limits.append(installed)
    return min(limits, default=None)


def take_peak(device: torch.device) -> int:
    """Return the bytes held at the peak since the last call, free unused memory, and begin a new peak."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    if device.type == "mps":
        peak = torch.mps.driver_allocated_memory()
        torch.mps.empty_cache()
        return peak
    # Linux has the peak of this process as VmHWM ("high-water mark"), and resets it to the current size when 5 is
    # written to clear_refs. Where that is not allowed, later calls return the peak since the process began.
    peak = meminfo("VmHWM", STATUS) or round(1e9 * peak_memory_gb(device))
    return_freed_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def meminfo(name: str, file: Path | None = None) -> int | None:
    """Return the bytes in the entry `name` of /proc/meminfo, or of `file` if one is given; None if unknown."""
    try:
        lines = (file or MEMINFO).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


def cgroups() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use) of every control group with a memory limit that this process is in."""
    for folder in control_groups():
        try:
            limit = int((folder / "memory.max").read_text())  # 'max' means no limit, and raises ValueError
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        yield limit, used - int(stat.get("inactive_file", 0))  # the kernel can free cached files


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory in GB (10^9 bytes): of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / 1e9
