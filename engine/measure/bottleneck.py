"""What holds a run up, in one sentence, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from datasets.base import Stored
from engine.measure.stage_times import BACKWARD, COPY, DATA, FORWARD, OPTIMISER, OTHER, TEACHER, StageTimes
from utils.distributed.world import World, all_gather

LEAST_UPDATES = 10
"""Fewer say nothing: the first ones start processes and set things up."""
INPUT, COPYING, OPTIMISING, LOOP, COMPUTE = "input", "copy", "optimiser", "loop", "compute"
THRESHOLDS = {INPUT: 15.0, COPYING: 10.0, OPTIMISING: 25.0, LOOP: 20.0}
"""Percent of the time from which a stage is what holds a run up; of several, the one that takes most."""
MADE_OF = {INPUT: DATA, COPYING: COPY, OPTIMISING: OPTIMISER, LOOP: OTHER}


@dataclass(frozen=True)
class Tally:
    """Training so far, without validation and saving."""

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
        """Of the device's time where it was measured, else of the host's."""
        if self.stages is not None:
            return self.stages.percent()[DATA]
        return 100 * min(self.waited / max(self.seconds, 1e-9), 1.0)


@dataclass(frozen=True)
class Setting:
    """What of a run's settings the advice depends on."""

    device: str
    amp: bool
    compiled: bool
    workers: int | None
    """Loading processes; None where images lie in memory."""
    cores: int
    """For the loading processes of this rank"""
    stored: Stored = "files"
    remote: bool = False


@dataclass(frozen=True)
class Verdict:
    bound: str
    percent: float
    """Of the time, what the run is bound by took."""
    images_per_second: float
    could_take: float
    """Images a second, if data were always there."""
    text: str

    def as_dict(self) -> dict[str, Any]:
        rounded = {"percent": round(self.percent, 2), "images_per_second": round(self.images_per_second, 2)}
        return {**asdict(self), **rounded, "could_take": round(self.could_take, 2)}


def judge(tally: Tally, setting: Setting, waited: list[float] | None = None) -> Verdict | None:
    """None after too few updates. `waited`: percent of the time each rank waited for data, where there are several."""
    if tally.updates < LEAST_UPDATES:
        return None
    ranks = waited or [tally.waited_percent]
    most = max(ranks)
    shares = {} if tally.stages is None else tally.stages.percent()
    found = {bound: shares.get(stage, 0.0) for bound, stage in MADE_OF.items()} | {INPUT: most}
    over = [bound for bound, percent in found.items() if percent >= THRESHOLDS[bound]]
    bound = max(over, key=lambda name: found[name]) if over else COMPUTE
    rate = tally.images / max(tally.seconds, 1e-9)
    could = rate / max(1 - most / 100, 0.01)
    who = "GPU" if setting.device in ("cuda", "mps") else "CPU"
    if bound == INPUT:
        slowest = f" of rank {ranks.index(most)}" if len(ranks) > 1 else ""
        text = _input(f"{who}{slowest}", most, rate, could, setting)
    elif bound == COMPUTE:
        text = _compute(who, most, shares, setting)
    else:
        text = _of_the_rest(bound, found[bound], who)
    computed = shares[FORWARD] + shares[BACKWARD] + shares.get(TEACHER, 0.0) if shares else 100 - most
    return Verdict(bound, found.get(bound, computed), rate, could, text)


@dataclass
class Judge:
    """Knows the settings, and asks all ranks: a slow loader on one of them lets the others wait for its gradients."""

    setting: Setting
    world: World
    epochs: int = 0

    def first_epoch(self, tally: Tally) -> Verdict | None:
        """At the end of every epoch; a verdict at the end of the first."""
        self.epochs += 1
        return self.now(tally) if self.epochs == 1 else None

    def now(self, tally: Tally) -> Verdict | None:
        """All ranks ask together."""
        return judge(tally, self.setting, all_gather([tally.waited_percent], self.world))


def _input(who: str, waited: float, rate: float, could: float, setting: Setting) -> str:
    text = (
        f"input-bound: the {who} waited {waited:.0f} % of the time; the loader gives {rate:,.0f} img/s, the model "
        f"could take {could:,.0f}."
    )
    return f"{text} {load_faster(setting)}."


def load_faster(setting: Setting) -> str:
    """What can still be done for loading, in a sentence."""
    if setting.workers is None:
        return "The images lie in memory already: a larger DATA.BATCH_SIZE would help; see docs/performance.md"
    ways = []
    if setting.remote or setting.workers < setting.cores:
        now = f"now {setting.workers}" if setting.workers else "now 0: the training process loads them itself"
        ways.append(f"more loading processes (-num_workers, {now})")
    if setting.stored == "files":
        ways.append("images packed once (scripts/pack_images.py)")
    elif setting.stored == "tar files":
        ways.append("pixels packed instead of encoded images (scripts/pack_images.py -raw)")
    if not ways:
        return (
            f"There are {setting.workers} loading processes for {setting.cores} cores, and the images are pixels "
            "already: what is left is more cores, a faster disk, or less augmentation; see docs/data_speed.md"
        )
    text = f"{', or '.join(ways)}{',' * (len(ways) > 1)} would help; see docs/data_speed.md"
    return text[:1].upper() + text[1:]


def _compute(who: str, waited: float, shares: dict[str, float], setting: Setting) -> str:
    text = f"compute-bound: the {who} waited for data {waited:.0f} % of the time"
    if shares:
        text += f", and computed forward {shares[FORWARD]:.0f} % and backward {shares[BACKWARD]:.0f} %"
    ways = []
    if not setting.amp:
        ways.append("-amp (scripts/choose_precision.py tells what it brings)")
    if not setting.compiled and setting.device != "cpu":  # there it takes minutes, and was not seen to repay them
        ways.append("TRAIN.COMPILE")
    advice = f"Faster may be: {' and '.join(ways)}" if ways else "What is left is a smaller model, or more devices"
    return f"{text}. {advice}; see docs/performance.md."


def _of_the_rest(bound: str, percent: float, who: str) -> str:
    if bound == COPYING:
        return (
            f"copy-bound: the {who} waited {percent:.0f} % of the time for images on their way from the host's memory; "
            "smaller ones, or a data set that fits into the GPU's memory, would help; see docs/performance.md."
        )
    if bound == OPTIMISING:
        return (
            f"optimiser-bound: {percent:.0f} % of the time went into moving the weights, not into gradients; a larger "
            "DATA.BATCH_SIZE, or TRAIN.ACCUM_ITER, would spread it over more images; see docs/performance.md."
        )
    return (
        f"held up by the loop: {percent:.0f} % of the time went neither into data nor into the model; a larger "
        "DATA.BATCH_SIZE, or a larger REPORT_FREQ, would spread it over more images; see docs/performance.md."
    )
