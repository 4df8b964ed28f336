"""Dry run (-dry_run): ordinary updates and a validation, with the memory and time that the run will need.

Everything is built as for a run, and nothing is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import torch

from engine.evaluation.evaluate import on_device, validate
from engine.machine.device import Run, global_batch, synchronize
from engine.machine.memory import in_gib, is_out_of_memory, peak_memory_gb, total_memory
from engine.measure.meters import Position, clock
from engine.measure.throughput import Throughput, bottleneck_of_all
from engine.memory.out_of_memory import describe, ways_out
from engine.report.reporter import Reporter
from engine.setup import ReadyToTrain, setting_of
from engine.update import train_update
from utils.config import Config
from utils.distributed.world import World, broadcast
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.text import counted

SET_UP = 3
"""First updates, which allocate and start processes: they are not timed."""
MOST_UPDATES, SECONDS_OF_UPDATES = 20, 30.0
MOST_BATCHES = 20
"""Of a validation: the time of a longer one is estimated."""
NEARLY_FULL = 0.9
MOST_SECONDS_ALONE = 40.0
"""One thread of a CPU, often faster with small models or on a busy machine, is not tried if it may take longer."""


class _Enough(Exception):
    """The time of a validation is known."""


def try_out(run: Run, ready: ReadyToTrain, updates_left: int) -> None:
    """Make a few updates and a validation, and log what the run would cost. A collective call."""
    config, world, parts = run.config, run.world, ready.parts
    parts.assemble()
    parts.enter(ready.position.epoch)
    position, per_epoch = replace(ready.position), ready.train_loader.order.updates
    reporter = Reporter(config, per_epoch, None, False, position)
    costs: dict[str, tuple[float, float]] = {}

    def measure(name: str) -> None:
        update = global_batch(config, world) / max(_train(world, ready, position, reporter), 1e-9)
        costs[name] = update, _validate(world, ready, position, reporter)

    try:
        measure("time")
        several = run.device.type == "cpu" and run.threads > 1 and world.size == 1
        if several and costs["time"][0] * run.threads <= MOST_SECONDS_ALONE:
            log.info("Once more with one thread instead of %d:", run.threads)
            torch.set_num_threads(1)
            measure("THREADS=1")
    except Exception as error:
        # Nothing is trained: what a run would end with 1 for is a problem found before the first update.
        failure = UserError if world.size == 1 else TrainingError
        if isinstance(error, TrainingError):
            raise failure(str(error)) from None
        if not is_out_of_memory(error):
            raise
        raise failure(describe(error, run, position.update)) from None
    for line in _costs(config, ready, costs, updates_left):
        log.info("  %s", line)
    log.info("Dry run: updates, validation and data loading work. Nothing was kept or written.")


def _train(world: World, ready: ReadyToTrain, position: Position, reporter: Reporter) -> float:
    """Train within one epoch. Returns the images per second."""
    parts, loader, device = ready.parts, ready.train_loader, ready.precision.device
    pace = Throughput(device, parts.stages)

    def restart() -> None:
        loader.take_wait()
        pace.restart()

    parts.after_pause = restart
    position.step %= loader.order.updates
    end = time.perf_counter() + SECONDS_OF_UPDATES
    for done, window in enumerate(loader.epoch(position.epoch, position.step), start=1):
        position.step += 1
        position.update += 1
        train_update(parts, window, position.update)
        pace.count(loader.order.samples_of(position.step - 1))
        if done == SET_UP and position.step < loader.order.updates:
            synchronize(device)
            restart()
        if not broadcast(done <= SET_UP or (done < MOST_UPDATES and time.perf_counter() < end), world):
            break
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
    return perf.images_per_second


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


def _costs(config: Config, ready: ReadyToTrain, costs: dict[str, tuple[float, float]], updates: int) -> Iterator[str]:
    """`costs`: by heading, seconds per update and per validation. `updates`: those left to train."""
    device = ready.precision.device
    peak, total = 1e9 * peak_memory_gb(device), total_memory(device)
    of = f" of {in_gib(total)}" if total else ""
    where = "for each process, its libraries included" if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(peak)}{of} at the peak, {where}"
    if total and peak > NEARLY_FULL * total:
        yield f"           this is nearly all memory; to save some: {'; '.join(ways_out(config, False, device))}"
    if config.TRAIN.SIZE_SCHEDULE or (config.TRAIN.TOKEN_DROP and config.TRAIN.TOKEN_DROP_TAIL):
        yield "           epochs with larger images, or without dropped tokens, take more memory and time"
    epochs = updates / ready.train_loader.order.updates
    for name, (update, validation) in costs.items():
        left = updates * update + max(1, round(epochs / config.VALIDATE_FREQ)) * (updates > 0) * validation
        yield (
            f"{name:<11}{update:.3g} s per update, about {clock(validation)} per validation; "
            f"{counted(updates, 'update')} to go ({epochs:,.1f} epochs): about {clock(left)}, until "
            f"{datetime.now() + timedelta(seconds=left):%Y-%m-%d %H:%M} if started now"
        )
