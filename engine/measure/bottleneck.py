"""Find the bottleneck of a run: data, copies, the optimiser, the loop or the model, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from datasets.base import Stored
from engine.measure.stage_times import BACKWARD, COPY, DATA, FORWARD, OPTIMISER, OTHER, TEACHER, StageTimes
from utils.distributed.world import World, all_gather
from utils.program import as_started_here
from utils.text import counted

MIN_UPDATES = 10
"""With fewer there is no result: the first updates start processes and set things up."""
INPUT, COPYING, OPTIMISING, LOOP, COMPUTE = "input", "copy", "optimiser", "loop", "compute"
THRESHOLDS = {INPUT: 15.0, COPYING: 10.0, OPTIMISING: 25.0, LOOP: 20.0}
"""Percent of the time above which a stage is a bottleneck; of several, the largest is reported."""
STAGE_OF = {INPUT: DATA, COPYING: COPY, OPTIMISING: OPTIMISER, LOOP: OTHER}


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
class Setting:
    """The settings of a run that the advice depends on."""

    device: str
    amp: bool
    compiled: bool
    workers: int | None
    """Loading processes; None if the images are in memory."""
    cores: int
    """CPU cores for this rank's loading processes."""
    stored: Stored = "files"
    remote: bool = False


@dataclass(frozen=True)
class Bottleneck:
    bound: str
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


def find_bottleneck(tally: Tally, setting: Setting, waited: list[float] | None = None) -> Bottleneck | None:
    """The bottleneck, or None after too few updates. `waited`: of each rank, the percent spent waiting for data."""
    if tally.updates < MIN_UPDATES:
        return None
    ranks = waited or [tally.waited_percent]
    longest = max(ranks)
    stages = {} if tally.stages is None else tally.stages.percent()
    percents = {bound: stages.get(stage, 0.0) for bound, stage in STAGE_OF.items()} | {INPUT: longest}
    over = [bound for bound, percent in percents.items() if percent >= THRESHOLDS[bound]]
    bound = max(over, key=lambda name: percents[name]) if over else COMPUTE
    rate = tally.images / max(tally.seconds, 1e-9)
    could_take = rate / max(1 - longest / 100, 0.01)
    device = "GPU" if setting.device in ("cuda", "mps") else "CPU"
    if bound == INPUT:
        slowest = f" of rank {ranks.index(longest)}" if len(ranks) > 1 else ""
        text = _input_bound(f"{device}{slowest}", longest, rate, could_take, setting)
    elif bound == COMPUTE:
        text = _compute_bound(device, longest, stages, setting)
    else:
        text = _otherwise_bound(bound, percents[bound], device)
    computed = stages[FORWARD] + stages[BACKWARD] + stages.get(TEACHER, 0.0) if stages else 100 - longest
    shares = stages or {"computing": 100 - longest, "waiting for data": longest}
    return Bottleneck(bound, percents.get(bound, computed), rate, could_take, as_started_here(text), shares)


def shown_rate(images_per_second: float) -> str:
    """1234.5 -> '1,234', 0.31 -> '0.31'."""
    return f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.2g}"


@dataclass
class BottleneckMonitor:
    """Finds the bottleneck over all ranks: a slow loader on one rank makes the others wait in the all-reduce."""

    setting: Setting
    world: World
    epochs: int = 0

    def first_epoch(self, tally: Tally) -> Bottleneck | None:
        """Call it after every epoch; it returns a result after the first only."""
        self.epochs += 1
        return self.now(tally) if self.epochs == 1 else None

    def now(self, tally: Tally) -> Bottleneck | None:
        """The bottleneck so far. A collective call."""
        return find_bottleneck(tally, self.setting, all_gather([tally.waited_percent], self.world))


def _input_bound(device: str, waited: float, rate: float, could_take: float, setting: Setting) -> str:
    return (
        f"input-bound: the {device} waited for data {waited:.0f} % of the time. The loader delivers "
        f"{shown_rate(rate)} images/s; the model could train on {shown_rate(could_take)}. "
        f"{advise_faster_loading(setting)}."
    )


def advise_faster_loading(setting: Setting) -> str:
    """Advice on faster data loading, in one sentence."""
    if setting.workers is None:
        return "The images are in memory already: try a larger DATA.BATCH_SIZE; see docs/performance.md"
    ways = []
    if setting.remote or setting.workers < setting.cores:
        now = f"now {setting.workers}" if setting.workers else "now 0: the training process loads the images itself"
        ways.append(f"more loading processes (-num_workers, {now})")
    if setting.stored == "files":
        ways.append("packed images (scripts/pack_images.py)")
    elif setting.stored == "tar files":
        ways.append("packed pixels instead of encoded images (scripts/pack_images.py -raw)")
    if not ways:
        return (
            f"There are {setting.workers} loading processes for {counted(setting.cores, 'core')}, and the images are "
            "packed as pixels already: only more cores, a faster disk or less augmentation would help; see "
            "docs/data_speed.md"
        )
    return f"To speed up, try {' or '.join(ways)}; see docs/data_speed.md"


def _compute_bound(device: str, waited: float, stages: dict[str, float], setting: Setting) -> str:
    text = f"compute-bound: the {device} waited for data {waited:.0f} % of the time"
    if stages:
        text += f"; the forward pass took {stages[FORWARD]:.0f} % and the backward pass {stages[BACKWARD]:.0f} %"
    ways = []
    if not setting.amp:
        ways.append("-amp (scripts/choose_precision.py measures the gain)")
    if not setting.compiled and setting.device != "cpu":  # on a CPU it takes minutes, and was never seen to gain them
        ways.append("TRAIN.COMPILE=whole (or blocks)")
    advice = f"To speed up, try {' and '.join(ways)}" if ways else "Only a smaller model or more devices would help"
    return f"{text}. {advice}; see docs/performance.md."


def _otherwise_bound(bound: str, percent: float, device: str) -> str:
    if bound == COPYING:
        return (
            f"copy-bound: the {device} waited {percent:.0f} % of the time for images to be copied to it. Use smaller "
            "images, or a data set that fits into the GPU's memory; see docs/performance.md."
        )
    if bound == OPTIMISING:
        return (
            f"optimiser-bound: the optimiser's step took {percent:.0f} % of the time. A larger DATA.BATCH_SIZE or "
            "TRAIN.ACCUM_ITER means fewer steps; see docs/performance.md."
        )
    return (
        f"loop-bound: {percent:.0f} % of the time went into neither data nor model. Try a larger DATA.BATCH_SIZE or "
        "REPORT_FREQ; see docs/performance.md."
    )
