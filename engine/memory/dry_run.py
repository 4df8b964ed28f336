"""Dry run (-dry_run): ordinary updates and a validation, and the memory, time and disk space that the run will need.

Everything is built as for a run, and nothing is written.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from datasets import Window
from engine.checkpoint.saver import size_words
from engine.checkpoint.state import state_of, tensors_of
from engine.evaluate import on_device, validate
from engine.machine.device import Run, global_batch, synchronize
from engine.machine.memory import in_gib, is_out_of_memory, peak_memory_gb, total_memory
from engine.measure.meters import Position, clock
from engine.measure.throughput import Perf, Throughput, bottleneck_of_all
from engine.memory.out_of_memory import describe, ways_out
from engine.parallel.shards import local_shard
from engine.report.reporter import Reporter
from engine.setup import ReadyToTrain, setting_of
from engine.update import train_update
from models import base_weights
from utils.config import Config
from utils.distributed.world import World, broadcast
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.record.resumed_run import target_folder
from utils.text import counted

SET_UP = 3
"""First updates, which allocate and start processes: they are not timed."""
MOST_UPDATES, SECONDS_OF_UPDATES = 20, 30.0
MOST_BATCHES = 20
"""Of a validation: the time of a longer one is estimated."""
NEARLY_FULL = 0.9


class _Enough(Exception):
    """The time of a validation is known."""


def try_out(run: Run, ready: ReadyToTrain, updates_left: int) -> None:
    """Make a few updates and a validation, and log what the run would cost. A collective call."""
    config, world = run.config, run.world
    ready.parts.assemble()
    if ready.parts.enter(config.MODEL.UNFREEZE_EPOCH or ready.position.epoch):
        log.info(
            "The dry run trains the frozen weights too; epochs before MODEL.UNFREEZE_EPOCH need less memory and time."
        )
    position, per_epoch = replace(ready.position), ready.train_loader.order.updates
    reporter = Reporter(config, per_epoch, None, False, position)
    try:
        perf = _train(world, ready, position, reporter)
        validation = _validate(world, ready, position, reporter)
    except Exception as error:
        # Nothing is trained: what a run would end with 1 for is a problem found before the first update.
        failure = UserError if world.size == 1 else TrainingError
        if isinstance(error, TrainingError):
            raise failure(str(error)) from None
        if not is_out_of_memory(error):
            raise
        raise failure(describe(error, run, ready.parts, position.update)) from None
    update = global_batch(config, world) / max(perf.images_per_second, 1e-9)
    for line in (
        *_memory(config, ready),
        *_time(config, update, validation, per_epoch, updates_left),
        *_disk(config, world, ready),
    ):
        log.info("  %s", line)
    log.info("Dry run: updates, validation and data loading work. Nothing was kept or written.")


def _train(world: World, ready: ReadyToTrain, position: Position, reporter: Reporter) -> Perf:
    parts, loader, device = ready.parts, ready.train_loader, ready.precision.device
    pace, windows = Throughput(device, parts.stages), _windows(ready, position)

    def restart() -> None:
        loader.take_wait()
        pace.restart()

    parts.after_pause = restart
    done, end = 0, time.perf_counter() + SECONDS_OF_UPDATES
    while broadcast(done <= SET_UP or (done < MOST_UPDATES and time.perf_counter() < end), world):
        train_update(parts, next(windows), position.update)
        pace.count(loader.order.samples_of(position.step - 1))
        done += 1
        if done == SET_UP:
            synchronize(device)
            restart()
    synchronize(device)
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    perf = pace.read(loader.take_wait())
    reporter.train(position, reading, perf, parts.figures())
    if not math.isfinite(reading.epoch.loss) or reading.first_bad >= 0:
        log.warning(
            "The loss or its gradient is NaN or infinite in these updates; see docs/troubleshooting.md for remedies."
        )
    if found := bottleneck_of_all(pace.tally, setting_of(ready), world):
        log.info("Where the time went: %s", found.text)
    return perf


def _windows(ready: ReadyToTrain, position: Position) -> Iterator[Window]:
    """Windows that the run would train on, epoch after epoch."""
    while True:
        for window in ready.train_loader.epoch(position.epoch, position.step):
            position.step += 1
            position.update += 1
            yield window
        position.epoch, position.step = position.epoch + 1, 0
        ready.parts.enter(position.epoch)


def _validate(world: World, ready: ReadyToTrain, position: Position, reporter: Reporter) -> float:
    """Validate all weights that the run keeps. Returns the seconds that this takes."""
    batches, metrics, began = 0, {}, time.perf_counter()
    # Ranks may have one batch more or less than rank 0: all go on to the end, or none.
    is_long = broadcast(len(ready.val_loader) > MOST_BATCHES + 1, world)

    def count() -> None:
        nonlocal batches
        if is_long and batches == MOST_BATCHES:
            raise _Enough
        batches += 1

    try:
        for which, model in ready.parts.weights.items():
            metrics[which] = validate(ready, on_device(model, ready.precision.device), world, count)
    except _Enough:
        synchronize(ready.precision.device)
        each = (time.perf_counter() - began) / batches
        return each * len(ready.val_loader) * len(ready.parts.weights)
    seconds = time.perf_counter() - began
    reporter.validation(position, metrics, seconds)
    return seconds


def _memory(config: Config, ready: ReadyToTrain) -> Iterator[str]:
    device = ready.precision.device
    peak, total = 1e9 * peak_memory_gb(device), total_memory(device)
    of = f" of {in_gib(total)}" if total else ""
    where = "for each process, its libraries included" if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(peak)}{of} at the peak, {where}"
    if total and peak > NEARLY_FULL * total:
        yield f"           this is nearly all memory; to save some: {'; '.join(ways_out(config, False, device))}"
    if config.TRAIN.SIZE_SCHEDULE or (config.TRAIN.TOKEN_DROP and config.TRAIN.TOKEN_DROP_TAIL):
        yield "           epochs with larger images, or without dropped tokens, take more memory and time"


def _time(config: Config, update: float, validation: float, per_epoch: int, updates: int) -> Iterator[str]:
    """`update`, `validation`: seconds of each. `updates`: those left to train."""
    epochs = updates / per_epoch
    left = updates * update + max(1, round(epochs / config.VALIDATE_FREQ)) * (updates > 0) * validation
    end = datetime.now() + timedelta(seconds=left)
    yield (
        f"time       {update:.3g} s per update; an epoch of {counted(per_epoch, 'update')} takes about "
        f"{clock(per_epoch * update)}, a validation about {clock(validation)}"
    )
    yield (
        f"           {counted(updates, 'update')} to go ({epochs:,.1f} epochs): about {clock(left)}, until "
        f"{end:%Y-%m-%d %H:%M} if started now; without the time for saving, on a machine as busy as now"
    )


def _disk(config: Config, world: World, ready: ReadyToTrain) -> Iterator[str]:
    place = Path(target_folder(config) or config.SAVE).absolute()
    place = next(folder for folder in (place, *place.parents) if folder.is_dir())
    free, base = shutil.disk_usage(place).free, bytes_in(base_weights(ready.model))
    one = bytes_in((tensors_of(ready.parts), state_of(ready.parts, ready.position, ready.best, 0, {})))
    one *= world.size if config.DIST.STRATEGY == "fsdp" else 1
    once = f" and {size_words(base)} once for the frozen weights" if base else ""
    # Those that are kept, the best one, and a new one, which is complete before an old one is removed.
    needed = base + one * (config.KEEP_LAST + 2)
    in_all = (
        f"up to {size_words(needed)} in all (KEEP_LAST {config.KEEP_LAST}"
        + f", and one more for every {config.KEEP_EVERY} epochs" * bool(config.KEEP_EVERY)
        + ")"
        if config.KEEP_LAST
        else "and all are kept (KEEP_LAST 0)"
    )
    yield f"disk       {size_words(one)} per checkpoint{once}, {in_all}; {size_words(free)} free in {place}"
    if config.KEEP_LAST and needed > free:
        fewer = ", or set KEEP_LAST=1" * (config.KEEP_LAST != 1)
        yield f"           the free space is not enough: name another -output or SAVE{fewer}"


def bytes_in(tree: object) -> int:
    """Size of this rank's part of all tensors in `tree`."""
    parts = (local_shard(leaf.detach()) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum(part.numel() * part.element_size() for part in parts)
