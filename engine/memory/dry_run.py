"""What a run will cost, by ordinary updates and a validation: for -dry_run, and for TRAIN.NUM_EPOCHS auto.

Everything is built as for a run, and nothing is written.
"""

import gc
import math
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import torch

from datasets import Window
from datasets.examine.copies import QUICK_SECONDS
from datasets.examine.headers import HEADER_SECONDS
from engine.checkpoint.saver import estimate_seconds
from engine.compile import choice
from engine.evaluation.evaluate import on_device, validate
from engine.machine import stopping
from engine.machine.device import Run, synchronize
from engine.machine.memory import in_gib, is_out_of_memory, peak_memory_gb, take_peak, total_memory
from engine.measure.meters import Position, seconds_of, work_until
from engine.measure.throughput import Throughput, find_bottleneck
from engine.memory.out_of_memory import describe, ways_out
from engine.report.reporter import Reporter
from engine.setup import ReadyToTrain, build_for_training, build_train_state, setting_of, tuned_model
from engine.update import TrainState, train_update
from models.build import build_without_weights, timm_call
from utils.config import Config
from utils.config.train import TrainConfig
from utils.distributed.world import all_gather, broadcast, on_every_rank
from utils.errors import TrainingError, UserError
from utils.log import log, unheard
from utils.seeding import fork_host_rng
from utils.text import clock, counted
from vitamp.sizes import ImageSize, sides, size_of

SET_UP = 3
"""First updates, which allocate and start processes: they are not timed."""
LEAST_UPDATES = 5
MOST_UPDATES = 20
MOST_SECONDS = 30.0
MOST_BATCHES = 20
"""Of a validation: the time of a longer one is estimated."""
SHORT = 5.0
"""A validation of fewer seconds is timed again, without the start of processes."""
NEARLY_FULL = 0.9
"""Fraction of the memory"""
LONG = 3600.0
"""Seconds from which on a run is long, and a smaller image size is named"""
STEP = 32
"""Divides the sides of that size"""
MOST_SECONDS_IN_ALL = 60.0
"""Of a dry run since the program began"""
LEAST_SECONDS = 20.0
"""Of the trial itself, in which one update may take longer, however late it is"""
MOST_SECONDS_ALONE = 40.0
"""One thread of a CPU, often faster with small models or on a busy machine, is not tried if it may take longer."""
# Updates with the run's settings and with what may be faster take turns: other load slows both.
LEAST_TURNS = 2
MOST_TURNS = 5
SECONDS_OF_TURNS = 20.0
LONGEST_RUN = 10_000
"""Most epochs that TRAIN.NUM_EPOCHS auto chooses"""
SPARE = 0.03
"""Fraction of MAX_TIME that auto leaves for what it did not measure"""
SHARE_OF_TRIAL = 0.02
"""Fraction of MAX_TIME that auto measures updates for, about: by time, because images may have been loaded ahead"""


class _Enough(Exception):
    """The time of a validation is known."""


class Cost(NamedTuple):
    """Seconds."""

    update: float
    validation: float


def try_out(run: Run, ready: ReadyToTrain, updates_left: int) -> None:
    """Make a few updates and a validation, and log what the run would cost. A collective call."""
    config = run.config
    is_alone_on_cpu = run.device.type == "cpu" and run.world.size == 1
    ready.parts.assemble()
    ready.parts.enter(ready.position.epoch)
    position = replace(ready.position)
    reporter = Reporter(config, ready.train_loader.order.updates, None, position)
    costs: dict[str, Cost] = {}
    end = max(stopping.BEGAN + MOST_SECONDS_IN_ALL, time.monotonic() + LEAST_SECONDS)

    def measure(name: str) -> None:
        update = _train(ready, position, reporter, end=end)
        costs[name] = Cost(update, _validate(ready, position, reporter, end))

    try:
        measure("time")
        alone = costs["time"].update * run.threads
        if is_alone_on_cpu and run.threads > 1 and alone <= MOST_SECONDS_ALONE and time.monotonic() < end:
            log.info("Once more with one thread instead of %d:", run.threads)
            torch.set_num_threads(1)
            measure("THREADS=1")
    except Exception as error:
        # Nothing is trained: what a run would end with 1 for is a problem found before the first update.
        failure = UserError if run.world.size == 1 else TrainingError
        if isinstance(error, TrainingError):
            raise failure(str(error)) from None
        if not is_out_of_memory(error):
            raise
        raise failure(describe(error, run, position.update + 1)) from None
    for line in _costs(config, ready, costs, updates_left, run.auto_batch_size):
        log.info("  %s", line)
    if is_alone_on_cpu and not config.trains_on_features:
        torch.set_num_threads(run.threads)
        _try_faster_ways(run, ready, position, costs["time"].update)
    log.info("Dry run: updates, validation and data loading work. Nothing was kept or written.")


def _try_faster_ways(run: Run, ready: ReadyToTrain, position: Position, seconds: float) -> None:
    """Log how fast updates are with each setting that may make them faster. `seconds`: of an update."""
    ways = list(_faster_ways(run.config, ready))
    for way, faster in ways:
        turns = int(SECONDS_OF_TURNS / len(ways) / (2 * seconds)) - 1
        if turns < LEAST_TURNS:
            log.info("  not tried  %s: an update takes too long here", way)
            continue
        said = _compare(replace(run, config=faster), ready, position, min(MOST_TURNS, turns))
        log.info("  tried      %s: %s", way, said)


def _faster_ways(config: Config, ready: ReadyToTrain) -> Iterator[tuple[str, Config]]:
    """What the log advises for faster updates on a CPU, and the settings with it."""
    setting = setting_of(ready)
    other_precision = config.changed(AMP={"ENABLED": not config.AMP.ENABLED})
    channels_last = config.changed(SPEED=config.SPEED + ("+channels_last",))
    for way in setting.faster:
        yield way, channels_last if way.startswith("SPEED") else other_precision
    if not setting.amp:
        yield "-amp", other_precision


def _compare(faster: Run, ready: ReadyToTrain, position: Position, turns: int) -> str:
    """Time updates of `ready` and of `faster`, which has initial weights, by turns on the same images."""
    window = next(ready.train_loader.epoch(position.epoch))
    batches = [batch for _, batch in window]
    with unheard(), fork_host_rng():
        tuned = tuned_model(faster.config, faster.device, replaced=True)
        per_epoch = ready.train_loader.order.updates
        other = build_train_state(faster.config, faster.world, tuned, per_epoch, train_set=ready.train_set)
    other.assemble()
    other.enter(position.epoch)

    def seconds(of: TrainState) -> float:
        began = time.perf_counter()
        train_update(of, Window(window.shares, iter(batches)), position.update + 1)
        return time.perf_counter() - began

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(1 + turns):
        ours.append(seconds(ready.parts))
        theirs.append(seconds(other))
    now = statistics.median(ours[1:])  # the first allocates
    then = statistics.median(theirs[1:])
    said = f"{then:.3g} s per update instead of {now:.3g} s, {turns} of each by turns"
    return f"{now / then:.2f} times the speed ({said})"


def check_open_epochs(config: Config) -> None:
    """Raise UserError unless TRAIN.NUM_EPOCHS auto has a time to fill, and a schedule of any number of epochs."""
    if config.MAX_TIME is None:
        raise UserError("TRAIN.NUM_EPOCHS auto: give the time that the epochs are to fill, -max_time HH:MM:SS.")
    warm_up = config.TRAIN.WARMUP_EPOCHS
    if warm_up >= 1:
        why = "with TRAIN.NUM_EPOCHS auto it is a fraction of the run, such as 0.05."
        raise UserError(f"TRAIN.WARMUP_EPOCHS {warm_up:g}: {why}")
    name = config.TRAIN.LR_SCHEDULER.NAME
    if name in ("step", "multi-step"):
        why = "decays at fixed epochs; with NUM_EPOCHS auto, use cosine or wsd."
        raise UserError(f"TRAIN.LR_SCHEDULER.NAME {name}: {why}")
    if config.DATA.CHECK == "full":
        raise UserError("DATA.CHECK full: NUM_EPOCHS auto cannot plan its time; use quick, or check_data.py.")


Phase = tuple[ImageSize, bool]
"""What an epoch's time depends on: the size of its images, and whether tokens are dropped"""


@dataclass
class _Trial:
    """What TRAIN.NUM_EPOCHS auto measured, in seconds, to tell what any number of epochs would take."""

    config: Config
    train: TrainConfig
    """The settings of the trial, for the most epochs possible"""
    began: float = field(default_factory=time.monotonic)
    per_epoch: int = 0
    """Updates"""
    paces: dict[Phase, float] = field(default_factory=dict)
    """Of an update"""
    validation: float = 0.0
    set_up: float = 0.0
    """What comes once, before the first epoch and in first updates"""
    saving: float = 0.0

    def phase(self, train: TrainConfig, epoch: int) -> Phase:
        return train.size_in(epoch, self.config.DATA.IMAGE_SIZE), train.drops_tokens_in(epoch)

    def measure(self, ready: ReadyToTrain, seconds: float) -> None:
        """`seconds`: for updates, in all."""
        ready.parts.assemble()
        self.set_up = time.monotonic() - self.began
        self.per_epoch = ready.train_loader.order.updates
        self.saving = estimate_seconds(ready.parts)
        reporter = Reporter(self.config, 1, None, Position())
        position = Position()
        first = {self.phase(self.train, epoch): epoch for epoch in range(LONGEST_RUN, 0, -1)}
        for phase, epoch in first.items():
            position = Position(epoch)
            ready.parts.enter(epoch)
            started = time.monotonic()
            pace = _train(ready, position, reporter, min(MOST_SECONDS, seconds / len(first)), sys.maxsize)
            # What the first updates take longer, such as compiling, the run spends again.
            self.set_up += max(0.0, time.monotonic() - started - position.update * pace)
            self.paces[phase] = pace
        self.validation = _validate(ready, position, reporter)
        if self.config.DATA.CHECK == "quick" and ready.train_set.single_images() is not None:
            self.set_up += QUICK_SECONDS + HEADER_SECONDS  # of check_data, which comes later

    def needed(self, epochs: int) -> float:
        """Seconds for so many epochs, without what comes once."""
        train = self.train.changed(NUM_EPOCHS=epochs)
        slowest = max(self.paces.values())  # also for what only a very short run has
        each = sum(self.paces.get(self.phase(train, epoch), slowest) for epoch in range(1, epochs + 1))
        config = self.config
        validations = math.ceil(epochs / config.VALIDATE_FREQ)
        validations += epochs * self.per_epoch // (config.VALIDATE_EVERY_UPDATES or LONGEST_RUN * self.per_epoch)
        return each * self.per_epoch + validations * self.validation

    def left(self, given: float) -> float:
        """Seconds for epochs, of `given` ones since the program began."""
        left = (1 - SPARE) * given - (time.monotonic() - stopping.BEGAN) - self.set_up - self.saving
        if self.config.MODEL.starts_at_probe:  # which computes features of all images once
            left -= self.per_epoch * max(self.paces.values()) + self.validation
        return left


def settle_epochs(run: Run) -> Run:
    """`run` with as many epochs as fit into MAX_TIME (TRAIN.NUM_EPOCHS auto). A collective call.

    The number is found once, by trial updates with a model of their own, and config.yaml keeps it: the training is as
    reproducible as if it had been given.
    """
    config = run.config
    assert config.MAX_TIME is not None, "checked before"
    if config.trains_on_features:
        raise UserError(
            "TRAIN.NUM_EPOCHS auto: this training keeps the features of its frozen backbone, and an epoch takes "
            "seconds; set -epochs to a number."
        )
    given = seconds_of(config.MAX_TIME)
    train = config.TRAIN.spanning(LONGEST_RUN)
    saved = choice.FRACTION_SAVED * given
    if train.COMPILE == choice.AUTO and saved <= choice.REQUIRED_RATIO * choice.SECONDS_TO_COMPILE:
        train = train.changed(COMPILE=choice.NONE)
    config_of_trial = config.changed(TRAIN=train)
    trial = _Trial(config_of_trial, train)
    with unheard(), fork_host_rng():  # the run logs these lines itself, and draws from its own beginning
        run_of_trial = replace(run, config=config_of_trial)
        ready = on_every_rank(run.world, lambda: build_for_training(run_of_trial, None, dry=True))
        trial.measure(ready, SHARE_OF_TRIAL * given)
        compiling = (ready.choices["compile"], "auto: as in the trial that found TRAIN.NUM_EPOCHS")
        ready.train_loader.close()
        ready.val_loader.close()
        del ready
    gc.collect()
    take_peak(run.device)

    left = trial.left(given)
    epochs = broadcast(bisect_right(range(1, LONGEST_RUN + 1), left, key=trial.needed), run.world)
    if epochs == 0:
        one = trial.needed(1)
        enough = 10 * math.ceil((given + 1.2 * (one - left)) / 10)  # a longer trial takes more, too
        raise UserError(
            f"TRAIN.NUM_EPOCHS auto: MAX_TIME {config.MAX_TIME} is too short: one epoch takes about {one:.3g} s, and "
            f"start and end leave {max(left, 0):.3g} s. -max_time {clock(enough)} would do for one epoch. Faster: a "
            "smaller model or DATA.IMAGE_SIZE, or MODEL.FREEZE=backbone, which trains the classifier alone."
        )
    config = config.changed(TRAIN=config.TRAIN.spanning(epochs))
    paces = trial.paces.values()
    log.info(
        "TRAIN.NUM_EPOCHS auto: %d, with a warm-up of %g: about %s of MAX_TIME %s (%s s per update, %.3g s per "
        "validation)",
        epochs,
        config.TRAIN.WARMUP_EPOCHS,
        clock(trial.needed(epochs)),
        config.MAX_TIME,
        " to ".join(f"{pace:.3g}" for pace in sorted({min(paces), max(paces)})),
        trial.validation,
    )
    return replace(run, config=config, compiling=compiling)


def _windows(ready: ReadyToTrain, epoch: int, start: int) -> Iterator[Window]:
    """Those of an epoch from an update on, and then of the whole epoch again and again."""
    while True:
        yield from ready.train_loader.epoch(epoch, start)
        start = 0


def _train(
    ready: ReadyToTrain,
    position: Position,
    reporter: Reporter,
    seconds: float = MOST_SECONDS,
    most: int = MOST_UPDATES,
    end: float = math.inf,
) -> float:
    """Train for about so many seconds and updates: in one epoch, or in whole ones if that is shorter.

    Returns the seconds per update. Unlike a run's, an epoch begins with an empty loader here, so that what was loaded
    during slow first updates does not flatter the time: its first wait counts once per epoch. At `end`, the update in
    progress is the last, and updates that were to set up are timed instead.
    """
    parts = ready.parts
    loader = ready.train_loader
    device = ready.precision.device
    pace = Throughput(device, parts.stages)
    per_epoch = loader.order.updates
    began = time.perf_counter()
    done = 0
    waits = list[float]()
    set_up = min(SET_UP, per_epoch)
    position.step = max(0, per_epoch - SET_UP)  # the end of an epoch, to set up
    for done, window in enumerate(_windows(ready, position.epoch, position.step), start=1 - set_up):
        if position.step == per_epoch:
            synchronize(device)
        if done == 1:
            loader.take_wait()
            began = time.perf_counter()
        train_update(parts, window, position.update + 1)
        position.step = position.step % per_epoch + 1
        position.update += 1
        pace.count(loader.order.samples_of(position.step - 1))
        if done > 0 and position.step == 1:
            waits.append(loader.take_wait())
        if done == 1:
            pace.restart()
        is_late = time.monotonic() >= end
        is_enough = done >= most or (done >= LEAST_UPDATES and time.perf_counter() - began >= seconds)
        may_end = done <= per_epoch or position.step == per_epoch
        if broadcast(is_late or (is_enough and may_end), parts.world):
            break
    synchronize(device)
    waited = sum(waits)
    timed = done if done > 0 else done + set_up
    update = (time.perf_counter() - began - waited) / timed + waited / max(1, len(waits) * per_epoch)
    why = ": the time of a dry run is up" if time.monotonic() >= end else ""
    log.info("The time per update is estimated from %s%s.", counted(timed, "update"), why)
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    reporter.train(position, reading, pace.read(loader.take_wait() + sum(waits[1:])), parts.figures())
    if not math.isfinite(reading.epoch.loss) or reading.first_bad >= 0:
        log.warning(
            "The loss or its gradient is NaN or infinite in these updates; see docs/troubleshooting.md for remedies."
        )
    waited_percents = all_gather([pace.tally.waited_percent], parts.world)
    bottleneck = find_bottleneck(pace.tally, setting_of(ready), waited_percents)
    if bottleneck:
        log.info("Where the time went: %s", bottleneck.text)
    return update


def _validate(ready: ReadyToTrain, position: Position, reporter: Reporter | None, end: float = math.inf) -> float:
    """Validate all weights that the run keeps. Returns the seconds that this takes. `reporter` None: once more."""
    world = ready.parts.world
    batches = 0
    metrics = {}
    began = time.perf_counter()
    every = len(ready.val_loader) + (ready.neighbours.batches if ready.neighbours else 0)
    of_all = broadcast(every, world) - 1  # ranks may have one batch more or less than rank 0

    def count() -> None:
        nonlocal batches
        enough = batches >= MOST_BATCHES or time.monotonic() >= end
        if 0 < batches < of_all and broadcast(enough, world):  # all stop here, or none
            raise _Enough
        batches += 1

    try:
        for which, model in ready.parts.weights.items():
            metrics[which] = validate(ready, on_device(model, ready.precision.device), world, count)
    except _Enough:
        synchronize(ready.precision.device)
        return (time.perf_counter() - began) / batches * every * len(ready.parts.weights)
    seconds = time.perf_counter() - began
    if reporter is None:
        return seconds
    reporter.validation(position, metrics, seconds)
    return _validate(ready, position, None, end) if broadcast(seconds < SHORT, world) else seconds


def _costs(
    config: Config, ready: ReadyToTrain, costs: dict[str, Cost], updates: int, found: bool = False
) -> Iterator[str]:
    """`costs`: by heading. `updates`: those left to train. `found`: the batch size is from `auto`."""
    device = ready.precision.device
    yield from _cost_in_memory(config, device, found)
    per_epoch = ready.train_loader.order.updates
    position = ready.position
    epochs = updates / per_epoch
    at = position.epoch - 1 + position.step / per_epoch
    begun, whole, done, end = work_until(config, (position.epoch - 1, position.epoch, at, at + epochs))
    computed = per_epoch * (end - done) / max(whole - begun, 1e-9)  # in updates like those that were timed
    if computed > 1.001 * updates > 0:
        yield "           later epochs take more memory; their time is estimated by their pixels and tokens"
    if config.trains_on_features and updates:
        yield "           features are kept: the estimate is one pass over the images; then an epoch takes seconds"
        updates = per_epoch
        computed = per_epoch
        epochs = 1.0
    validations = max(1, round(epochs / config.VALIDATE_FREQ)) if updates else 0
    validations += updates // (config.VALIDATE_EVERY_UPDATES or sys.maxsize)
    more = "; longer if other programs take the cores" if device.type == "cpu" else ""
    shortest = math.inf
    for name, cost in costs.items():
        left = computed * cost.update + validations * cost.validation
        shortest = min(shortest, left)
        yield (
            f"{name:<11}{cost.update:.3g} s per update, about {clock(cost.validation)} per validation; "
            f"{counted(updates, 'update')} to go ({epochs:,.1f} epochs): about {clock(left)}, until "
            f"{datetime.now() + timedelta(seconds=left):%Y-%m-%d %H:%M} if started now{more}"
        )
    may_change = config.MODEL.RESUME is None and not config.TRAIN.SIZE_SCHEDULE
    size = smaller_size(config) if shortest > LONG and may_change else None
    if size:
        now = math.prod(sides(config.DATA.IMAGE_SIZE))
        then = math.prod(sides(size))
        shown = ",".join(map(str, sides(size))) if isinstance(size, tuple) else size
        yield (
            f"long?      -image_size {shown} computes about {now / then:.1f} times as fast, if the images still show "
            "enough; a smaller -model may gain more (docs/which_model.md)"
        )


def _cost_in_memory(config: Config, device: torch.device, found: bool) -> Iterator[str]:
    peak = 1e9 * peak_memory_gb(device)
    total = total_memory(device)
    of = f" of {in_gib(total)}" if total else ""
    where = "for each process, its libraries included" if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(peak)}{of} at the peak, {where}"
    if total and peak > NEARLY_FULL * total:
        yield f"           this is nearly all memory; to save some: {'; '.join(ways_out(config, False, device, found))}"


def smaller_size(config: Config) -> ImageSize | None:
    """An image size of about half the pixels, a multiple of 32; None if the model or its weights do not take it."""
    model = config.MODEL
    size = config.DATA.IMAGE_SIZE
    channels = config.DATA.IMAGE_CHANNELS
    smaller = size_of([STEP * round(side / math.sqrt(2) / STEP) for side in sides(size)])
    if min(sides(smaller)) == 0 or math.prod(sides(smaller)) >= math.prod(sides(size)):
        return None
    with suppress(UserError):
        if "img_size" not in timm_call(model, smaller, channels)[1] or not model.PRETRAINED:
            return smaller
        # timm resizes given weights of models with this method.
        if hasattr(build_without_weights(model, smaller, channels), "set_input_size"):
            return smaller
    return None
