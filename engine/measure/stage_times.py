"""Where the time of an update goes: waiting for data, copying, forward, backward, optimiser, all else.

An update says `lap(FORWARD)` where its forward pass ends: what passed since the lap before was that. Nothing is waited
for. A GPU works long after it was asked to, so there each lap leaves an event among the GPU's own work, and the events
are looked at when a report is due, those that have happened by then.
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
"""A stage of distillation alone: where there is no teacher, it is not spoken of."""
MOST_EVENTS = 4096
"""Of those the GPU has not come to. A host this far ahead leaves updates unmeasured rather than memory unbounded."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds by stage, over so many updates."""

    updates: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def percent(self) -> dict[str, float]:
        whole = max(self.total, 1e-12)
        return {stage: 100 * time / whole for stage, time in self.seconds.items()}

    def milliseconds(self) -> dict[str, float]:
        """Of one update."""
        return {stage: 1000 * time / max(self.updates, 1) for stage, time in self.seconds.items()}

    def __add__(self, other: StageTimes) -> StageTimes:
        sums = {stage: time + other.seconds.get(stage, 0.0) for stage, time in self.seconds.items()}
        return StageTimes(self.updates + other.updates, {**other.seconds, **sums})


class Stages:
    """Measures nothing: what an update calls unless REPORT_STAGES asks for more."""

    def begin(self) -> None:
        """An update begins; what passed since the last one ended was neither of its parts."""

    def lap(self, stage: str) -> None:
        """What passed since the last lap was this."""

    def pause(self) -> None:
        """What follows, up to the next update, is not training."""

    def take(self) -> StageTimes | None:
        """What was measured since the last call."""
        return None


class HostStages(Stages):
    """By the clock of the host, which on a CPU does the work itself."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._seconds, self._updates = _nothing(), 0

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
        self._seconds, self._updates = _nothing(), 0
        return taken if taken.updates else None


class Event(Protocol):
    """What is used of torch's."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class EventStages(Stages):
    """By events in the order of the device's own work; used again once they were looked at."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._spare: list[Event] = []
        self._open: deque[tuple[str | None, Event, bool]] = deque()
        """Stage that ends here (None: a beginning after a pause), event, whether an update begins here."""
        self._fresh = True
        self._seconds, self._updates = _nothing(), 0

    def begin(self) -> None:
        self._mark(OTHER, begins=True)

    def lap(self, stage: str) -> None:
        self._mark(stage, begins=False)

    def pause(self) -> None:
        self._fresh = True

    def take(self) -> StageTimes | None:
        self._look()
        taken = StageTimes(self._updates, self._seconds)
        self._seconds, self._updates = _nothing(), 0
        return taken if taken.updates else None

    def _mark(self, stage: str, begins: bool) -> None:
        if len(self._open) >= MOST_EVENTS:
            self._look()
            if len(self._open) >= MOST_EVENTS:
                self._fresh = True
        if self._fresh and (not begins or len(self._open) >= MOST_EVENTS):
            return
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._open.append((None if self._fresh else stage, event, begins))
        self._fresh = False

    def _look(self) -> None:
        """Add up what the device has done. Asking whether it has does not wait for it."""
        while len(self._open) > 1 and self._open[1][1].query():
            _, before, begins = self._open.popleft()
            stage, event, _ = self._open[0]
            self._updates += begins
            if stage is not None:
                self._seconds[stage] += before.elapsed_time(event) / 1000
            self._spare.append(before)


def _nothing() -> dict[str, float]:
    return defaultdict(float, dict.fromkeys(STAGES, 0.0))


def stages_of(wanted: bool, device: torch.device) -> Stages:
    if not wanted:
        return Stages()
    if device.type == "cuda":
        return EventStages(lambda: torch.cuda.Event(enable_timing=True))
    return HostStages()
