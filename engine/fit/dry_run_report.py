"""What a dry run measured, in words: memory, time, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

import torch

from engine.checkpoint.host_copy import size_words
from engine.machine.memory import in_gib
from engine.measure.progress import clock
from utils.config import Config
from utils.distributed.world import World

NEARLY_FULL = 0.9
NEARLY_ALIKE = 1.25
"""Loading and computing times whose ratio is below this hold each other up."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a device at the peak of an update, and what stands there between updates."""

    peak: int
    weights: int
    gradients: int
    optimiser: int
    average: int
    teacher: int = 0

    @property
    def rest(self) -> int:
        return max(0, self.peak - self.weights - self.gradients - self.optimiser - self.average - self.teacher)


@dataclass(frozen=True)
class Speed:
    updates: list[float]
    """Seconds of each that was timed."""
    loading: float
    """Seconds in which the batches of an update come where nobody computes."""
    in_memory: bool
    faster: str
    """What would make loading faster, in a sentence."""
    validation: float
    """Seconds of one."""

    @property
    def computing(self) -> float:
        return median(self.updates)

    def of_an_update(self, on_cpu: bool) -> float:
        """On a CPU, loading processes take their time from the same cores."""
        if on_cpu and not self.in_memory:
            return self.computing + self.loading
        return max(self.computing, self.loading)


@dataclass(frozen=True)
class Costs:
    memory: Memory
    total: int | None
    speed: Speed
    checkpoint: int
    place: Path
    """The folder that checkpoints go to, as far as it is there."""
    updates: int
    """Those that are left."""
    per_epoch: int


def told(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    yield from _memory(config, costs, world, device)
    yield from _time(config, costs, world, device)
    yield from _disk(config, costs, world)


def _memory(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    memory = costs.memory
    of = f" of {in_gib(costs.total)}" if costs.total else ""
    # Where weights are dealt out, a CPU's tensors are not counted, but the process is (engine/fit/dry_run.py).
    whole = config.DIST.STRATEGY == "fsdp" and world.size > 1
    on_cpu = "for each process, its libraries included" if whole else "for the tensors of each process"
    what = on_cpu if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(memory.peak)}{of} at the peak of an update, {what}:"
    shares = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimiser": memory.optimiser,
        "average": memory.average,
        "teacher": memory.teacher,
        "activations and the rest": memory.rest,
    }
    yield "           " + ", ".join(f"{name} {in_gib(size)}" for name, size in shares.items() if size)
    if costs.total and memory.peak > NEARLY_FULL * costs.total:
        yield f"           nearly all there is: {_room(config)} leaves room"
    if config.TRAIN.SIZE_SCHEDULE or config.TRAIN.TOKEN_DROP:
        yield "           later epochs take more memory and time: they see more of each image"


def _time(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    speed = costs.speed
    images = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * world.size
    update = speed.of_an_update(device.type == "cpu")
    computed, loaded = images / speed.computing, images / max(speed.loading, 1e-9)
    yield (
        f"time       {speed.computing:.3g} s to compute an update ({computed:,.0f} img/s; median of "
        f"{len(speed.updates)} timed), {speed.loading:.2g} s to load its images ({loaded:,.0f} img/s)"
    )
    yield f"           bound by {_bound(speed)}"
    epochs = costs.updates / costs.per_epoch
    validations = max(1, round(epochs / config.VALIDATE_FREQ)) if costs.updates else 0
    left = costs.updates * update + validations * speed.validation
    end = datetime.now() + timedelta(seconds=left)
    yield (
        f"           an epoch of {costs.per_epoch:,} updates about {clock(costs.per_epoch * update)}, a validation "
        f"about {clock(speed.validation)}"
    )
    yield (
        f"           {costs.updates:,} updates to go ({epochs:,.1f} epochs): about {clock(left)}, until "
        f"{end:%Y-%m-%d %H:%M} if begun now; without saving, and on a machine as busy as now"
    )


def _room(config: Config) -> str:
    """What takes less memory and is not done yet."""
    ways = ["a smaller MODEL.NAME" if config.DATA.BATCH_SIZE == 1 else "a smaller -batch_size"]
    ways += ["-amp"] if not config.AMP.ENABLED else []
    ways += ["TRAIN.GRAD_CHECKPOINT=blocks"] if config.TRAIN.GRAD_CHECKPOINT == "none" else []
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _bound(speed: Speed) -> str:
    if speed.loading > NEARLY_ALIKE * speed.computing:
        return f"data. {speed.faster}"
    if speed.computing > NEARLY_ALIKE * speed.loading:
        return "the model: images come faster than it takes them"
    return "both: images come about as fast as the model takes them"


def _disk(config: Config, costs: Costs, world: World) -> Iterator[str]:
    one = costs.checkpoint * (world.size if config.DIST.STRATEGY == "fsdp" else 1)
    kept = config.KEEP_LAST + 1  # the best one
    free = shutil.disk_usage(costs.place).free
    text = f"disk       {size_words(one)} a checkpoint"
    if not config.KEEP_LAST:
        yield f"{text}, and all are kept (KEEP_LAST 0); {size_words(free)} free in {costs.place}"
        return
    needed = one * (kept + 1)  # a new one is whole before an old one goes
    in_all = f"up to {size_words(needed)} in all (KEEP_LAST {config.KEEP_LAST})"
    yield f"{text}, {in_all}; {size_words(free)} free in {costs.place}"
    if config.KEEP_EVERY:
        yield f"           and one more for every {config.KEEP_EVERY} epochs (KEEP_EVERY)"
    if needed > free:
        yield "           that is too little: name another -output or SAVE, or set KEEP_LAST=1"
