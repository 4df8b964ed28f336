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


def in_order(loader: TrainLoader, epoch: int = 1) -> list[tuple[list[int], list[int], bytes]]:
    """Indices, labels and pixels of each batch, to be compared with those of another loader."""
    batches = [batch for window in loader.epoch(epoch) for _, batch in window]
    return [(one.indices.tolist(), one.labels.tolist(), one.images.numpy().tobytes()) for one in batches]
