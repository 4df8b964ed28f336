"""Memory of a device: total, free, in use and limited; and which errors mean out of memory."""

from __future__ import annotations

import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from utils.machine.cpus import cgroups_of

GIB = 2**30
MEMINFO = Path("/proc/meminfo")
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
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)


def in_gib(size: float) -> str:
    unit, name = (GIB, "GiB") if size >= GIB / 2 else (2**20, "MiB") if size >= 2**19 else (2**10, "KiB")
    return f"{size / unit:.1f} {name}"


def free_memory(device: torch.device, processes: int) -> int | None:
    """Free bytes of `device` for this process, one of `processes` on this machine; None if unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved and does not use is free too.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    left_in_groups = (max(0, limit - used) for limit, used in _groups())
    known = [size for size in (_meminfo("MemAvailable"), *left_in_groups) if size is not None]
    return min(known) // processes if known else None


def total_memory(device: torch.device) -> int | None:
    """Total bytes of `device`; on a CPU, at most the limit of this process's control group."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    known = [size for size in (_meminfo("MemTotal"), *(limit for limit, _ in _groups())) if size is not None]
    return min(known) if known else None


def largest_blocks(device: torch.device, kinds: int = 3) -> str | None:
    """Sizes that take most of a GPU's memory: '24 x 592.0 MiB, 60 x 148.0 MiB'. None on other devices."""
    if device.type != "cuda":
        return None
    sizes = Counter(
        int(block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    most = sorted(sizes.items(), key=lambda item: item[0] * item[1], reverse=True)[:kinds]
    return ", ".join(f"{count} x {in_gib(size)}" for size, count in most) or None


@contextmanager
def limited(device: torch.device, limit: int) -> Iterator[Callable[[], int]]:
    """Limit memory: allocations beyond `limit` bytes raise torch.OutOfMemoryError. Yields a function for the peak."""
    if device.type != "cuda":
        with LiveMemory(device, limit) as live:
            yield live.take_peak
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)

    def take_peak() -> int:
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    try:
        take_peak()
        yield take_peak
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        take_peak()


class LiveMemory(TorchDispatchMode):
    """Counts the memory of tensors that are made inside it, and raises an error beyond a limit.

    When a host runs out of memory there is no error to catch: the kernel kills the process. Temporary memory inside an
    operator is not counted.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        super().__init__()
        self._device, self._limit = device.type, limit
        self._live = self._peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def take_peak(self) -> int:
        """Peak since the last call."""
        peak, self._peak = self._peak, self._live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        weakref.finalize(storage, self._freed, size).atexit = False
        self._live += size
        self._peak = max(self._peak, self._live)
        if self._live > self._limit:
            raise torch.OutOfMemoryError(
                f"Tried to allocate {in_gib(size)}: with it, tensors would take {in_gib(self._live)}; the limit is "
                f"{in_gib(self._limit)}."
            )

    def _freed(self, size: int) -> None:
        self._live -= size


def _meminfo(name: str) -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _groups() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of every control group with a limit that this process is in, of version 2 or 1."""
    for folder, version in cgroups_of("memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        if (found := _limit_of(folder, *names)) is not None:
            yield found


def _limit_of(folder: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    try:
        limit_bytes = int((folder / limit).read_text())  # 'max' means no limit, and raises ValueError
        in_use = int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit_bytes, in_use - int(stat.get(cache, 0))  # the kernel can free cached files


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory in GB: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
