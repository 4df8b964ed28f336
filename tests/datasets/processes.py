"""Helpers for loading processes: their ids, whether they have ended, and their batches."""

from __future__ import annotations

import time
from pathlib import Path

from datasets import TrainLoader


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: set[int], seconds: float = 5) -> bool:
    """Whether all end in time. A child that was not waited for yet counts as ended."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def in_order(loader: TrainLoader, epoch: int, start: int = 0) -> list[tuple[list[int], bytes]]:
    batches = [batch for window in loader.epoch(epoch, start) for _, batch in window]
    return [(batch.indices.tolist(), batch.images.numpy().tobytes()) for batch in batches]
