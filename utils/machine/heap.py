"""Makes the C library keep freed memory."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**28
"""Freed memory that a process may keep."""
LARGEST_BLOCK = 2**25
"""The largest threshold that older C libraries take. Without it, they return every block from 128 KiB on."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the rest of this process; without glibc, do nothing.

    A decoded photograph is a large block, and so are the activations of a layer on a CPU. By default such memory goes
    back to the system when freed, and is mapped again, page by page, for the next image or update. That takes a third
    of the time for large images, and a few percent of an update.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "gnu_get_libc_version"):
        if not libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Give the memory that glibc keeps back to the system."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
