"""Helpers for loading processes: their ids, whether they have ended, and their batches."""

import time
from pathlib import Path

from datasets import TrainLoader
from utils.distributed.watchdog import start_time_of


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: set[int], seconds: float = 5) -> bool:
    """Whether all end in time. A child that was not waited for yet counts as ended."""
    deadline = time.monotonic() + seconds
    while (alive := any(start_time_of(pid) is not None for pid in pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive


def in_order(loader: TrainLoader, epoch: int = 1) -> list[tuple[list[int], list[int], bytes]]:
    """Indices, labels and pixels of each batch, to be compared with those of another loader."""
    batches = [batch for window in loader.epoch(epoch) for _, batch in window]
    return [(one.indices.tolist(), one.labels.tolist(), one.images.numpy().tobytes()) for one in batches]
