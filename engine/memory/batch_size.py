"""DATA.BATCH_SIZE auto: how many images fit, by trial updates.

They have a model, an optimiser and an EMA of their own, and made-up images: the run begins as if the number had been
given.
"""

import gc
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
MOST_ON_CPU = 1024
LEAST_UPDATES = 8
"""Minimum number of updates in an epoch, even if a larger batch fits."""
SECONDS_PER_TRIAL_ON_CPU = 15.0
UPDATES_PER_TRIAL = 2  # the optimiser has its state only after the first


def with_largest_batch(config: Config, target: int | None, world: World, device: torch.device) -> Config:
    """Set the batch size that fits on every rank. `target`: the global batch that accumulation must give."""
    if config.EVAL and config.DATA.BATCH_SIZE_EVAL is not None:
        return with_batch(config, config.DATA.BATCH_SIZE_EVAL, config.TRAIN.ACCUM_ITER)
    processes = counted(world.size, "process")
    if target is not None and target % world.size:
        raise UserError(
            f"A global batch of {target} cannot be divided evenly among {processes}; set TRAIN.GLOBAL_BATCH to "
            f"{multiples_near(target, world.size)}."
        )
    each = target // world.size if target is not None else None
    batch, words = on_every_rank(world, lambda: _search(config, each, world, device))
    fitting = min(all_gather([batch], world))
    if fitting < batch:
        words = f"{fitting} fits on every process"
    chosen = fitting if each is None else largest_divisor(each, fitting)
    if chosen == 1 and config.TRAIN.mixes and not config.EVAL:
        raise UserError(
            f"DATA.BATCH_SIZE auto: 1 is the largest divisor of {each} images per update and process that fits, and "
            "mixup and CutMix mix images of a batch. Set another TRAIN.GLOBAL_BATCH."
        )
    config = with_batch(config, chosen, config.TRAIN.ACCUM_ITER if each is None else each // chosen)
    if not config.EVAL:
        total = f"{chosen} x {processes} x {config.TRAIN.ACCUM_ITER} accumulated = {global_batch(config, world)}"
        words += f"; {total} images per update"
    log.info("DATA.BATCH_SIZE auto: %s.", words)
    return config


def largest_divisor(target: int, fitting: int) -> int:
    """Largest divisor of `target` up to `fitting`: a multiple of 8, unless that is less than half of the largest."""
    divisors = [size for size in range(1, min(fitting, target) + 1) if target % size == 0]
    even = [size for size in divisors if size % STEP == 0]
    return even[-1] if even and 2 * even[-1] >= divisors[-1] else divisors[-1]


def _search(config: Config, each: int | None, world: World, device: torch.device) -> tuple[int, str]:
    """Batch that fits on this rank, with an explanation. Frees all that the search took.

    `each`: images per update and process, if the global batch is given.
    """
    limit = _limit(config, world, device)
    if limit is None:
        raise UserError(
            "DATA.BATCH_SIZE auto: the free memory of this machine is unknown. Set TRAIN.MEMORY_LIMIT (GiB per "
            "process), or set -batch_size to a number."
        )
    at_most = int(limit * (1 - MARGIN))
    fitting = 0
    peak = 0
    reason = ""
    # Building the run logs its lines again, and draws random numbers again.
    with unheard(), fork_host_rng(), limited(device, at_most):
        try:
            trial = Trial(config, each, world, device, at_most)
            most, why = trial.most()
            fitting = largest_that_fits(trial.fits, most, trial.is_slow)
            peak = trial.peaks.get(fitting, 0)
            if fitting == most:
                reason = f"; {why}"
            elif trial.is_slow():
                reason = "; a larger one would take too long to try on this CPU"
            del trial
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
        take_peak(device)
    least = least_batch(config)
    if fitting < least:
        smallest = with_batch(config, 1, config.TRAIN.ACCUM_ITER)
        ways = [way.partition(":")[0] for way in ways_out(smallest, config.EVAL, device, found=True)]
        ways.append("a smaller MODEL.NAME or DATA.IMAGE_SIZE")
        words = f"Try {', '.join(ways)}"
        if not config.EVAL:
            words += "; or, on several devices, DIST.STRATEGY=fsdp with a number as -batch_size"
        raise UserError(f"DATA.BATCH_SIZE auto: not even a batch of {least} fits into {in_gib(limit)}. {words}.")
    return fitting, f"{fitting} fits ({in_gib(peak)} of {in_gib(limit)}{reason})"


def check_batch(run: Run) -> None:
    """Refuse a batch that would take more memory than is free, by updates of small ones: for a dry run on a CPU.

    There the system would kill the program without a word.
    """
    config = run.config
    device = run.device
    batch = run.config.DATA.BATCH_SIZE
    limit = _limit(config, run.world, device)
    sharded = config.DIST.STRATEGY == "fsdp"
    if batch <= STEP or run.auto_batch_size or device.type == "cuda" or sharded or limit is None:
        return
    limit = int(limit * (1 - MARGIN))
    size = least_batch(config)
    with unheard(), fork_host_rng():
        trial = Trial(config, None, run.world, device, limit)
        while size < min(batch, 4 * STEP) and trial.fits(size) and (len(trial.peaks) < 2 or not trial.is_slow()):
            size *= 2
    largest_tried = max(trial.peaks.values(), default=0)
    expected = max(trial.expected(batch), largest_tried)
    if expected > limit:
        taken = f"an update would take about {in_gib(expected)} per process, and {in_gib(limit)} can be had"
        ways = "\n  ".join(ways_out(config, False, device))
        raise UserError(f"DATA.BATCH_SIZE {batch}: {taken}. Ways out:\n  {ways}")


def _limit(config: Config, world: World, device: torch.device) -> float | None:
    """Bytes that this process may hold: TRAIN.MEMORY_LIMIT, or less if less is free; None if both are unknown."""
    free = free_memory(device, world.local_size)
    limits: list[float] = []
    if free is not None:
        limits.append(free + held_memory(device))
    if config.TRAIN.MEMORY_LIMIT is not None:
        limits.append(config.TRAIN.MEMORY_LIMIT * GIB)
    return min(limits, default=None)


def free_memory(device: torch.device, processes: int) -> int | None:
    """Free bytes of `device` for this process, one of `processes` on this machine; None if unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved and does not use is free too.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    known = [max(0, limit - used) for limit, used in cgroups()]
    available = meminfo("MemAvailable")
    if available is not None:
        known.append(available)
    return min(known) // processes if known else None


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds now, libraries and data included; 0 on a GPU, whose libraries are no part of it."""
    if device.type != "cpu":
        return 0
    return meminfo("VmRSS", STATUS) or round(1e9 * peak_memory_gb(device))


@contextmanager
def limited(device: torch.device, limit: int) -> Iterator[None]:
    """Limit a GPU's memory: allocations beyond `limit` bytes raise torch.OutOfMemoryError.

    Where a host runs out of memory there is no error: the kernel kills the process.
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
    """Mixing takes two images."""
    return 2 if config.TRAIN.mixes and not config.EVAL else 1


def largest_that_fits(fits: Callable[[int], bool], most: int, enough: Callable[[], bool]) -> int:
    """Largest size that fits: by doubling, then by bisection in steps of 8, or of 1 if 8 do not fit. 0 if none fits.

    `enough`: called after each success; True if no larger size should be tried.
    """
    good = 0
    bad = most + 1
    size = min(STEP, most)
    while size > good:
        if fits(size):
            good = size
            if enough():
                break
        else:
            bad = size
        if bad > most:
            size = min(2 * good, most)
        else:
            step = STEP if good >= STEP else 1
            size = (good // step + -(-bad // step)) // 2 * step
    return good


class Trial:
    """Trial updates, or trial batches of a validation."""

    def __init__(self, config: Config, each: int | None, world: World, device: torch.device, limit: int) -> None:
        """`each`: see `_search`."""
        # Pretrained weights take as much memory as random ones.
        config = config.changed(MODEL={"PRETRAINED": None}, TRAIN=config.TRAIN.spanning(1))
        self._config = config
        self._each = each
        self._world = world
        self._device = device
        self._limit = limit
        # With two micro-batches, gradients exist during the forward pass; so they do, in buckets, under DDP.
        accumulates = each is not None or world.size > 1 or config.TRAIN.ACCUM_ITER > 1
        self._micro_batches = 2 if accumulates else 1
        # In the run, the data sets take their part of the memory, too.
        options = config.MODEL.NUM_CLASSES, config.SEED, device
        splits = (False,) if config.EVAL else (True, False)
        self._datasets = [open_dataset(config.DATA, train, *options) for train in splits]
        self._tuned = tuned_model(config, device)
        self._parts = None
        self._seconds = 0.0
        if not config.EVAL:
            numbered = with_batch(config, STEP, self._micro_batches)
            self._parts = build_train_state(numbered, ALONE, self._tuned, per_epoch=1000)
            self._parts.leave_out(OverflowWatch)  # it would replay overflows; MARGIN has room for what it keeps
            self._parts.assemble()
            self._parts.enter(config.TRAIN.NUM_EPOCHS)  # the last epoch has most pixels and tokens
        self.peaks: dict[int, int] = {}
        """Bytes by batch size; also of those that did not fit."""

    def most(self) -> tuple[int, str]:
        """Largest batch to try, and the reason."""
        config = self._config
        samples = len(self._datasets[0])
        size = self._world.size
        most, kind = (MOST_ON_CPU, "CPU") if self._device.type == "cpu" else (MOST, "GPU")
        limits = [
            (most, f"no larger one is tried on a {kind}"),
            (max(1, samples // size), f"there are only {counted(samples, 'image')}"),
        ]
        if self._each is not None:
            limits.append((self._each, "no more are needed for the global batch"))
        elif not config.EVAL:
            at_most = samples // (LEAST_UPDATES * size * config.TRAIN.ACCUM_ITER)
            words = f"with more, an epoch of {samples:,} images would have fewer than {LEAST_UPDATES} updates"
            limits.append((max(least_batch(config), at_most // STEP * STEP or at_most), words))
        return min(limits)

    def fits(self, batch: int) -> bool:
        if self._device.type != "cuda" and self.expected(batch) > self._limit:
            return False  # nothing else limits memory there, until the system kills the process
        take_peak(self._device)
        done = self._try(batch)
        if not done:
            gc.collect()  # free what the error held
        self.peaks[batch] = take_peak(self._device)
        return done and self.peaks[batch] <= self._limit

    def expected(self, batch: int) -> float:
        """Bytes that a batch takes if it goes on as between the two largest that were tried; 0 before there are two."""
        if len(self.peaks) < 2:
            return 0.0
        (small, less), (large, more) = sorted(self.peaks.items())[-2:]
        return more + (batch - large) * max(0, more - less) / (large - small)

    def is_slow(self) -> bool:
        """Whether twice the batch would take too long to try: a CPU has memory for more than it computes in minutes."""
        return self._device.type == "cpu" and 2 * self._seconds > SECONDS_PER_TRIAL_ON_CPU

    def _try(self, batch: int) -> bool:
        try:
            for number in range(1, UPDATES_PER_TRIAL + 1):
                began = time.perf_counter()
                if self._parts is None:
                    self._tuned.model.eval()
                    with torch.no_grad(), self._tuned.precision.autocast(training=False):
                        self._tuned.model(self._tuned.inputs(self._batch(batch).images))
                else:
                    of = range(self._micro_batches)
                    shares = tuple(MicroBatch(nth, np.arange(batch), 1 / len(of)) for nth in of)
                    train_update(self._parts, Window(shares, (self._batch(batch) for _ in of)), number)
                synchronize(self._device)
                # Overwritten by the last update: the first one may import much.
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
        data = self._config.DATA
        device = self._device
        images = torch.randint(0, 256, (size, *data.shape), dtype=dtype_of(data), device=device)
        return Batch(images, task_of(self._config).example(size, device), torch.arange(size))
