"""Times of the stages of an update: waiting for data, copy, forward, backward, optimiser, other.

An update calls `lap(FORWARD)` at the end of its forward pass: the time since the previous lap belongs to that stage.
Nothing waits. A GPU works asynchronously, so there each lap records a CUDA event, and reports read those events that
have happened by then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

DATA, COPY, FORWARD, BACKWARD, OPTIMISER, OTHER = "data", "copy", "forward", "backward", "optimiser", "other"
STAGES = (DATA, COPY, FORWARD, BACKWARD, OPTIMISER, OTHER)
TEACHER = "teacher"
"""Stage of distillation; runs without a teacher do not report it."""
MOST_EVENTS = 4096
"""Limit of pending events. A host that is further ahead of its GPU leaves updates unmeasured, to bound memory."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds by stage, summed over `updates` updates."""

    updates: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def percent(self) -> dict[str, float]:
        whole = max(self.total, 1e-12)
        return {stage: 100 * time / whole for stage, time in self.seconds.items()}

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds per update, by stage."""
        return {stage: 1000 * time / max(self.updates, 1) for stage, time in self.seconds.items()}

    def __add__(self, other: StageTimes) -> StageTimes:
        sums = {stage: time + other.seconds.get(stage, 0.0) for stage, time in self.seconds.items()}
        return StageTimes(self.updates + other.updates, {**other.seconds, **sums})


class Stages:
    """Measures nothing; used unless REPORT_STAGES is set."""

    def begin(self) -> None:
        """Begin an update; the time since the previous one ended is counted as OTHER."""

    def lap(self, stage: str) -> None:
        """Count the time since the last lap as `stage`."""

    def pause(self) -> None:
        """Leave out the time until the next update, which is not training."""

    def take(self) -> StageTimes | None:
        """Times measured since the last call."""
        return None


class HostStages(Stages):
    """Measures by the host's clock, for training on a CPU."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._seconds, self._updates = _no_times(), 0

    def begin(self) -> None:
        self.lap(OTHER)
        self._updates += 1

    def lap(self, stage: str) -> None:
        now = self._clock()
        if self._last is not None:
            self._seconds[stage] += now - self._last
        self._last = now

    def pause(self) -> None:
        self._last = None

    def take(self) -> StageTimes | None:
        taken = StageTimes(self._updates, self._seconds)
        self._seconds, self._updates = _no_times(), 0
        return taken if taken.updates else None


class Event(Protocol):
    """The methods of torch.cuda.Event that are used here."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class EventStages(Stages):
    """Measures by CUDA events between the GPU's kernels. Events are reused once they were read."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._spare: list[Event] = []
        self._open: deque[tuple[str | None, Event, bool]] = deque()
        """Stage that ends at the event (None for the first after a pause), event, whether an update begins there."""
        self._paused = True
        self._seconds, self._updates = _no_times(), 0

    def begin(self) -> None:
        self._mark(OTHER, begins=True)

    def lap(self, stage: str) -> None:
        self._mark(stage, begins=False)

    def pause(self) -> None:
        self._paused = True

    def take(self) -> StageTimes | None:
        self._read_events()
        taken = StageTimes(self._updates, self._seconds)
        self._seconds, self._updates = _no_times(), 0
        return taken if taken.updates else None

    def _mark(self, stage: str, begins: bool) -> None:
        if len(self._open) >= MOST_EVENTS:
            self._read_events()
            if len(self._open) >= MOST_EVENTS:
                self._paused = True
        if self._paused and (not begins or len(self._open) >= MOST_EVENTS):
            return
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._open.append((None if self._paused else stage, event, begins))
        self._paused = False

    def _read_events(self) -> None:
        """Add up the events that have happened. Asking whether one has happened does not wait."""
        while len(self._open) > 1 and self._open[1][1].query():
            _, before, begins = self._open.popleft()
            stage, event, _ = self._open[0]
            self._updates += begins
            if stage is not None:
                self._seconds[stage] += before.elapsed_time(event) / 1000
            self._spare.append(before)


def _no_times() -> dict[str, float]:
    return defaultdict(float, dict.fromkeys(STAGES, 0.0))


def stages_of(wanted: bool, device: torch.device) -> Stages:
    if not wanted:
        return Stages()
    if device.type == "cuda":
        return EventStages(lambda: torch.cuda.Event(enable_timing=True))
    return HostStages()
