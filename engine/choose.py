"""Which checkpoint a run goes on from. Rank 0 looks and hashes, for all; the others are told."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint import Checkpoint, bring_back, inspect
from engine.checkpoint_find import find, newest_good, resumable
from engine.preflight import AUTO, resumed_run
from utils.config import Config
from utils.errors import UserError
from utils.log import log
from utils.world import World, from_first, together


def chosen_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """What -resume means, on every rank the same; None where the run starts afresh."""
    if config.MODEL.RESUME is None:
        return None
    found = together(world, lambda: _look(config) if world.first else None)
    name = from_first(str(found.folder) if found else None, world)
    if config.MODEL.RESUME == AUTO:
        log.info("-resume auto: %s", f"going on from {Path(name).name}" if name else "nothing to go on from, starting")
    # A rank that cannot see the folder is told of before training, not when it misses the weights.
    return together(world, lambda: found if world.first or name is None else inspect(Path(name)))


def _look(config: Config) -> Checkpoint | None:
    wanted, run = str(config.MODEL.RESUME), resumed_run(config)
    if run is not None:
        bring_back(run / "checkpoints")
    if wanted != AUTO:
        return find(Path(wanted), config.TRAIN.LAST_EPOCH, resumable)
    if run is None:
        return None
    root = run / "checkpoints"
    found = newest_good(root, check=resumable)
    if found is None and any(root.glob("step-*")):
        raise UserError(
            f"-resume auto: none of the checkpoints in {root} is usable (each is named above), and "
            "the run is not started over in its own folder. Name another -output, or move them away."
        )
    return found
