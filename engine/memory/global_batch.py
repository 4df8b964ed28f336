"""The global batch of a run, which its accumulation gives (TRAIN.GLOBAL_BATCH) or, in a resumed run, keeps."""

from dataclasses import replace
from typing import Any

from engine.machine.device import Run, with_batch
from engine.setup import BATCH_CHOICE, choices_of
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.text import counted, multiples_near
from vitamp.checkpoints import Checkpoint


def settle_batch(run: Run, checkpoint: Checkpoint | None) -> Run:
    """`run` with numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER.

    A collective call: all ranks get the same numbers. A resumed run keeps the batch size that it found.
    """
    config = run.config
    world = run.world
    target = run.config.TRAIN.GLOBAL_BATCH
    saved: dict[str, Any] | None = checkpoint and checkpoint.meta["batch"]
    found: Any = choices_of(checkpoint).get(BATCH_CHOICE)
    auto = config.DATA.BATCH_SIZE == AUTO
    if auto:
        if saved and found == saved["per_process"] and (target is None or target % (found * world.size) == 0):
            config = with_batch(config, found, saved["accumulated"])
            log.info("DATA.BATCH_SIZE auto: %d, which this run found when it began.", found)
        else:
            from engine.memory.batch_size import with_largest_batch

            config = with_largest_batch(config, target or (_global(saved) if saved else None), world, run.device)
    settled = config
    asked = run.asked
    if target is not None:
        config = on_every_rank(world, lambda: with_global_batch(settled, target, world))
    elif checkpoint is not None:
        config = on_every_rank(world, lambda: _with_kept_batch(settled, checkpoint, world.size))
        asked = {**asked, "TRAIN.ACCUM_ITER": settled.TRAIN.ACCUM_ITER}
    return replace(run, config=config, auto_batch_size=auto or found == config.DATA.BATCH_SIZE, asked=asked)


def _with_kept_batch(config: Config, checkpoint: Checkpoint, processes: int) -> Config:
    """Change the accumulation if the number of processes changed, so that the global batch stays the same.

    It may have changed in an earlier resume: then the settings still ask for the accumulation of the first number of
    processes. Nothing changes if the settings ask for another batch than they did before.
    """
    saved = checkpoint.meta["batch"]
    batch = config.DATA.BATCH_SIZE
    before = config.TRAIN.ACCUM_ITER
    total = _global(saved)
    at_once = batch * processes
    same = saved["per_process"] == batch and before in (saved["accumulated"], saved.get("asked"))
    if not same or total == at_once * before:
        return config
    if total % at_once:
        other = ""
        if total % processes == 0:
            other = f", or set TRAIN.GLOBAL_BATCH={total} and a -batch_size that divides {total // processes}"
        raise UserError(
            f"{checkpoint.folder}: trained with a global batch of {total} on {counted(saved['processes'], 'process')}; "
            f"on {counted(processes, 'process')} with DATA.BATCH_SIZE {batch}, no TRAIN.ACCUM_ITER gives "
            f"that global batch. Choose another number of processes{other}."
        )
    if processes != saved["processes"]:
        log.info("Number of processes: %d instead of %d.", processes, saved["processes"])
    words = "TRAIN.ACCUM_ITER is %d instead of %d, so that the global batch stays %d."
    log.info(words, total // at_once, before, total)
    return with_batch(config, batch, total // at_once)


def _global(saved: dict[str, Any]) -> int:
    return saved["per_process"] * saved["accumulated"] * saved["processes"]


def with_global_batch(config: Config, target: int, world: World) -> Config:
    """Set the TRAIN.ACCUM_ITER that gives TRAIN.GLOBAL_BATCH."""
    batch = config.DATA.BATCH_SIZE
    before = config.TRAIN.ACCUM_ITER
    at_once = batch * world.size
    processes = counted(world.size, "process")
    if target % at_once:
        raise UserError(
            f"TRAIN.GLOBAL_BATCH: {target} is not a multiple of the {at_once} images that {processes} with "
            f"DATA.BATCH_SIZE {batch} take at once. Use {multiples_near(target, at_once)}, another -batch_size, or "
            "-batch_size auto."
        )
    if before not in (1, target // at_once):
        log.info("TRAIN.ACCUM_ITER is %d instead of %d, because of TRAIN.GLOBAL_BATCH.", target // at_once, before)
    return with_batch(config, batch, target // at_once)
