"""Measures the time of each stage of an update (REPORT_STAGES), and writes a trace by torch's profiler (-profile)."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.measure.throughput import NOT_MEASURED, OTHER, STAGES, Stages, StageTimes
from utils.log import log


class HostEvent:
    """Replaces torch.cuda.Event for training on a CPU: measures by the host's clock."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to `end`."""
        return 1000 * (end._time - self._time)


class EventStages(Stages):
    """Measures by CUDA events between the GPU's kernels."""

    def __init__(self, new_event: Callable[[], Any] = HostEvent) -> None:
        """`new_event`: makes a torch.cuda.Event, or on a CPU a HostEvent."""
        self._new_event = new_event
        self._marks: deque[tuple[str | None, Any, bool]] = deque()
        """Marks whose time is not counted yet: the stage that ends at the event (None for the first after a pause), the
        event, and whether an update begins there."""
        self._paused = True
        self._seconds = _no_times()
        self._updates = 0

    def begin(self) -> None:
        self._mark(OTHER, begins=True)

    def mark(self, stage: str) -> None:
        if not self._paused:
            self._mark(stage, begins=False)

    def pause(self) -> None:
        self._paused = True

    def take(self) -> StageTimes:
        """Return the times of all stages that have ended since the last call; NOT_MEASURED if no update has.

        On a GPU some may still compute: they remain for the next call. `query` asks for that without waiting.
        """
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, previous_event, begins_update = self._marks.popleft()
            stage, event, _ = self._marks[0]
            if begins_update:
                self._updates += 1
            if stage is not None:
                self._seconds[stage] += previous_event.elapsed_time(event) / 1000
        taken = StageTimes(self._updates, self._seconds)
        self._seconds = _no_times()
        self._updates = 0
        return taken if taken.updates else NOT_MEASURED

    def _mark(self, stage: str, begins: bool) -> None:
        event = self._new_event()
        event.record()
        self._marks.append((None if self._paused else stage, event, begins))
        self._paused = False


def _no_times() -> dict[str, float]:
    """Return 0 seconds for each stage. Stages that only some runs have, such as the teacher's, are added when used."""
    return defaultdict(float, dict.fromkeys(STAGES, 0.0))


# Updates before the trace. The first ones allocate and tune, so their times are not typical.
SKIPPED = 3
WARMUP = 2


@contextlib.contextmanager
def profiled(updates: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Write a trace of `updates` updates to the run's folder. Yields the function to call after each update."""
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
