"""`-profile N`: a trace of N updates by torch's profiler."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from utils.distributed.world import World
from utils.log import log

SKIPPED, WARMUP = 3, 2  # updates before the trace: the first ones allocate and tune, so their times mislead


class UpdateProfiler:
    """Writes a trace of `updates` updates of rank 0 to the run's folder; with 0 it does nothing."""

    def __init__(self, updates: int, folder: Path, world: World) -> None:
        self._trace = folder / "profile.json"
        self._profiler: torch.profiler.profile | None = None
        if updates and world.first:
            plan = torch.profiler.schedule(wait=SKIPPED, warmup=WARMUP, active=updates, repeat=1)
            self._profiler = torch.profiler.profile(
                schedule=plan,
                on_trace_ready=self._write,
                record_shapes=True,
                acc_events=True,  # without it torch warns that earlier cycles are lost; there is only one
            )

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self._trace))
        log.info("Profile written to %s (open it in chrome://tracing or Perfetto).", self._trace)

    def step(self) -> None:
        if self._profiler:
            self._profiler.step()

    def __enter__(self) -> UpdateProfiler:
        if self._profiler:
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profiler:
            self._profiler.__exit__(kind, value, traceback)
            if not self._trace.exists():
                log.warning("-profile: the run ended before %d updates; no trace was written.", SKIPPED + WARMUP + 1)
