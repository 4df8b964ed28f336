"""The batch of a run: its accumulation gives or keeps the global batch. `largest_batch` serves DATA.BATCH_SIZE auto."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.machine.device import Run, multiples_near, with_batch
from engine.setup import BATCH_CHOICE
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.text import counted
from vitamp.checkpoints import Checkpoint


def settle_batch(run: Run, checkpoint: Checkpoint | None) -> Run:
    """`run` with numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER.

    A collective call: all ranks get the same numbers. A resumed run keeps the batch size that it found.
    """
    config, world = run.config, run.world
    saved = checkpoint.meta["batch"] if checkpoint is not None and not config.EVAL else None
    before = checkpoint.meta.get("choices", {}).get(BATCH_CHOICE) if checkpoint is not None and saved else None
    auto = config.DATA.BATCH_SIZE == AUTO
    if saved is not None and auto and before == saved["per_process"]:
        config = with_batch(config, saved["per_process"], saved["accumulated"])
        log.info("DATA.BATCH_SIZE auto: %d, which this run found when it began.", before)
    elif auto:
        target = None if config.EVAL else config.TRAIN.GLOBAL_BATCH or (_global(saved) if saved else None)
        from engine.memory.largest_batch import with_largest_batch

        config = with_largest_batch(config, target, world, run.device)
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
    return with_batch(config, data.BATCH_SIZE, total // at_once)


def _global(saved: dict[str, Any]) -> int:
    return saved["per_process"] * saved["accumulated"] * saved["processes"]


def _with_global_batch(config: Config, target: int, world: World) -> Config:
    """Set the TRAIN.ACCUM_ITER that gives TRAIN.GLOBAL_BATCH."""
    batch, before = config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER
    at_once, processes = batch * world.size, counted(world.size, "process")
    if target % at_once:
        raise UserError(
            f"TRAIN.GLOBAL_BATCH: {target} is not a multiple of the {at_once} images that {processes} with "
            f"DATA.BATCH_SIZE {batch} take at once. Use {multiples_near(target, at_once)}, another -batch_size, or "
            "-batch_size auto."
        )
    if before not in (1, target // at_once):
        log.info("TRAIN.ACCUM_ITER is %d instead of %d, because of TRAIN.GLOBAL_BATCH.", target // at_once, before)
    return with_batch(config, batch, target // at_once)
