"""DATA.BATCH_SIZE auto: the largest batch that fits into memory, and the accumulation that goes with it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.fit.batch_trial import STEP, Trial, largest_that_fits
from engine.machine.context import global_batch, multiples_near, with_batch
from engine.machine.memory import GIB, free_memory, in_gib, is_out_of_memory, limited
from utils.config import Config
from utils.distributed.world import World, all_gather, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.seeding import fork_host_rng
from utils.text import counted

MARGIN = 0.08
"""Fraction of memory that stays free, for libraries beside torch and for gaps between tensors."""


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
    config = with_batch(config, chosen, config.TRAIN.ACCUM_ITER if each is None else each // chosen)
    if config.EVAL:
        log.info("DATA.BATCH_SIZE auto: %s.", words)
        return config
    total = f"{chosen} x {processes} x {config.TRAIN.ACCUM_ITER} accumulated = {global_batch(config, world)}"
    log.info("DATA.BATCH_SIZE auto: %s; %s images per update.", words, total)
    if each is not None and chosen < each and 2 * chosen <= fitting:
        near = multiples_near(each, fitting // STEP * STEP or fitting, world.size)
        log.warning(
            "The batch size is only %d, although %d fits, because it must divide the %d images of each process in an "
            "update (global batch %d). A global batch of %s would allow a batch size of about %d.",
            chosen,
            fitting,
            each,
            target,
            near,
            fitting,
        )
    return config


def largest_divisor(target: int, fitting: int) -> int:
    """Largest divisor of `target` up to `fitting`: a multiple of 8, unless that is less than half of the largest."""
    divisors = [size for size in range(1, min(fitting, target) + 1) if target % size == 0]
    even = [size for size in divisors if size % STEP == 0]
    return even[-1] if even and 2 * even[-1] >= divisors[-1] else divisors[-1]


def _search(config: Config, each: int | None, world: World, device: torch.device) -> tuple[int, str]:
    """Batch that fits on this rank, with an explanation. Frees everything that the search took."""
    limit = _limit(config, world, device)
    with _leaving_no_trace(device), limited(device, int(limit * (1 - MARGIN))) as take_peak:
        fitting, peak, reason = _try_batches(config, each, world, device, take_peak)
    least = 2 if config.TRAIN.mixes and not config.EVAL else 1
    if fitting < least:
        raise UserError(
            f"DATA.BATCH_SIZE auto: not even a batch of {least} fits into {in_gib(limit)}. Try "
            + (
                "-amp, a smaller MODEL.NAME or DATA.IMAGE_SIZE."
                if config.EVAL
                else "TRAIN.GRAD_CHECKPOINT=blocks, -amp, a smaller MODEL.NAME or DATA.IMAGE_SIZE; or, on several "
                "devices, DIST.STRATEGY=fsdp with a number as -batch_size."
            )
        )
    return fitting, f"{fitting} fits ({peak} of {in_gib(limit)}{reason})"


def _try_batches(
    config: Config, each: int | None, world: World, device: torch.device, take_peak: Callable[[], int]
) -> tuple[int, str, str]:
    """Largest batch that fits, its peak memory, and the reason why no larger one was tried."""
    try:
        # The buckets in which processes all-reduce gradients hold them during the forward pass, too.
        trial = Trial(config, each is not None or world.size > 1, device, take_peak, each)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0, "", ""
    most = trial.most(each, world)
    fitting = largest_that_fits(trial.fits, most.batch, trial.slow)
    why = f"; {most.why}" if fitting == most.batch else trial.words_if_slow()
    return fitting, in_gib(trial.peaks.get(fitting, 0)), why


def _limit(config: Config, world: World, device: torch.device) -> float:
    free, given = free_memory(device, world.local_size), config.TRAIN.MEMORY_LIMIT
    if free is None and given is None:
        raise UserError(
            "DATA.BATCH_SIZE auto: the free memory of this machine is unknown. Set TRAIN.MEMORY_LIMIT (GiB per "
            "process), or set -batch_size to a number."
        )
    return min(size for size in (free, given and given * GIB) if size is not None)


@contextmanager
def _leaving_no_trace(device: torch.device) -> Iterator[None]:
    """Suppress log lines (building the run logs them again), keep random numbers, and free memory."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with fork_host_rng():
            yield
    finally:
        log.setLevel(level)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
