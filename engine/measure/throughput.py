"""Speed and memory of a run, and the stages of an update: data, copy, forward, backward, optimiser, other.

They are logged under `perf`, apart from the metrics, which must be reproducible. An update calls `lap(FORWARD)` at the
end of its forward pass: the time since the previous lap belongs to that stage. Nothing waits. A GPU works
asynchronously, so there each lap records a CUDA event, and reports read those events that have happened by then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from engine.machine.memory import peak_memory_gb

MIN_UPDATES = 10
"""With fewer, a tally has no result: the first updates start processes and set things up."""
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

    def mark(self, stage: str) -> None:
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
        self.mark(OTHER)
        self._updates += 1

    def mark(self, stage: str) -> None:
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


class EventStages(Stages):
    """Measures by CUDA events between the GPU's kernels. Events are reused once they were read."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        """`new_event`: makes a torch.cuda.Event."""
        self._new_event = new_event
        self._spare: list[Any] = []
        self._open: deque[tuple[str | None, Any, bool]] = deque()
        """Stage that ends at the event (None for the first after a pause), event, whether an update begins there."""
        self._paused = True
        self._seconds, self._updates = _no_times(), 0

    def begin(self) -> None:
        self._mark(OTHER, begins=True)

    def mark(self, stage: str) -> None:
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


@dataclass(frozen=True)
class Tally:
    """Updates, images and times of training, without validation and saving."""

    updates: int = 0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    stages: StageTimes | None = None

    def __add__(self, other: Tally) -> Tally:
        both = [stages for stages in (self.stages, other.stages) if stages is not None]
        return Tally(
            self.updates + other.updates,
            self.images + other.images,
            self.seconds + other.seconds,
            self.waited + other.waited,
            both[0] + both[1] if len(both) > 1 else both[0] if both else None,
        )

    @property
    def waited_percent(self) -> float:
        """Percent of the time spent waiting for data: of the device's time if it was measured, else of the host's.

        The device's is right. The host runs ahead of a GPU: it also waits while the GPU still computes, and its wait
        leaves out the time in which the GPU is idle until the host has started the next work.
        """
        if self.stages is not None:
            return self.stages.percent()[DATA]
        return 100 * min(self.waited / max(self.seconds, 1e-9), 1.0)


@dataclass(frozen=True)
class Perf:
    images_per_second: float
    data_wait_percent: float
    """See `Tally.waited_percent`."""
    peak_memory_gb: float
    seconds: float
    stages: StageTimes | None = None

    def as_dict(self) -> dict[str, float]:
        values = {
            "images_per_second": self.images_per_second,
            "data_wait_percent": self.data_wait_percent,
            "peak_memory_gb": self.peak_memory_gb,
            "seconds": self.seconds,
            **self.extra(),
        }
        return {key: round(value, 4) for key, value in values.items()}

    def extra(self) -> dict[str, float]:
        """Milliseconds per update by stage, if stages are measured."""
        stages = {} if self.stages is None else self.stages.milliseconds()
        return {f"{stage}_ms": value for stage, value in stages.items()}

    def words(self) -> str:
        """These values for a log line."""
        if self.stages is None:
            return ""
        stages = " ".join(f"{stage} {percent:.0f}%" for stage, percent in self.stages.percent().items())
        return f", Stages: {stages} of {1000 * self.stages.total / self.stages.updates:.3g} ms"


class Throughput:
    """Counts images, time and waiting for data between two reports, and over the run in a tally."""

    def __init__(self, device: torch.device, stages: Stages | None = None) -> None:
        self._device, self._stages = device, stages or Stages()
        self._began = self._last = time.perf_counter()
        self._images = self._updates = 0
        self._first, self._later, self._started = Tally(), Tally(), False

    def count(self, images: int) -> None:
        """Count one update of `images` images."""
        self._images += images
        self._updates += 1

    def restart(self) -> None:
        """Leave out the time since the last report, which was not training but validation or saving."""
        self._stages.pause()
        self._stages.take()
        self._reset()

    def read(self, waited: float) -> Perf:
        """Speed and memory since the last call. `waited`: seconds that the host waited for data."""
        passed = max(time.perf_counter() - self._last, 1e-9)
        now = Tally(self._updates, self._images, passed, waited, self._stages.take())
        if self._started:
            self._later += now
        else:
            self._first, self._started = now, True
        rate = now.images / passed
        perf = Perf(rate, now.waited_percent, peak_memory_gb(self._device), self.total, now.stages)
        self._reset()
        return perf

    @property
    def tally(self) -> Tally:
        """Totals of the run; if the rest is enough, without the time up to the first report, which includes set-up."""
        return self._later if self._later.updates >= MIN_UPDATES else self._first + self._later

    def _reset(self) -> None:
        self._last, self._images, self._updates = time.perf_counter(), 0, 0

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began
