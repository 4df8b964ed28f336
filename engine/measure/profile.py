"""`-profile N`: a trace of N updates by torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from utils.log import log

SKIPPED, WARMUP = 3, 2  # updates before the trace: the first ones allocate and tune, so their times mislead


@contextlib.contextmanager
def profiled(updates: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Write a trace of `updates` updates to the run's folder. Yields what is to be called after each update."""
    trace = folder / "profile.json"

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(trace))
        log.info("Profile written to %s (open it in chrome://tracing or Perfetto).", trace)

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=SKIPPED, warmup=WARMUP, active=updates, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        acc_events=True,  # without it torch warns that earlier cycles are lost; there is only one
    ) as profiler:
        yield profiler.step
    if not trace.exists():
        log.warning("-profile: the run ended before %d updates; no trace was written.", SKIPPED + WARMUP + 1)
