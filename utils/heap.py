"""How the C library deals with memory that was given back."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**28
"""What a process may hold on to."""
LARGEST_BLOCK = 2**25
"""Of those it holds on to, where an older C library refuses more; it would then take all from 128 KiB on anew."""


def keep_freed_memory() -> None:
    """For the rest of this process's life, as far as its C library can be told.

    A decoded photograph is a large block, and so is what a layer computes on a CPU. By default such memory goes back to
    the system when it is free, and is fetched anew, page by page, for the next image or update: a third of the time
    spent on large images, a few hundredths of an update's.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "gnu_get_libc_version"):
        if not libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
