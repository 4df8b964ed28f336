"""DATA.BATCH_SIZE auto: the largest batch that fits, and the accumulation that keeps the global batch.

`engine/fit/batch_trial.py` tries batch sizes and leaves no trace: the run begins as if the number had been given.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from engine.fit.batch_trial import STEP, Trial, largest_that_fits
from engine.machine.context import Run, global_batch
from engine.machine.memory import GIB, free_memory, in_gib, is_out_of_memory, limited
from engine.setup import BATCH_CHOICE
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, all_gather, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.record.checkpoints import Checkpoint
from utils.seeding import fork_host_rng
from utils.text import counted

MARGIN = 0.08
"""Fraction of memory that stays free, for libraries beside torch and for gaps between tensors."""


def settle_batch(run: Run, checkpoint: Checkpoint | None) -> Run:
    """`run` with numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER.

    A collective call: all ranks get the same numbers. A resumed run keeps the batch size that it found.
    """
    config, world = run.config, run.world
    saved = checkpoint.meta["batch"] if checkpoint is not None and not config.EVAL else None
    before = checkpoint.meta.get("choices", {}).get(BATCH_CHOICE) if checkpoint is not None and saved else None
    auto = config.DATA.BATCH_SIZE == AUTO
    if saved is not None and auto and before == saved["per_process"]:
        config = _with(config, saved["per_process"], saved["accumulated"])
        log.info("DATA.BATCH_SIZE auto: %d, which this run found when it began.", before)
    elif auto:
        target = None if config.EVAL else config.TRAIN.GLOBAL_BATCH or (_global(saved) if saved else None)
        config = _with_largest_batch(config, target, world, run.device)
    if config.TRAIN.GLOBAL_BATCH is not None and not config.EVAL:
        given, target = config, config.TRAIN.GLOBAL_BATCH
        config = on_every_rank(world, lambda: _with_global_batch(given, target, world))
    elif checkpoint is not None and saved is not None:
        settled, kept = config, checkpoint
        config = on_every_rank(world, lambda: with_kept_batch(settled, kept, world.size))
    return replace(
        run,
        config=config,
        auto_batch_size=auto or before == config.DATA.BATCH_SIZE,
        asked_accumulation=run.config.TRAIN.ACCUM_ITER,
    )


def with_kept_batch(config: Config, checkpoint: Checkpoint, processes: int) -> Config:
    """Change the accumulation if the number of processes changed, so that the global batch stays the same.

    It may have changed in an earlier resume: then the settings still ask for the accumulation of the first number of
    processes. Nothing changes if the settings ask for another batch than they did before.
    """
    saved = checkpoint.meta["batch"]
    train, data = config.TRAIN, config.DATA
    if saved["per_process"] != data.BATCH_SIZE:
        return config
    if train.ACCUM_ITER not in (saved["accumulated"], saved.get("asked")):
        return config
    total, at_once = _global(saved), data.BATCH_SIZE * processes
    if total == at_once * train.ACCUM_ITER:
        return config
    if total % at_once:
        other = f", or set TRAIN.GLOBAL_BATCH={total} and a -batch_size that divides {total // processes}"
        raise UserError(
            f"{checkpoint.folder}: trained with a global batch of {total} on {counted(saved['processes'], 'process')}; "
            f"on {counted(processes, 'process')} with DATA.BATCH_SIZE {data.BATCH_SIZE}, no TRAIN.ACCUM_ITER gives "
            f"that global batch. Choose another number of processes{other * (total % processes == 0)}."
        )
    if processes != saved["processes"]:
        log.info("Number of processes: %d instead of %d.", processes, saved["processes"])
    log.info(
        "TRAIN.ACCUM_ITER is %d instead of %d, so that the global batch stays %d.",
        total // at_once,
        train.ACCUM_ITER,
        total,
    )
    return _with(config, data.BATCH_SIZE, total // at_once)


def largest_divisor(target: int, fitting: int) -> int:
    """Largest divisor of `target` up to `fitting`: a multiple of 8, unless that is less than half of the largest."""
    divisors = [size for size in range(1, min(fitting, target) + 1) if target % size == 0]
    even = [size for size in divisors if size % STEP == 0]
    return even[-1] if even and 2 * even[-1] >= divisors[-1] else divisors[-1]


def _global(saved: dict[str, Any]) -> int:
    return saved["per_process"] * saved["accumulated"] * saved["processes"]


def _with(config: Config, batch: int, accumulated: int) -> Config:
    data = config.DATA.model_copy(update={"BATCH_SIZE": batch})
    train = config.TRAIN.model_copy(update={"ACCUM_ITER": accumulated})
    return config.model_copy(update={"DATA": data, "TRAIN": train})


def _with_global_batch(config: Config, target: int, world: World) -> Config:
    """Set the TRAIN.ACCUM_ITER that gives TRAIN.GLOBAL_BATCH."""
    batch, before = config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER
    at_once = batch * world.size
    if target % at_once:
        raise UserError(
            f"TRAIN.GLOBAL_BATCH: {target} is not a multiple of the {at_once} images that {_processes(world)} with "
            f"DATA.BATCH_SIZE {batch} take at once. Use {_multiples_near(target, at_once)}, another -batch_size, or "
            "-batch_size auto."
        )
    if before not in (1, target // at_once):
        log.info("TRAIN.ACCUM_ITER is %d instead of %d, because of TRAIN.GLOBAL_BATCH.", target // at_once, before)
    return _with(config, batch, target // at_once)


def _with_largest_batch(config: Config, target: int | None, world: World, device: torch.device) -> Config:
    """Set the batch size that fits on every rank. `target`: the global batch that accumulation must give."""
    if config.EVAL and config.DATA.BATCH_SIZE_EVAL is not None:
        return _with(config, config.DATA.BATCH_SIZE_EVAL, config.TRAIN.ACCUM_ITER)
    if target is not None and target % world.size:
        raise UserError(
            f"A global batch of {target} cannot be divided evenly among {_processes(world)}; set TRAIN.GLOBAL_BATCH to "
            f"{_multiples_near(target, world.size)}."
        )
    each = target // world.size if target is not None else None
    batch, words = on_every_rank(world, lambda: _search(config, each, world, device))
    fitting = min(all_gather([batch], world))
    if fitting < batch:
        words = f"{fitting} fits on every process"
    chosen = fitting if each is None else largest_divisor(each, fitting)
    config = _with(config, chosen, config.TRAIN.ACCUM_ITER if each is None else each // chosen)
    if config.EVAL:
        log.info("DATA.BATCH_SIZE auto: %s.", words)
        return config
    total = f"{chosen} x {_processes(world)} x {config.TRAIN.ACCUM_ITER} accumulated = {global_batch(config, world)}"
    log.info("DATA.BATCH_SIZE auto: %s; %s images per update.", words, total)
    if each is not None and chosen < each and 2 * chosen <= fitting:
        near = _multiples_near(each, fitting // STEP * STEP or fitting, world.size)
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


def _processes(world: World) -> str:
    return counted(world.size, "process")


def _multiples_near(number: int, unit: int, times: int = 1) -> str:
    below = number // unit * unit
    return f"{below * times} or {(below + unit) * times}" if below else str(unit * times)
