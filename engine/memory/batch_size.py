"""DATA.BATCH_SIZE auto: how many images fit, by trial updates.

The trials use a model, an optimiser and an EMA of their own, and random images. So the run begins as if the user had
given the number.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from datasets import Batch, MicroBatch, Window, open_dataset
from datasets.base import dtype_of
from engine.amp.overflow import OverflowWatch
from engine.machine.device import Run, global_batch, synchronize, with_batch
from engine.machine.memory import GIB, STATUS, cgroups, in_gib, is_out_of_memory, meminfo, peak_memory_gb, take_peak
from engine.memory.out_of_memory import ways_out
from engine.setup import build_train_state, tuned_model
from engine.task import task_of
from engine.update import train_update
from utils.config import Config
from utils.distributed.world import ALONE, World, all_gather, on_every_rank
from utils.errors import UserError
from utils.log import log, unheard
from utils.seeding import fork_host_rng
from utils.text import counted, multiples_near

MARGIN = 0.08
"""Fraction of memory that stays free, for libraries beside torch and for gaps between tensors."""
STEP = 8
"""Batch sizes are multiples of this, for tensor cores, unless fewer images fit."""
MOST = 8192
"""Largest batch size that is tried on a GPU"""
MOST_ON_CPU = 1024
LEAST_UPDATES = 8
"""Minimum number of updates in an epoch, even if a larger batch fits."""
SECONDS_PER_TRIAL_ON_CPU = 15.0
"""No larger batch is tried if its trial would take longer than this on a CPU."""
UPDATES_PER_TRIAL = 2  # the optimiser has its state only after the first


def with_largest_batch(config: Config, target: int | None, world: World, device: torch.device) -> Config:
    """Set DATA.BATCH_SIZE to the largest number of images that fits on every rank. A collective call.

    For an evaluation it is DATA.BATCH_SIZE_EVAL, without a trial, if that is set.
    `target`: the global batch that must result, with TRAIN.ACCUM_ITER set to match; None if any will do, with
    TRAIN.ACCUM_ITER as it is. UserError if no batch fits, or none that divides `target`.
    """
    if config.EVAL and config.DATA.BATCH_SIZE_EVAL is not None:
        return with_batch(config, config.DATA.BATCH_SIZE_EVAL, config.TRAIN.ACCUM_ITER)
    processes = counted(world.size, "process")
    if target is not None and target % world.size:
        raise UserError(
            f"A global batch of {target} cannot be divided evenly among {processes}; set TRAIN.GLOBAL_BATCH to "
            f"{multiples_near(target, world.size)}."
        )
    per_process = target // world.size if target is not None else None
    fits_here, explanation = on_every_rank(world, lambda: _search(config, per_process, world, device))
    fits_everywhere = min(all_gather([fits_here], world))
    if fits_everywhere < fits_here:  # more fits here than on another rank
        explanation = f"{fits_everywhere} fits on every process"
    if per_process is None:
        chosen = fits_everywhere
        accumulation = config.TRAIN.ACCUM_ITER
    else:
        chosen = largest_divisor(per_process, fits_everywhere)
        accumulation = per_process // chosen
    # Without a target, the search has tried 2 images at least where they are mixed.
    if chosen == 1 and config.TRAIN.mixes and not config.EVAL:
        raise UserError(
            f"DATA.BATCH_SIZE auto: 1 is the largest divisor of {per_process} images per update and process that fits, "
            "and mixup and CutMix mix images of a batch. Set another TRAIN.GLOBAL_BATCH."
        )
    config = with_batch(config, chosen, accumulation)
    if not config.EVAL:
        total = f"{chosen} x {processes} x {config.TRAIN.ACCUM_ITER} accumulated = {global_batch(config, world)}"
        explanation += f"; {total} images per update"
    log.info("DATA.BATCH_SIZE auto: %s.", explanation)
    return config


def largest_divisor(target: int, limit: int) -> int:
    """Return the largest divisor of `target` up to `limit`, if possible one that is a multiple of 8.

    A multiple of 8 is faster, but is not taken if it is less than half of the largest divisor.
    """
    divisors = [size for size in range(1, min(limit, target) + 1) if target % size == 0]
    multiples = [size for size in divisors if size % STEP == 0]
    return multiples[-1] if multiples and 2 * multiples[-1] >= divisors[-1] else divisors[-1]


def _search(config: Config, per_process: int | None, world: World, device: torch.device) -> tuple[int, str]:
    """Find the largest batch that fits on this rank. Returns its size and an explanation for the log.

    Frees all memory that the search took. UserError if not even the smallest batch fits that the run can use.
    `per_process`: images per update and process; None if the global batch is not given.
    """
    limit = _bytes_allowed(config, world, device)
    if limit is None:
        raise UserError(
            "DATA.BATCH_SIZE auto: the free memory of this machine is unknown. Set TRAIN.MEMORY_LIMIT (GiB per "
            "process), or set -batch_size to a number."
        )
    usable = int(limit * (1 - MARGIN))
    fitting = 0  # if not even the model fits
    peak = 0
    reason = ""
    # The run is built for the trial and again later: only the second time may log lines and draw random numbers.
    with unheard(), fork_host_rng(), limited(device, usable):
        try:
            trial = Trial(config, per_process, world, device, usable)
            most, why_most = trial.most()
            fitting = largest_that_fits(trial.fits, most, trial.is_slow)
            peak = trial.peaks.get(fitting, 0)
            if fitting == most:
                reason = f"; {why_most}"
            elif trial.is_slow():
                reason = "; a larger one would take too long to try on this CPU"
            del trial  # with its model
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
        take_peak(device)

    least = least_batch(config)
    if fitting < least:
        smallest = with_batch(config, 1, config.TRAIN.ACCUM_ITER)
        settings = [way.partition(":")[0] for way in ways_out(smallest, config.EVAL, device, batch_is_auto=True)]
        settings.append("a smaller MODEL.NAME or DATA.IMAGE_SIZE")
        advice = f"Try {', '.join(settings)}"
        if not config.EVAL:
            advice += "; or, on several devices, DIST.STRATEGY=fsdp with a number as -batch_size"
        raise UserError(f"DATA.BATCH_SIZE auto: not even a batch of {least} fits into {in_gib(limit)}. {advice}.")
    return fitting, f"{fitting} fits ({in_gib(peak)} of {in_gib(limit)}{reason})"


def check_batch(run: Run) -> None:
    """Raise UserError if a batch would take more memory than is free; for a dry run on a CPU.

    There the system would kill the program without a message. So updates with small batches are measured, and the
    memory that DATA.BATCH_SIZE takes is extrapolated from them.
    """
    config = run.config
    device = run.device
    batch = run.config.DATA.BATCH_SIZE
    limit = _bytes_allowed(config, run.world, device)
    # Small batches are left out, and those that `auto` has tried; a GPU reports an error of its own, and the trial's
    # model is not sharded.
    sharded = config.DIST.STRATEGY == "fsdp"
    if batch <= STEP or run.auto_batch_size or device.type == "cuda" or sharded or limit is None:
        return
    usable = int(limit * (1 - MARGIN))
    size = least_batch(config)
    largest_size = min(batch, 4 * STEP)
    with unheard(), fork_host_rng():
        trial = Trial(config, None, run.world, device, usable)
        # `fits` makes updates with this size and records their peak. Two peaks are needed to extrapolate.
        while size < largest_size and trial.fits(size):
            if len(trial.peaks) >= 2 and trial.is_slow():
                break
            size *= 2
    largest_peak = max(trial.peaks.values(), default=0)
    expected = max(trial.expected(batch), largest_peak)
    if expected > usable:
        comparison = f"an update would take about {in_gib(expected)} per process, and {in_gib(usable)} can be had"
        ways = ways_out(config, validating=False, device=device, fits=lambda size: trial.expected(size) <= usable)
        lines = "\n  ".join(ways)
        raise UserError(f"DATA.BATCH_SIZE {batch}: {comparison}. Ways out:\n  {lines}")


def _bytes_allowed(config: Config, world: World, device: torch.device) -> float | None:
    """Return how many bytes this process may hold in all: TRAIN.MEMORY_LIMIT, or less if less is free.

    None if neither is known.
    """
    free = free_memory(device, world.local_size)
    limits: list[float] = []
    if free is not None:
        limits.append(free + held_memory(device))  # what this process holds already is not free, but allowed
    if config.TRAIN.MEMORY_LIMIT is not None:
        limits.append(config.TRAIN.MEMORY_LIMIT * GIB)
    return min(limits, default=None)


def free_memory(device: torch.device, processes: int) -> int | None:
    """Return the free bytes of `device` for this process; None if unknown.

    `processes`: how many share the memory of this machine. Each GPU has a process of its own.
    """
    if device.type == "cuda":
        # Memory that torch has reserved and does not use is free too.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    limits = [max(0, limit - used) for limit, used in cgroups()]
    available = meminfo("MemAvailable")
    if available is not None:
        limits.append(available)
    return min(limits) // processes if limits else None


def held_memory(device: torch.device) -> int:
    """Return how many bytes of host memory this process holds now, with libraries and data; 0 on a GPU.

    On a GPU, nothing is to be added to `free_memory`: that includes the memory which torch has reserved.
    """
    if device.type != "cpu":
        return 0
    return meminfo("VmRSS", STATUS) or round(1e9 * peak_memory_gb(device))  # without /proc, the most it has held


@contextmanager
def limited(device: torch.device, limit: int) -> Iterator[None]:
    """Limit a GPU's memory: allocations beyond `limit` bytes raise torch.OutOfMemoryError.

    Other devices cannot be limited. A host raises no error: if its memory runs out, the system kills the process.
    """
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def least_batch(config: Config) -> int:
    """Return the smallest batch size that the run can use: 2 with mixup or CutMix, which mix two images, else 1."""
    return 2 if config.TRAIN.mixes and not config.EVAL else 1


def largest_that_fits(fits: Callable[[int], bool], most: int, enough: Callable[[], bool]) -> int:
    """Find the largest size up to `most` that fits: double it until it does not, then bisect. Returns 0 if none fits.

    Sizes are multiples of STEP (8), or any number if 8 images do not fit.
    `fits`: tries a size. `enough`: called after each size that fits; True ends the search with that size.
    """
    fitting = 0  # the largest size that fits
    too_large = most + 1  # the smallest size that does not
    size = min(STEP, most)
    # The search ends when the next size to try is one that fits: there is none between the two.
    while size > fitting:
        if fits(size):
            fitting = size
            if enough():
                break
        else:
            too_large = size
        every_size_fitted = too_large > most
        if every_size_fitted:
            size = min(2 * fitting, most)
        else:
            # The middle of both, in steps, rounded down.
            step = STEP if fitting >= STEP else 1
            too_large_in_steps = math.ceil(too_large / step)
            size = (fitting // step + too_large_in_steps) // 2 * step
    return fitting


class Trial:
    """Measures the memory of batch sizes: by updates of a training, or by batches of a validation if EVAL is set."""

    def __init__(self, config: Config, per_process: int | None, world: World, device: torch.device, limit: int) -> None:
        """Build model and optimiser once, for all sizes to try.

        `per_process`: images per update and process; None if the global batch is not given.
        `limit`: bytes that this process may hold.
        """
        # Pretrained weights take as much memory as random ones. TRAIN.NUM_EPOCHS auto becomes 1 epoch.
        one_epoch_if_auto = config.TRAIN.with_auto_epochs(1)
        config = config.changed(MODEL={"PRETRAINED": None}, TRAIN=one_epoch_if_auto)
        self._config = config
        self._per_process = per_process
        self._world = world
        self._device = device
        self._limit = limit
        # Gradients that exist during the forward pass take memory then, too: from the second micro-batch of an update
        # on, and under DDP always, in its buckets. In both cases, the trial makes updates of two micro-batches.
        may_accumulate = per_process is not None or config.TRAIN.ACCUM_ITER > 1
        has_gradients = may_accumulate or world.size > 1
        self._micro_batches = 2 if has_gradients else 1
        # In the run, the data sets take their part of the memory, too.
        options = config.MODEL.NUM_CLASSES, config.SEED, device
        is_training_split = (False,) if config.EVAL else (True, False)
        self._datasets = [open_dataset(config.DATA, train, *options) for train in is_training_split]
        self._tuned = tuned_model(config, device)
        self._parts = None
        self._seconds = 0.0
        if not config.EVAL:
            config_of_trial = with_batch(config, STEP, self._micro_batches)
            # Any number of updates per epoch will do: the memory does not depend on it.
            self._parts = build_train_state(config_of_trial, ALONE, self._tuned, per_epoch=1000)
            # It would replay overflows. What it keeps in a run fits into MARGIN.
            self._parts.leave_out(OverflowWatch)
            self._parts.assemble()
            self._parts.enter(config.TRAIN.NUM_EPOCHS)  # the last epoch has most pixels and tokens
        self.peaks: dict[int, int] = {}
        """Batch size -> bytes at the peak, also for sizes that did not fit"""

    def most(self) -> tuple[int, str]:
        """Return the largest batch size to try, and the reason why no larger one is tried."""
        config = self._config
        samples = len(self._datasets[0])  # of the training split, or with EVAL of the validation split
        processes = self._world.size
        most, kind = (MOST_ON_CPU, "CPU") if self._device.type == "cpu" else (MOST, "GPU")
        limits = [
            (most, f"no larger one is tried on a {kind}"),
            (max(1, samples // processes), f"there are only {counted(samples, 'image')}"),
        ]
        if self._per_process is not None:  # the images per update are given
            limits.append((self._per_process, "no more are needed for the global batch"))
        elif not config.EVAL:
            batch = samples // (LEAST_UPDATES * processes * config.TRAIN.ACCUM_ITER)
            if batch >= STEP:
                batch = batch // STEP * STEP  # rounded down
            reason = f"with more, an epoch of {samples:,} images would have fewer than {LEAST_UPDATES} updates"
            limits.append((max(least_batch(config), batch), reason))
        return min(limits)  # the smallest size, with its reason

    def fits(self, batch: int) -> bool:
        """Try a batch size, and record its peak. Returns whether it fits into the limit.

        On a CPU, a size that is expected not to fit is not tried: the system would kill the process.
        """
        if self._device.type != "cuda" and self.expected(batch) > self._limit:
            return False
        take_peak(self._device)  # so that the next peak is that of this size
        completed = self._try(batch)
        if not completed:
            gc.collect()  # free what the error held
        self.peaks[batch] = take_peak(self._device)
        return completed and self.peaks[batch] <= self._limit

    def expected(self, batch: int) -> float:
        """Extrapolate the bytes that a batch takes from the two largest that were tried; 0 before there are two."""
        if len(self.peaks) < 2:
            return 0.0
        (smaller, smaller_peak), (larger, larger_peak) = sorted(self.peaks.items())[-2:]
        growth = max(0, larger_peak - smaller_peak)
        return larger_peak + (batch - larger) * growth / (larger - smaller)

    def is_slow(self) -> bool:
        """Return whether twice the last batch would take too long to try on a CPU.

        A CPU has memory for larger batches than it can compute in reasonable time.
        """
        return self._device.type == "cpu" and 2 * self._seconds > SECONDS_PER_TRIAL_ON_CPU

    def _try(self, batch: int) -> bool:
        """Make trial updates, or trial forward passes. Returns false if memory ran out; frees the gradients."""
        try:
            for number in range(1, UPDATES_PER_TRIAL + 1):
                began = time.perf_counter()
                if self._parts is None:  # an evaluation
                    self._tuned.model.eval()
                    with torch.no_grad(), self._tuned.precision.autocast(training=False):
                        self._tuned.model(self._tuned.inputs(self._batch(batch).images))
                else:
                    indices = range(self._micro_batches)
                    shares = tuple(MicroBatch(nth, np.arange(batch), 1 / len(indices)) for nth in indices)
                    train_update(self._parts, Window(shares, (self._batch(batch) for _ in indices)), number)
                synchronize(self._device)
                # The seconds of a trial, estimated from its last update: the first one may import much.
                self._seconds = UPDATES_PER_TRIAL * (time.perf_counter() - began)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            if self._parts is not None:
                self._parts.optimizer.zero_grad(set_to_none=True)
                self._parts.forward.zero_grad(set_to_none=True)
        return True

    def _batch(self, size: int) -> Batch:
        """Make a batch of `size` random images with example labels."""
        data = self._config.DATA
        device = self._device
        images = torch.randint(0, 256, (size, *data.shape), dtype=dtype_of(data), device=device)
        return Batch(images, task_of(self._config).example(size, device), torch.arange(size))
