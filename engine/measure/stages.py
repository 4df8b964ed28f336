"""Measures the time of each stage of an update (REPORT_STAGES), and writes a trace by torch's profiler (-profile)."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class _Mark(NamedTuple):
    """The end of a stage."""

    ended_stage: str | None
    """The stage from the previous mark to this one; None if there was a pause, whose time does not count"""
    event: Any
    """When the device gets here"""
    begins_update: bool


class EventStages(Stages):
    """Measures by CUDA events between the GPU's kernels."""

    def __init__(self, new_event: Callable[[], Any] = HostEvent) -> None:
        """`new_event`: makes a torch.cuda.Event, or on a CPU a HostEvent."""
        self._new_event = new_event
        self._marks: deque[_Mark] = deque()
        """The last mark that was counted, and those after it, whose stages are not counted yet"""
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

        Stages that a GPU still computes remain for the next call: nothing waits for them.
        """
        # A stage has ended if the device has reached the event of its mark.
        while len(self._marks) > 1 and self._marks[1].event.query():
            previous = self._marks.popleft()
            mark = self._marks[0]
            if previous.begins_update:
                self._updates += 1
            if mark.ended_stage is not None:
                self._seconds[mark.ended_stage] += previous.event.elapsed_time(mark.event) / 1000
        taken = StageTimes(self._updates, self._seconds)
        self._seconds = _no_times()
        self._updates = 0
        return taken if taken.updates else NOT_MEASURED

    def _mark(self, stage: str, begins: bool) -> None:
        event = self._new_event()
        event.record()
        self._marks.append(_Mark(None if self._paused else stage, event, begins))
        self._paused = False


def _no_times() -> dict[str, float]:
    """Return 0 seconds for each stage. Stages that only some runs have, such as the teacher's, are added when used."""
    return defaultdict(float, dict.fromkeys(STAGES, 0.0))


# Updates before the trace. The first ones allocate and tune, so their times are not typical.
SKIPPED = 3
WARMUP = 2


@contextlib.contextmanager
def profiled(updates: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Write a trace of `updates` updates to the run's folder. Yields the function to call after each update.

    The first updates are left out, since they take longer than others.
    """
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
    # A run that ends early writes a shorter trace, if it has made at least one update after those left out.
    if not trace.exists():
        log.warning("-profile: the run ended before %d updates; no trace was written.", SKIPPED + WARMUP + 1)
