"""Estimates what a run will cost, from ordinary updates and a validation: for -dry_run and TRAIN.NUM_EPOCHS auto.

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
from engine.measure.meters import NEVER, Position, seconds_of, work_until
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
"""Number of first updates that are not timed, because they allocate and start processes"""
LEAST_UPDATES = 5
MOST_UPDATES = 20
MOST_SECONDS = 30.0
MOST_BATCHES = 20
"""Number of validation batches that are timed; the time of a longer validation is extrapolated."""
SHORT = 5.0
"""A validation of fewer seconds is timed again, without the start of processes."""
NEARLY_FULL = 0.9
"""Fraction of the memory from which on ways to save memory are listed"""
LONG = 3600.0
"""Seconds from which on a run is long, and a smaller image size is suggested"""
STEP = 32
"""The sides of the suggested image size are multiples of this."""
MOST_SECONDS_IN_ALL = 60.0
"""Seconds since the program began after which a dry run ends"""
LEAST_SECONDS = 20.0
"""Seconds that the trial itself always gets, even if the program has already taken MOST_SECONDS_IN_ALL"""
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
SPARE_ON_CPU = 0.25
"""The same on a CPU, which other programs may slow later. Some epochs less cost little; a training that is cut while
its learning rate is high may lose several points."""
SHARE_OF_TRIAL = 0.02
"""Fraction of MAX_TIME that auto measures updates for, about: by time, because images may have been loaded ahead"""


class _EnoughBatches(Exception):
    """Ends a validation whose time can be extrapolated."""


class Cost(NamedTuple):
    """Seconds of one update and of one validation."""

    update: float
    validation: float


def try_out(run: Run, ready: ReadyToTrain, updates_left: int) -> None:
    """Make a few updates and a validation, and log what the run would cost. A collective call.

    On a CPU, updates are also timed with one thread, and with the settings that may be faster. UserError or
    TrainingError for a problem that the run would meet. `updates_left`: the updates that the run has still to train.
    """
    config = run.config
    is_alone_on_cpu = run.device.type == "cpu" and run.world.size == 1
    ready.parts.assemble()
    ready.parts.enter(ready.position.epoch)
    position = replace(ready.position)
    reporter = Reporter(config, ready.train_loader.order.updates, None, position)
    costs: dict[str, Cost] = {}
    # Within a minute of the program's start, but with enough time for the trial if the start took most of it.
    end = max(stopping.BEGAN + MOST_SECONDS_IN_ALL, time.monotonic() + LEAST_SECONDS)

    def measure(heading: str) -> None:
        update = _train(ready, position, reporter, end=end)
        costs[heading] = Cost(update, _validate(ready, position, reporter, end))

    try:
        measure("time")
        # At the worst, one thread takes as many times longer as there are threads now.
        longest_with_one_thread = costs["time"].update * run.threads
        may_try_one_thread = is_alone_on_cpu and run.threads > 1 and longest_with_one_thread <= MOST_SECONDS_ALONE
        if may_try_one_thread and time.monotonic() < end:
            log.info("Once more with one thread instead of %d:", run.threads)
            torch.set_num_threads(1)
            measure("THREADS=1")
    except Exception as error:
        # A dry run trains nothing, so a problem that it finds is one before the first update: a UserError, not a failed
        # training. With several ranks, a TrainingError ends the others at once.
        error_class = UserError if run.world.size == 1 else TrainingError
        if isinstance(error, TrainingError):
            raise error_class(str(error)) from None
        if not is_out_of_memory(error):
            raise
        raise error_class(describe(error, run, position.update + 1)) from None
    for line in _costs(config, ready, costs, updates_left, run.auto_batch_size):
        log.info("  %s", line)
    if is_alone_on_cpu and not config.trains_on_features:
        torch.set_num_threads(run.threads)
        _try_faster_ways(run, ready, position, costs["time"].update)
    parts = ready.parts
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    if reading.first_bad != NEVER or not math.isfinite(reading.epoch.loss):
        log.warning(
            "Dry run: the loss or its gradient is NaN or infinite in these updates; see docs/troubleshooting.md for "
            "remedies."
        )
    else:
        log.info("Dry run: updates, validation and data loading work; nothing was kept or written.")


def _try_faster_ways(run: Run, ready: ReadyToTrain, position: Position, seconds: float) -> None:
    """Measure and log how fast updates are with each setting that may make them faster.

    `seconds`: the time of an update with the run's own settings.
    """
    ways = list(_faster_ways(run.config, ready))
    for flag, faster_config in ways:
        # A turn is an update with the run's settings and one with the faster ones. One turn more warms up.
        seconds_of_way = SECONDS_OF_TURNS / len(ways)
        turns = int(seconds_of_way / (2 * seconds)) - 1
        if turns < LEAST_TURNS:
            log.info("  not tried  %s: an update takes too long here", flag)
            continue
        result = _compare(replace(run, config=faster_config), ready, position, min(MOST_TURNS, turns))
        log.info("  tried      %s: %s", flag, result)


def _faster_ways(config: Config, ready: ReadyToTrain) -> Iterator[tuple[str, Config]]:
    """Yield each flag or setting that may make updates faster on a CPU, with the settings that it results in."""
    facts = setting_of(ready)
    # `facts.faster` may have the setting SPEED=+channels_last, and a flag to switch AMP off.
    flags = list(facts.faster)
    if not facts.amp:
        flags.append("-amp")
    with_amp_toggled = config.changed(AMP={"ENABLED": not config.AMP.ENABLED})
    with_channels_last = config.changed(SPEED=config.SPEED + ("+channels_last",))
    for flag in flags:
        yield flag, with_channels_last if flag.startswith("SPEED") else with_amp_toggled


def _compare(faster_run: Run, ready: ReadyToTrain, position: Position, turns: int) -> str:
    """Compare how long updates take with the settings of `ready` and with those of `faster_run`, on the same images.

    Both alternate, `turns` times. For `faster_run`, another model is built; it keeps its initial weights, since an
    update with them takes as long. Returns the words for the log.
    """
    window = next(ready.train_loader.epoch(position.epoch))
    batches = [batch for _, batch in window]
    with unheard(), fork_host_rng():
        tuned = tuned_model(faster_run.config, faster_run.device, replaced=True)  # without pretrained weights
        per_epoch = ready.train_loader.order.updates
        faster_parts = build_train_state(
            faster_run.config, faster_run.world, tuned, per_epoch, train_set=ready.train_set
        )
    faster_parts.assemble()
    faster_parts.enter(position.epoch)

    def seconds_of_update(parts: TrainState) -> float:
        began = time.perf_counter()
        train_update(parts, Window(window.shares, iter(batches)), position.update + 1)
        return time.perf_counter() - began

    current_times: list[float] = []
    faster_times: list[float] = []
    for _ in range(1 + turns):
        current_times.append(seconds_of_update(ready.parts))
        faster_times.append(seconds_of_update(faster_parts))
    current = statistics.median(current_times[1:])  # the first update allocates
    changed = statistics.median(faster_times[1:])
    times = f"{changed:.3g} s per update instead of {current:.3g} s, {turns} of each by turns"
    return f"{current / changed:.2f} times the speed ({times})"


def check_open_epochs(config: Config) -> None:
    """Raise UserError if TRAIN.NUM_EPOCHS auto has no time to fill, or if other settings need the number of epochs."""
    if config.MAX_TIME is None:
        raise UserError("TRAIN.NUM_EPOCHS auto: give the time that the epochs are to fill, -max_time HH:MM:SS.")
    warm_up = config.TRAIN.WARMUP_EPOCHS
    if warm_up >= 1:
        reason = "with TRAIN.NUM_EPOCHS auto it is a fraction of the run, such as 0.05."
        raise UserError(f"TRAIN.WARMUP_EPOCHS {warm_up:g}: {reason}")
    name = config.TRAIN.LR_SCHEDULER.NAME
    if name in ("step", "multi-step"):
        reason = "decays at fixed epochs; with NUM_EPOCHS auto, use cosine or wsd."
        raise UserError(f"TRAIN.LR_SCHEDULER.NAME {name}: {reason}")
    if config.DATA.CHECK == "full":
        raise UserError("DATA.CHECK full: NUM_EPOCHS auto cannot plan its time; use quick, or check_data.py.")


Phase = tuple[ImageSize, bool]
"""Size of an epoch's images, and whether it drops tokens: the time of an update depends on both."""


@dataclass
class _Trial:
    """Measures what TRAIN.NUM_EPOCHS auto needs to compute how long any number of epochs would take, in seconds."""

    config: Config
    """The settings of the trial, for the most epochs possible"""
    spare: float
    """Fraction of the time that stays free"""
    began: float = field(default_factory=time.monotonic)
    per_epoch: int = 0
    """Updates per epoch"""
    paces: dict[Phase, float] = field(default_factory=dict)
    """Seconds per update in each phase"""
    validation: float = 0.0
    set_up: float = 0.0
    """Seconds that a run spends only once, before the first epoch and in first updates"""
    saving: float = 0.0

    def phase(self, train: TrainConfig, epoch: int) -> Phase:
        return train.size_in(epoch, self.config.DATA.IMAGE_SIZE), train.drops_tokens_in(epoch)

    def measure(self, ready: ReadyToTrain, seconds: float) -> None:
        """Time updates of each phase, for about `seconds` in total, and a validation."""
        ready.parts.assemble()
        self.set_up = time.monotonic() - self.began  # building the trial, as the run will be built again
        self.per_epoch = ready.train_loader.order.updates
        self.saving = estimate_seconds(ready.parts)
        reporter = Reporter(self.config, 1, None, Position())
        position = Position()
        # The first epoch of each phase: counting down, the last number that is stored for a phase is its first epoch.
        first_epochs = {self.phase(self.config.TRAIN, epoch): epoch for epoch in range(LONGEST_RUN, 0, -1)}
        seconds_per_phase = min(MOST_SECONDS, seconds / len(first_epochs))
        for phase, epoch in first_epochs.items():
            position = Position(epoch)
            ready.parts.enter(epoch)
            started = time.monotonic()
            pace = _train(ready, position, reporter, seconds_per_phase, most=sys.maxsize)  # any number of updates
            # First updates take longer, for compiling and the like. The run spends that time again. (`_train` has
            # counted the updates in `position`.)
            self.set_up += max(0.0, time.monotonic() - started - position.update * pace)
            self.paces[phase] = pace
        self.validation = _validate(ready, position, reporter)
        if self.config.DATA.CHECK == "quick" and ready.train_set.single_images() is not None:
            self.set_up += QUICK_SECONDS + HEADER_SECONDS  # the check of the data comes later

    def needed(self, epochs: int) -> float:
        """Return the seconds that so many epochs with their validations take, without set-up and saving."""
        # The sum over the epochs of the seconds per update. Only a very short run may have a phase that was not
        # measured: it counts like the slowest.
        config = self.config
        train = config.TRAIN.changed(NUM_EPOCHS=epochs)
        slowest = max(self.paces.values())
        sum_of_paces = sum(self.paces.get(self.phase(train, epoch), slowest) for epoch in range(1, epochs + 1))
        at_epoch_ends = math.ceil(epochs / config.VALIDATE_FREQ)
        never = LONGEST_RUN * self.per_epoch  # more updates than a run has
        within_epochs = epochs * self.per_epoch // (config.VALIDATE_EVERY_UPDATES or never)
        return sum_of_paces * self.per_epoch + (at_epoch_ends + within_epochs) * self.validation

    def left(self, max_time: float) -> float:
        """Return the seconds that remain for epochs, if the program may run for `max_time` seconds since it began."""
        left = (1 - self.spare) * max_time - (time.monotonic() - stopping.BEGAN) - self.set_up - self.saving
        if self.config.MODEL.starts_at_probe:  # the probe computes features of all images once
            left -= self.per_epoch * max(self.paces.values()) + self.validation
        return left


def settle_epochs(run: Run) -> Run:
    """Return `run` with as many epochs as fit into MAX_TIME (TRAIN.NUM_EPOCHS auto). A collective call.

    Trial updates with a model of their own measure how long epochs take. Then config.yaml keeps the number, so that the
    training is as reproducible as if the user had given it. UserError if not even one epoch fits.
    """
    config = run.config
    assert config.MAX_TIME is not None, "checked before"
    if config.trains_on_features:
        raise UserError(
            "TRAIN.NUM_EPOCHS auto: this training keeps the features of its frozen backbone, and an epoch takes "
            "seconds; set -epochs to a number."
        )
    # The settings of the trial: those of the longest run, and not compiled if even a run of MAX_TIME would not save the
    # time that compiling takes, as TRAIN.COMPILE auto decides later for the run.
    max_time = seconds_of(config.MAX_TIME)
    train = config.TRAIN.with_auto_epochs(LONGEST_RUN)
    saved_by_compiling = choice.FRACTION_SAVED * max_time
    if train.COMPILE == choice.AUTO and saved_by_compiling <= choice.REQUIRED_RATIO * choice.SECONDS_TO_COMPILE:
        train = train.changed(COMPILE=choice.NONE)
    config_of_trial = config.changed(TRAIN=train)

    # The trial. The run is built again later: it logs these lines itself, and must draw the random numbers of a run
    # without trial.
    spare = SPARE_ON_CPU if run.device.type == "cpu" else SPARE
    trial = _Trial(config_of_trial, spare)
    with unheard(), fork_host_rng():
        run_of_trial = replace(run, config=config_of_trial)
        ready = on_every_rank(run.world, lambda: build_for_training(run_of_trial, checkpoint=None, dry=True))
        trial.measure(ready, SHARE_OF_TRIAL * max_time)
        compiling = (ready.choices["compile"], "auto: as in the trial that found TRAIN.NUM_EPOCHS")
        ready.train_loader.close()
        ready.val_loader.close()
        del ready
    gc.collect()
    take_peak(run.device)

    # The most epochs that need no more than the seconds left. Those needed grow with the number of epochs, so bisection
    # finds how many of the numbers 1, 2, ... need no more, which is the number itself. Rank 0 decides for all.
    left = trial.left(max_time)
    numbers = range(1, LONGEST_RUN + 1)
    epochs = broadcast(bisect_right(numbers, left, key=trial.needed), run.world)
    if epochs == 0:
        for_one = trial.needed(1)
        missing = for_one - left
        # With more time, the trial takes longer, too: hence 1.2. Rounded up to 10 seconds.
        enough = 10 * math.ceil((max_time + 1.2 * missing / (1 - trial.spare)) / 10)
        raise UserError(
            f"TRAIN.NUM_EPOCHS auto: MAX_TIME {config.MAX_TIME} is too short: one epoch takes about "
            f"{clock(math.ceil(for_one))}, and start, end and a reserve take {clock(math.ceil(max_time - left))}. "
            f"-max_time {clock(enough)} would do for one epoch. Faster: a smaller model or DATA.IMAGE_SIZE, or "
            "MODEL.FREEZE=backbone, which trains the classifier alone."
        )
    config = config.changed(TRAIN=config.TRAIN.with_auto_epochs(epochs))
    paces = trial.paces.values()
    log.info(
        "TRAIN.NUM_EPOCHS auto: %d, with a warm-up of %g: about %s of MAX_TIME %s, of which %.0f %% stay free (%s s "
        "per update, %.3g s per validation)",
        epochs,
        config.TRAIN.WARMUP_EPOCHS,
        clock(trial.needed(epochs)),
        config.MAX_TIME,
        100 * spare,
        " to ".join(f"{pace:.3g}" for pace in sorted({min(paces), max(paces)})),
        trial.validation,
    )
    return replace(run, config=config, compiling=compiling)


def _windows(ready: ReadyToTrain, epoch: int, start: int) -> Iterator[Window]:
    """Yield the windows of an epoch from update `start` on, then those of the whole epoch again and again."""
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
    """Train and log a few updates, without saving anything. Returns the seconds per update. A collective call.

    The first updates, at the end of an epoch, only set up: they allocate memory and start processes. The updates of the
    next epoch are timed, for about `seconds` and at most `most` of them: either a part of one epoch, or whole epochs.
    At `end`, a reading of time.monotonic, the update in progress is the last one. If none was timed yet, the time is
    that of the updates that set up.

    In a run, the loader works ahead across epochs; here, each epoch begins with an empty loader. Otherwise, images that
    were loaded during slow first updates would make the time too short. So the wait for the first images of an epoch is
    counted as a part of the whole epoch, even if only some of its updates are made.
    """
    parts = ready.parts
    loader = ready.train_loader
    device = ready.precision.device
    throughput = Throughput(device, parts.stages)
    per_epoch = loader.order.updates
    began = time.perf_counter()
    number = 0
    first_waits = list[float]()
    """Seconds of the wait for the first images of each epoch"""
    set_up = min(SET_UP, per_epoch)
    position.step = max(0, per_epoch - SET_UP)  # so that the epoch ends with the updates that set up
    # Timed updates have the numbers 1, 2, 3 and so on. Those that set up have 0 and negative numbers.
    for number, window in enumerate(_windows(ready, position.epoch, position.step), start=1 - set_up):
        is_timed = number > 0
        is_first_timed = number == 1
        if position.step == per_epoch:  # the next update begins an epoch
            synchronize(device)
        if is_first_timed:
            loader.take_wait()
            began = time.perf_counter()
        train_update(parts, window, position.update + 1)
        position.step = position.step % per_epoch + 1  # 1 after the last one of an epoch
        position.update += 1
        throughput.count(loader.order.samples_of(position.step - 1))
        if is_timed and position.step == 1:
            first_waits.append(loader.take_wait())
        if is_first_timed:
            throughput.restart()
        is_late = time.monotonic() >= end
        is_enough = number >= most or (number >= LEAST_UPDATES and time.perf_counter() - began >= seconds)
        is_part_of_one_epoch = number <= per_epoch
        may_end = is_part_of_one_epoch or position.step == per_epoch
        if broadcast(is_late or (is_enough and may_end), parts.world):
            break
    synchronize(device)

    # Without first waits, an update takes the same time anywhere in an epoch.
    waited = sum(first_waits)
    updates = number if number > 0 else number + set_up  # the timed ones, or those that set up
    seconds_without_wait = (time.perf_counter() - began - waited) / updates
    update = seconds_without_wait + waited / max(1, len(first_waits) * per_epoch)
    reason = ": the time of a dry run is up" if time.monotonic() >= end else ""
    log.info("The time per update is estimated from %s%s.", counted(updates, "update"), reason)
    # `throughput.restart` came after the first wait, so that does not count here.
    _report_updates(ready, position, reporter, throughput, waited=loader.take_wait() + sum(first_waits[1:]))
    return update


def _report_updates(
    ready: ReadyToTrain, position: Position, reporter: Reporter, throughput: Throughput, waited: float
) -> None:
    """Log the metrics of trial updates, their speed, and the bottleneck. A collective call.

    `waited`: seconds that the host waited for data, since `throughput` began.
    """
    parts = ready.parts
    reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
    reporter.train(position, reading, throughput.read(waited), parts.figures())
    waited_percents = all_gather([throughput.tally.waited_percent], parts.world)
    bottleneck = find_bottleneck(throughput.tally, setting_of(ready), waited_percents)
    if bottleneck:
        log.info("Where the time went: %s", bottleneck.text)


def _validate(ready: ReadyToTrain, position: Position, reporter: Reporter | None, end: float = math.inf) -> float:
    """Validate all weights that the run keeps. Returns the seconds that this takes. A collective call.

    A long validation ends after MOST_BATCHES batches or at `end` (a reading of time.monotonic), and its time is
    extrapolated. A short one is timed a second time, since the first time has started loading processes.
    `reporter`: logs the metrics of the first time; None the second time.
    """
    world = ready.parts.world
    batches = 0
    metrics = {}
    began = time.perf_counter()
    all_batches = len(ready.val_loader) + (ready.neighbours.batches if ready.neighbours else 0)
    # Batches that every rank has, since a rank may have one batch more or less than rank 0. Only before these may all
    # ranks decide together whether to stop: `broadcast` is a collective call.
    batches_of_every_rank = broadcast(all_batches, world) - 1

    def count() -> None:
        """Count a batch before it is validated, or end the validation if its time can be extrapolated."""
        nonlocal batches
        enough = batches >= MOST_BATCHES or time.monotonic() >= end
        may_stop = 0 < batches < batches_of_every_rank
        if may_stop and broadcast(enough, world):
            raise _EnoughBatches
        batches += 1

    try:
        for weight_set, model in ready.parts.weights.items():
            metrics[weight_set] = validate(ready, on_device(model, ready.precision.device), world, count)
    except _EnoughBatches:
        synchronize(ready.precision.device)
        return (time.perf_counter() - began) / batches * all_batches * len(ready.parts.weights)
    seconds = time.perf_counter() - began
    if reporter is None:  # the second time
        return seconds
    reporter.validation(position, metrics, seconds)
    was_short = broadcast(seconds < SHORT, world)
    return _validate(ready, position, None, end) if was_short else seconds


def _costs(
    config: Config, ready: ReadyToTrain, costs: dict[str, Cost], updates: int, batch_is_auto: bool = False
) -> Iterator[str]:
    """Yield the lines of a dry run that say what the run costs, in memory and in time.

    `costs`: heading of a line -> what was measured. `updates`: number that the run has still to train.
    `batch_is_auto`: `auto` has chosen the batch size.
    """
    # Each line begins with a heading of 11 columns; a line that continues another has blanks there.
    device = ready.precision.device
    yield from _cost_in_memory(config, device, batch_is_auto)

    # The work that is left. The timed updates are of the epoch at `position`; later ones may have larger images or more
    # tokens, so each of them counts as several like those that were timed.
    per_epoch = ready.train_loader.order.updates
    position = ready.position
    epochs = updates / per_epoch
    epochs_done = position.epoch - 1 + position.step / per_epoch
    boundaries = (position.epoch - 1, position.epoch, epochs_done, epochs_done + epochs)
    work_before_epoch, work_after_epoch, work_done, work_in_all = work_until(config, boundaries)
    work_of_epoch = max(work_after_epoch - work_before_epoch, 1e-9)
    updates_like_timed = per_epoch * (work_in_all - work_done) / work_of_epoch
    if updates > 0 and updates_like_timed > 1.001 * updates:  # more, beyond rounding
        yield "           later epochs take more memory; their time is estimated by their pixels and tokens"
    if config.trains_on_features and updates:
        yield "           features are kept: the estimate is one pass over the images; then an epoch takes seconds"
        # Only the pass that computes the features is counted, like one epoch.
        updates = per_epoch
        updates_like_timed = per_epoch
        epochs = 1.0
    validations = max(1, round(epochs / config.VALIDATE_FREQ)) if updates else 0
    if config.VALIDATE_EVERY_UPDATES:
        validations += updates // config.VALIDATE_EVERY_UPDATES

    # The time, by each measurement.
    condition = "; longer if other programs take the cores" if device.type == "cpu" else ""
    shortest = math.inf
    for heading, cost in costs.items():
        left = updates_like_timed * cost.update + validations * cost.validation
        shortest = min(shortest, left)
        yield (
            f"{heading:<11}{cost.update:.3g} s per update, about {clock(cost.validation)} per validation; "
            f"{counted(updates, 'update')} to go ({epochs:,.1f} epochs): about {clock(left)}, until "
            f"{datetime.now() + timedelta(seconds=left):%Y-%m-%d %H:%M} if started now{condition}"
        )

    # A smaller image size, if that is long.
    may_change_size = config.MODEL.RESUME is None and not config.TRAIN.SIZE_SCHEDULE
    is_long = shortest > LONG
    size = smaller_size(config) if is_long and may_change_size else None
    if size:
        pixels = math.prod(sides(config.DATA.IMAGE_SIZE))
        fewer_pixels = math.prod(sides(size))
        value = ",".join(map(str, sides(size))) if isinstance(size, tuple) else size
        yield (
            f"long?      -image_size {value} computes about {pixels / fewer_pixels:.1f} times as fast, if the images "
            "still show enough; a smaller -model may gain more (docs/which_model.md)"
        )


def _cost_in_memory(config: Config, device: torch.device, batch_is_auto: bool) -> Iterator[str]:
    """Yield the line of the memory at its peak, and ways to save some if it is nearly all."""
    peak = 1e9 * peak_memory_gb(device)
    total = total_memory(device)
    of_total = f" of {in_gib(total)}" if total else ""
    where = "for each process, its libraries included" if device.type == "cpu" else "on each GPU"
    yield f"memory     {in_gib(peak)}{of_total} at the peak, {where}"
    if total and peak > NEARLY_FULL * total:
        ways = "; ".join(ways_out(config, validating=False, device=device, batch_is_auto=batch_is_auto))
        yield f"           this is nearly all memory; to save some: {ways}"


def smaller_size(config: Config) -> ImageSize | None:
    """Return an image size of about half the pixels, a multiple of 32; None if model or weights do not support it."""
    model = config.MODEL
    size = config.DATA.IMAGE_SIZE
    channels = config.DATA.IMAGE_CHANNELS
    smaller = size_of([STEP * round(side / math.sqrt(2) / STEP) for side in sides(size)])
    if min(sides(smaller)) == 0 or math.prod(sides(smaller)) >= math.prod(sides(size)):
        return None
    with suppress(UserError):  # of a model that cannot be built with this size
        _, arguments = timm_call(model, smaller, channels)
        # Models without this argument take images of any size, and without weights nothing depends on the old size.
        if "img_size" not in arguments or not model.PRETRAINED:
            return smaller
        # Otherwise, timm must resize the weights, which it does for models with this method.
        if hasattr(build_without_weights(model, smaller, channels), "set_input_size"):
            return smaller
    return None
