"""Report of a dry run: memory, time, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

import torch

from engine.checkpoint.host_copy import size_words
from engine.machine.context import global_batch
from engine.machine.memory import in_gib
from engine.measure.progress import clock
from utils.config import Config
from utils.distributed.world import World
from utils.text import counted

NEARLY_FULL = 0.9
BALANCED = 1.25
"""Below this ratio of loading to computing time, neither alone is the bottleneck."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a device at the peak of an update, and what takes them."""

    peak: int
    held: dict[str, int]
    """Weights, gradients, optimiser, and what the run's abilities keep."""

    @property
    def rest(self) -> int:
        return max(0, self.peak - sum(self.held.values()))


@dataclass(frozen=True)
class Speed:
    updates: list[float]
    """Seconds of each timed update."""
    loading: float
    """Seconds to load the batches of an update while nothing is computed."""
    in_memory: bool
    faster: str
    """Advice on faster loading, a sentence."""
    validation: float
    """Seconds per validation."""

    @property
    def computing(self) -> float:
        return median(self.updates)

    def of_an_update(self, on_cpu: bool) -> float:
        """Expected seconds per update. On a CPU, data workers share the cores with training."""
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
    """The folder of the run, or its nearest parent that exists."""
    updates: int
    """Updates left to train."""
    per_epoch: int
    base: int = 0
    """Bytes of the frozen weights that a run with adapters saves once."""


def cost_lines(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    yield from _memory(config, costs, world, device)
    yield from _time(config, costs, world, device)
    yield from _disk(config, costs, world)


def _memory(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    memory = costs.memory
    of = f" of {in_gib(costs.total)}" if costs.total else ""
    # With sharded weights on a CPU, the memory of the whole process is measured (engine/fit/dry_run.py).
    whole = config.DIST.STRATEGY == "fsdp" and world.size > 1
    on_cpu = "for each process, its libraries included" if whole else "for the tensors of each process"
    what = on_cpu if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(memory.peak)}{of} at the peak of an update, {what}:"
    shares = {**memory.held, "activations and the rest": memory.rest}
    yield "           " + ", ".join(f"{name} {in_gib(size)}" for name, size in shares.items() if size)
    if costs.total and memory.peak > NEARLY_FULL * costs.total:
        yield f"           this is nearly all memory; to save some: {_savings(config)}"
    if config.TRAIN.SIZE_SCHEDULE or (config.TRAIN.TOKEN_DROP and config.TRAIN.TOKEN_DROP_TAIL):
        yield "           epochs with larger images, or without dropped tokens, take more memory and time"


def _time(config: Config, costs: Costs, world: World, device: torch.device) -> Iterator[str]:
    speed = costs.speed
    images = global_batch(config, world)
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
        f"           an epoch of {counted(costs.per_epoch, 'update')} takes about {clock(costs.per_epoch * update)}, a "
        f"validation about {clock(speed.validation)}"
    )
    yield (
        f"           {counted(costs.updates, 'update')} to go ({epochs:,.1f} epochs): about {clock(left)}, until "
        f"{end:%Y-%m-%d %H:%M} if started now; without the time for saving, on a machine as busy as now"
    )


def _savings(config: Config) -> str:
    """Ways to take less memory that are not in use yet."""
    ways = ["a smaller MODEL.NAME" if config.DATA.BATCH_SIZE == 1 else "a smaller -batch_size"]
    ways += ["-amp"] if not config.AMP.ENABLED else []
    ways += ["TRAIN.GRAD_CHECKPOINT=blocks"] if config.TRAIN.GRAD_CHECKPOINT == "none" else []
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _bound(speed: Speed) -> str:
    if speed.loading > BALANCED * speed.computing:
        return f"data. {speed.faster}"
    if speed.computing > BALANCED * speed.loading:
        return "the model: images are loaded faster than it computes"
    return "both: images are loaded about as fast as the model computes"


def _disk(config: Config, costs: Costs, world: World) -> Iterator[str]:
    one = costs.checkpoint * (world.size if config.DIST.STRATEGY == "fsdp" else 1)
    kept = config.KEEP_LAST + 1  # and the best one
    free = shutil.disk_usage(costs.place).free
    once = f" and {size_words(costs.base)} once for the frozen weights" if costs.base else ""
    text = f"disk       {size_words(one)} per checkpoint{once}"
    if not config.KEEP_LAST:
        yield f"{text}, and all are kept (KEEP_LAST 0); {size_words(free)} free in {costs.place}"
        return
    needed = costs.base + one * (kept + 1)  # a new one is complete before an old one is removed
    in_all = f"up to {size_words(needed)} in all (KEEP_LAST {config.KEEP_LAST})"
    yield f"{text}, {in_all}; {size_words(free)} free in {costs.place}"
    if config.KEEP_EVERY:
        yield f"           and one more for every {config.KEEP_EVERY} epochs (KEEP_EVERY)"
    if needed > free:
        fewer = ", or set KEEP_LAST=1" * (config.KEEP_LAST != 1)
        yield f"           the free space is not enough: name another -output or SAVE{fewer}"
