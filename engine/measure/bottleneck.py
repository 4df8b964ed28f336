"""Find the bottleneck of a run: data, copies, the optimiser, the loop or the model, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from datasets.base import Stored
from engine.measure.throughput import BACKWARD, COPY, DATA, FORWARD, MIN_UPDATES, OPTIMISER, OTHER, TEACHER, Tally
from utils.distributed.world import World, all_gather
from utils.program import started_as
from utils.text import counted

INPUT, COPYING, OPTIMISING, LOOP, COMPUTE = "input", "copy", "optimiser", "loop", "compute"
THRESHOLDS = {INPUT: 15.0, COPYING: 10.0, OPTIMISING: 25.0, LOOP: 20.0}
"""Percent of the time above which a stage is a bottleneck; of several, the largest is reported."""
STAGE_OF = {INPUT: DATA, COPYING: COPY, OPTIMISING: OPTIMISER, LOOP: OTHER}


_OTHERWISE = {
    COPYING: "the {} waited {:.0f} % of the time for images to be copied to it. Use smaller images, or a data set that "
    "fits into the GPU's memory",
    OPTIMISING: "the optimiser's step took {1:.0f} % of the time. A larger DATA.BATCH_SIZE or TRAIN.ACCUM_ITER means "
    "fewer steps",
    LOOP: "{1:.0f} % of the time went into neither data nor model. Try a larger DATA.BATCH_SIZE or REPORT_FREQ",
}


@dataclass(frozen=True)
class Setting:
    """The settings of a run that the advice depends on."""

    device: str
    amp: bool
    """AMP is on, or the device gains nothing from it."""
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
        text = (
            f"input-bound: the {device}{slowest} waited for data {longest:.0f} % of the time. The loader delivers "
            f"{shown_rate(rate)} images/s; the model could train on {shown_rate(could_take)}. "
            f"{advise_faster_loading(setting)}."
        )
    elif bound == COMPUTE:
        text = _compute_bound(device, longest, stages, setting)
    else:
        text = f"{bound}-bound: {_OTHERWISE[bound].format(device, percents[bound])}; see docs/performance.md."
    computed = stages[FORWARD] + stages[BACKWARD] + stages.get(TEACHER, 0.0) if stages else 100 - longest
    shares = stages or {"computing": 100 - longest, "waiting for data": longest}
    return Bottleneck(bound, percents.get(bound, computed), rate, could_take, text, shares)


def shown_rate(images_per_second: float) -> str:
    """1234.5 -> '1,234', 0.31 -> '0.31'."""
    return f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.2g}"


def bottleneck_of_all(tally: Tally, setting: Setting, world: World) -> Bottleneck | None:
    """The bottleneck over all ranks: a slow loader on one makes the others wait in the all-reduce.

    A collective call.
    """
    return find_bottleneck(tally, setting, all_gather([tally.waited_percent], world))


def advise_faster_loading(setting: Setting) -> str:
    """Advice on faster data loading, in one sentence."""
    if setting.workers is None:
        return "The images are in memory already: try a larger DATA.BATCH_SIZE; see docs/performance.md"
    ways = []
    if setting.remote or setting.workers < setting.cores:
        now = f"now {setting.workers}" if setting.workers else "now 0: the training process loads the images itself"
        ways.append(f"more loading processes (-num_workers, {now})")
    if setting.stored == "files":
        ways.append(f"packed images ({started_as('scripts/pack_images.py')})")
    elif setting.stored == "tar files":
        ways.append(f"packed pixels instead of encoded images ({started_as('scripts/pack_images.py')} -raw)")
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
        ways.append(f"-amp ({started_as('scripts/choose_precision.py')} measures the gain)")
    if not setting.compiled and setting.device != "cpu":  # on a CPU it takes minutes, and was never seen to gain them
        ways.append("TRAIN.COMPILE=whole (or blocks)")
    advice = f"To speed up, try {' and '.join(ways)}" if ways else "Only a smaller model or more devices would help"
    return f"{text}. {advice}; see docs/performance.md."
