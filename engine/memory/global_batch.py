"""Sets the accumulation that gives a run its global batch: TRAIN.GLOBAL_BATCH, or that of the run it resumes."""

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
    """Return `run` with numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER.

    A collective call: all ranks get the same numbers. A resumed run keeps the batch size that `auto` found when it
    began. `checkpoint`: the one that the run resumes from; None for a new run.
    """
    config = run.config
    world = run.world
    target = run.config.TRAIN.GLOBAL_BATCH
    saved: dict[str, Any] | None = checkpoint.meta["batch"] if checkpoint else None
    size_when_begun: Any = choices_of(checkpoint).get(BATCH_CHOICE)  # what auto chose then

    # DATA.BATCH_SIZE auto.
    is_auto = config.DATA.BATCH_SIZE == AUTO
    if is_auto:
        was_used = saved and size_when_begun == saved["per_process"]
        if saved and was_used and (target is None or target % (size_when_begun * world.size) == 0):
            config = with_batch(config, size_when_begun, saved["accumulated"])
            log.info("DATA.BATCH_SIZE auto: %d, which this run found when it began.", size_when_begun)
        else:
            from engine.memory.batch_size import with_largest_batch

            saved_total = _global_batch_of(saved) if saved else None
            config = with_largest_batch(config, target or saved_total, world, run.device)

    # TRAIN.ACCUM_ITER.
    with_size = config
    asked = run.asked
    if target is not None:
        config = on_every_rank(world, lambda: with_global_batch(with_size, target, world))
    elif checkpoint is not None:
        config = on_every_rank(world, lambda: _with_saved_global_batch(with_size, checkpoint, world.size))
        # The next checkpoint records the accumulation that the settings ask for, too: by it, a later resume sees
        # whether the user has changed it.
        asked = {**asked, "TRAIN.ACCUM_ITER": with_size.TRAIN.ACCUM_ITER}
    # A size that auto found when the run began counts as found by auto, though the settings of the run give it now.
    size_is_autos = is_auto or size_when_begun == config.DATA.BATCH_SIZE
    return replace(run, config=config, auto_batch_size=size_is_autos, asked=asked)


def _with_saved_global_batch(config: Config, checkpoint: Checkpoint, processes: int) -> Config:
    """Change the accumulation if the number of processes changed, so that the global batch stays the same.

    Nothing changes if the user has set another batch size or accumulation than before. UserError if no accumulation
    gives the global batch of the checkpoint. `processes`: their number now.
    """
    saved = checkpoint.meta["batch"]
    batch = config.DATA.BATCH_SIZE
    accumulation = config.TRAIN.ACCUM_ITER
    total = _global_batch_of(saved)
    images_at_once = batch * processes
    # If an earlier resume has changed the accumulation, the settings still ask for the one before that ("asked").
    same_accumulation = accumulation in (saved["accumulated"], saved.get("asked"))
    same_settings = saved["per_process"] == batch and same_accumulation
    if not same_settings or total == images_at_once * accumulation:
        return config
    if total % images_at_once:
        alternative = ""
        if total % processes == 0:
            alternative = f", or set TRAIN.GLOBAL_BATCH={total} and a -batch_size that divides {total // processes}"
        raise UserError(
            f"{checkpoint.folder}: trained with a global batch of {total} on {counted(saved['processes'], 'process')}; "
            f"on {counted(processes, 'process')} with DATA.BATCH_SIZE {batch}, no TRAIN.ACCUM_ITER gives "
            f"that global batch. Choose another number of processes{alternative}."
        )
    if processes != saved["processes"]:
        log.info("Number of processes: %d instead of %d.", processes, saved["processes"])
    message = "TRAIN.ACCUM_ITER is %d instead of %d, so that the global batch stays %d."
    log.info(message, total // images_at_once, accumulation, total)
    return with_batch(config, batch, total // images_at_once)


def _global_batch_of(saved: dict[str, Any]) -> int:
    """Return the images per update of the run that saved this checkpoint."""
    return saved["per_process"] * saved["accumulated"] * saved["processes"]


def with_global_batch(config: Config, target: int, world: World) -> Config:
    """Set the TRAIN.ACCUM_ITER that gives TRAIN.GLOBAL_BATCH (`target`). UserError if none does."""
    batch = config.DATA.BATCH_SIZE
    accumulation = config.TRAIN.ACCUM_ITER
    at_once = batch * world.size
    processes = counted(world.size, "process")
    if target % at_once:
        raise UserError(
            f"TRAIN.GLOBAL_BATCH: {target} is not a multiple of the {at_once} images that {processes} with "
            f"DATA.BATCH_SIZE {batch} take at once. Use {multiples_near(target, at_once)}, another -batch_size, or "
            "-batch_size auto."
        )
    needed = target // at_once
    if accumulation not in (1, needed):
        log.info("TRAIN.ACCUM_ITER is %d instead of %d, because of TRAIN.GLOBAL_BATCH.", needed, accumulation)
    return with_batch(config, batch, needed)
