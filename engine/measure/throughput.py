"""Measures the speed and memory of a run and the stages of an update, and finds the bottleneck.

The stages are data, copy, forward, backward and optimiser. An update calls `mark(FORWARD)` at the end of its forward
pass: the time since the previous mark belongs to that stage. The host never waits for the device. A GPU works
asynchronously, so there each mark records a CUDA event, and reports read those events that have happened by then.

The log has these values under `perf`, apart from the metrics, which must be reproducible.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from datasets.base import StorageKind
from engine.machine.memory import peak_memory_gb
from utils.machine.cpus import core_seconds
from utils.program import started_as
from utils.text import counted

MIN_UPDATES = 10
"""With fewer, a tally has no result: the first updates start processes and set things up."""
DATA = "data"
COPY = "copy"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMISER = "optimiser"
OTHER = "other"
STAGES = (DATA, COPY, FORWARD, BACKWARD, OPTIMISER, OTHER)
TEACHER = "teacher"
"""Stage of distillation; runs without a teacher do not report it."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds by stage, summed over `updates` updates."""

    updates: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def percent(self) -> dict[str, float]:
        """Return the percent of the time that each stage took."""
        total = max(self.total, 1e-12)
        return {stage: 100 * time / total for stage, time in self.seconds.items()}

    def milliseconds(self) -> dict[str, float]:
        """Return the mean milliseconds per update, by stage."""
        return {stage: 1000 * time / max(self.updates, 1) for stage, time in self.seconds.items()}

    def __add__(self, other: StageTimes) -> StageTimes:
        # The sums come last: they replace the other's times of stages that both have.
        sums = {stage: time + other.seconds.get(stage, 0.0) for stage, time in self.seconds.items()}
        return StageTimes(self.updates + other.updates, {**other.seconds, **sums})


NOT_MEASURED = StageTimes(0, {})


class Stages:
    """Interface that an update marks its stages with. This class measures nothing; it is used without REPORT_STAGES."""

    def begin(self) -> None:
        """Begin an update; the time since the previous one ended is counted as OTHER."""

    def mark(self, stage: str) -> None:
        """Count the time since the last mark as `stage`."""

    def pause(self) -> None:
        """Leave out the time until the next update, which is not training."""

    def take(self) -> StageTimes:
        """Times measured since the last call."""
        return NOT_MEASURED


@dataclass(frozen=True)
class Tally:
    """Updates, images and times of training, without validation and saving."""

    updates: int = 0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds that the host waited for data"""
    stages: StageTimes = NOT_MEASURED
    idle: float = 0.0
    """Core seconds in which nothing ran on this process's cores, if it trains on a CPU (`core_seconds`)"""
    others: float = 0.0
    """Core seconds that other programs used, likewise"""

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            updates=self.updates + other.updates,
            images=self.images + other.images,
            seconds=self.seconds + other.seconds,
            waited=self.waited + other.waited,
            stages=self.stages + other.stages,
            idle=self.idle + other.idle,
            others=self.others + other.others,
        )

    @property
    def waited_percent(self) -> float:
        """Percent of the time spent waiting for data: of the device's time if stages are measured, else of the host's.

        Only the device's time is exact, because the host runs ahead of a GPU. The host may wait for data while the GPU
        still computes, which costs nothing. And after a wait, the GPU stays idle until the host has started the next
        work, which the host does not count as waiting.
        """
        if self.stages.updates:
            return self.stages.percent()[DATA]
        return 100 * min(self.waited / max(self.seconds, 1e-9), 1.0)


@dataclass(frozen=True)
class Perf:
    """Speed and memory between two reports, for the log."""

    images_per_second: float
    data_wait_percent: float
    """See `Tally.waited_percent`."""
    peak_memory_gb: float
    seconds: float
    """Since the run began"""
    stages: StageTimes = NOT_MEASURED

    def as_dict(self) -> dict[str, float]:
        values = vars(self) | self.extra()
        return {key: round(value, 4) for key, value in values.items() if key != "stages"}

    def extra(self) -> dict[str, float]:
        """Return the milliseconds per update by stage; empty if stages are not measured."""
        return {f"{stage}_ms": value for stage, value in self.stages.milliseconds().items()}

    def words(self) -> str:
        """Describe the stages for the end of a log line; '' if they are not measured."""
        if not self.stages.updates:
            return ""
        stages = " ".join(f"{stage} {percent:.0f}%" for stage, percent in self.stages.percent().items())
        return f", Stages: {stages} of {1000 * self.stages.total / self.stages.updates:.3g} ms"


class Throughput:
    """Counts images, time and waiting for data between two reports, and over the run in a tally."""

    def __init__(self, device: torch.device, stages: Stages | None = None) -> None:
        """`stages`: measures the stages of updates; None if they are not measured."""
        self._device = device
        self._stages = stages or Stages()
        self._began = time.perf_counter()
        self._reset()
        self._up_to_first_report = Tally()
        """Updates before the first report, which include set-up"""
        self._since_first_report = Tally()
        self._has_reported = False

    def count(self, images: int) -> None:
        """Count one update of `images` images."""
        self._images += images
        self._updates += 1

    def restart(self) -> None:
        """Leave out the time since the last report, which was spent on validation or saving, not on training."""
        self._stages.pause()
        self._stages.take()
        self._reset()

    def read(self, waited: float) -> Perf:
        """Return speed and memory since the last call, and add them to the tally.

        `waited`: seconds that the host waited for data.
        """
        elapsed = max(time.perf_counter() - self._last, 1e-9)
        idle, others = self._core_seconds()  # core seconds since the process began
        idle_before, others_before = self._core_seconds_before
        since_last = Tally(
            updates=self._updates,
            images=self._images,
            seconds=elapsed,
            waited=waited,
            stages=self._stages.take(),
            idle=idle - idle_before,
            others=others - others_before,
        )
        # The time up to the first report includes set-up, so it is kept apart: `tally` leaves it out if it can.
        if self._has_reported:
            self._since_first_report += since_last
        else:
            self._up_to_first_report = since_last
            self._has_reported = True
        perf = Perf(
            images_per_second=since_last.images / elapsed,
            data_wait_percent=since_last.waited_percent,
            peak_memory_gb=peak_memory_gb(self._device),
            seconds=self.total,
            stages=since_last.stages,
        )
        self._reset()
        return perf

    @property
    def tally(self) -> Tally:
        """Totals of the run without the time up to the first report, which includes set-up.

        That time is included as long as too few updates came after it.
        """
        later = self._since_first_report
        return later if later.updates >= MIN_UPDATES else self._up_to_first_report + later

    def _reset(self) -> None:
        self._last = time.perf_counter()
        self._images = 0
        self._updates = 0
        self._core_seconds_before = self._core_seconds()

    def _core_seconds(self) -> tuple[float, float]:
        """Return the idle core seconds and those of other programs; zeros where a GPU trains."""
        return core_seconds() if self._device.type == "cpu" else (0.0, 0.0)

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began


INPUT = "input"
LOOP = "loop"
COMPUTE = "compute"
THRESHOLDS = {INPUT: 15.0, COPY: 10.0, OPTIMISER: 25.0, LOOP: 20.0}
"""Percent of the time above which a stage is a bottleneck; of several, the largest is reported."""
# Fractions of the time of this process's cores. Other programs slow it if they take at least TAKEN, and at most IDLE is
# left idle.
TAKEN = 0.1
IDLE = 0.2


_TEXTS = {
    COPY: "the {device} waited {percent:.0f} % of the time for images to be copied to it. Use smaller images, or a "
    "data set that fits into the GPU's memory",
    OPTIMISER: "the optimiser's step took {percent:.0f} % of the time. A larger DATA.BATCH_SIZE or TRAIN.ACCUM_ITER "
    "means fewer steps",
    LOOP: "{percent:.0f} % of the time went into neither data nor model. Try a larger DATA.BATCH_SIZE or REPORT_FREQ",
}


@dataclass(frozen=True)
class Setting:
    """The settings of a run that the advice depends on."""

    device: str
    amp: bool
    """AMP is on, or the device gains nothing from it."""
    compiled: bool
    """The model is compiled, or `auto` has found that it cannot be or would not gain."""
    workers: int | None
    """Loading processes; None if the images are in memory."""
    cores: int
    """CPU cores for this rank's loading processes."""
    stored: StorageKind = "files"
    remote: bool = False
    threads: int = 1
    """Threads that this process computes with on a CPU."""
    several: bool = False
    """Images have several labels, which packed images cannot have."""
    faster: tuple[str, ...] = ()
    """Settings with which this model may compute faster"""


@dataclass(frozen=True)
class Bottleneck:
    """The stage that limits the speed of a training, with advice."""

    bound: str
    """INPUT, COPY, OPTIMISER, LOOP or COMPUTE"""
    percent: float
    """Percent of the time that the bottleneck took."""
    images_per_second: float
    could_take: float
    """Images per second if the data were always ready."""
    text: str
    shares: dict[str, float]
    """Percent of the time by stage, or of computing and waiting for data if stages are not measured"""

    def as_dict(self) -> dict[str, Any]:
        rounded = {"percent": round(self.percent, 2), "images_per_second": round(self.images_per_second, 2)}
        shares = {stage: round(percent, 2) for stage, percent in self.shares.items()}
        return {**asdict(self), **rounded, "could_take": round(self.could_take, 2), "shares": shares}


def find_bottleneck(tally: Tally, setting: Setting, waited: list[float]) -> Bottleneck | None:
    """Find the stage that limits the speed, with advice; None after too few updates.

    `setting`: the settings that the advice depends on.
    `waited`: the percent that each rank spent waiting for data. A slow loader on one rank makes the others wait for it,
    so the longest wait counts.
    """
    if tally.updates < MIN_UPDATES:
        return None

    # Each bound is a stage, such as "input-bound" for waiting for data. The largest that exceeds its threshold limits
    # the speed; without any, the model's computation does, as it should.
    longest_wait = max(waited)
    stages = tally.stages.percent()  # empty if stages are not measured
    percents = {INPUT: longest_wait}
    percents |= {stage: stages.get(stage, 0.0) for stage in (COPY, OPTIMISER)}
    percents[LOOP] = stages.get(OTHER, 0.0)
    too_long = [bound for bound, percent in percents.items() if percent >= THRESHOLDS[bound]]
    bound = max(too_long, key=lambda name: percents[name]) if too_long else COMPUTE

    # The text, with advice.
    rate = tally.images / max(tally.seconds, 1e-9)
    rate_without_wait = rate / max(1 - longest_wait / 100, 0.01)
    device = "GPU" if setting.device in ("cuda", "mps") else "CPU"
    if bound == INPUT:
        slowest_rank = f" of rank {waited.index(longest_wait)}" if len(waited) > 1 else ""
        text = (
            f"input-bound: the {device}{slowest_rank} waited for data {longest_wait:.0f} % of the time. The loader "
            f"delivers {shown_rate(rate)} images/s; the model could train on {shown_rate(rate_without_wait)}. "
            f"{advise_faster_loading(setting)}."
        )
    elif bound == COMPUTE:
        text = f"compute-bound: the {device} waited for data {longest_wait:.0f} % of the time"
        if stages:
            text += f"; the forward pass took {stages[FORWARD]:.0f} % and the backward pass {stages[BACKWARD]:.0f} %"
        # With several processes, the time that "other programs" used is perhaps that of the run's other processes.
        others = _describe_other_programs(tally, setting.cores) if len(waited) == 1 else ""
        text += f". {advise_faster_computing(setting, others)}; see docs/performance.md."
    else:
        words = _TEXTS[bound].format(device=device, percent=percents[bound])
        text = f"{bound}-bound: {words}; see docs/performance.md."

    # The percent of the time by stage, and that of the model's computation.
    if stages:
        shares = stages
        percents[COMPUTE] = stages[FORWARD] + stages[BACKWARD] + stages.get(TEACHER, 0.0)
    else:
        shares = {"computing": 100 - longest_wait, "waiting for data": longest_wait}
        percents[COMPUTE] = 100 - longest_wait
    return Bottleneck(
        bound=bound,
        percent=percents[bound],
        images_per_second=rate,
        could_take=rate_without_wait,
        text=text,
        shares=shares,
    )


def _describe_other_programs(tally: Tally, cores: int) -> str:
    """Describe how much of this process's cores other programs used; '' if it was little, or enough was left idle."""
    core_time = tally.seconds * cores
    if tally.others < max(TAKEN * core_time, 1e-9) or tally.idle > IDLE * core_time:
        return ""
    used = f"{tally.others / tally.seconds:.1f} of the {counted(cores, 'core')}"
    return f"Other programs used {used}: without them, training is faster"


def shown_rate(images_per_second: float) -> str:
    """Round a rate for the log: 1234.5 -> '1,234', 0.31 -> '0.31'."""
    return f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.2g}"


def advise_faster_computing(setting: Setting, others: str) -> str:
    """Advise on faster computing, in one or two sentences without the last full stop.

    `others`: a sentence on other programs that use the cores, which comes first; '' if they use little.
    """
    ways = list(setting.faster)
    if not setting.amp:
        ways.append(f"-amp ({started_as('scripts/choose_precision.py')} measures the gain)")
    if not setting.compiled and setting.device != "cpu":  # on a CPU it takes minutes, and was never seen to gain
        ways.append("TRAIN.COMPILE=whole (or blocks)")
    if setting.device == "cpu" and setting.threads > 1:
        ways.append("THREADS=1 (faster for a small model or on a busy CPU; -dry_run measures it)")
    if not ways and others:
        return others  # less work for the cores is no remedy for programs that take them
    if not ways:
        return "Only a smaller model, smaller images or more devices would help"
    advice = f"To speed up, try {' and '.join(ways)}"
    return f"{others}. {advice}" if others else advice


def advise_faster_loading(setting: Setting) -> str:
    """Advise on faster data loading, in one sentence without the full stop."""
    if setting.workers is None:
        return "The images are in memory already: try a larger DATA.BATCH_SIZE; see docs/performance.md"
    ways = []
    if setting.remote or setting.workers < setting.cores:
        current = f"now {setting.workers}" if setting.workers else "now 0: the training process loads the images itself"
        ways.append(f"more loading processes (-num_workers, {current})")
    has_one_label = not setting.several  # images with several labels cannot be packed
    if setting.stored == "files" and has_one_label:
        ways.append(f"packed images ({started_as('scripts/pack_images.py')})")
    elif setting.stored == "tar files":
        ways.append(f"packed pixels instead of encoded images ({started_as('scripts/pack_images.py')} -raw)")
    if not ways:
        packed = ", and the images are packed as pixels already" if setting.stored == "pixels" else ""
        return (
            f"There are {setting.workers} loading processes for {counted(setting.cores, 'core')}{packed}: only more "
            "cores, a faster disk or less augmentation would help; see docs/performance.md"
        )
    return f"To speed up, try {' or '.join(ways)}; see docs/performance.md"
