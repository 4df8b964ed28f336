"""Choice of the checkpoint to resume from, or to evaluate, predict with, or export.

A run resumes from its newest checkpoint; evaluation takes its best one. Rank 0 finds and hashes it for all ranks.
"""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.find import find, newest_good, resumable
from engine.checkpoint.folder import bring_back
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log
from utils.record.checkpoints import Checkpoint, checkpoint_of, checkpoints_in, inspect, verify
from utils.record.resumed_run import resumed_run
from utils.record.run_folder import CHECKPOINTS


def chosen_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint that -resume names, the same on every rank; None for a new run."""
    if config.MODEL.RESUME is None:
        return None
    checkpoint = on_rank_0(world, lambda: _choose(config))
    name = broadcast(str(checkpoint.folder) if checkpoint else None, world)
    if config.MODEL.RESUME == AUTO:
        what = f"{'evaluating' if config.EVAL else 'resuming from'} {Path(name).name}" if name else ""
        nothing = "no checkpoint found, -pretrained is used" if config.EVAL else "no checkpoint yet, starting a new run"
        log.info("-resume auto: %s", what or nothing)
    # A rank that cannot see the folder is reported now, not when it loads the weights.
    return on_every_rank(world, lambda: checkpoint if world.first or name is None else inspect(Path(name)))


def _best_good(run: Path | None) -> Checkpoint | None:
    """Best checkpoint of a run. None if `run` is not a run's folder, or its best checkpoint is damaged."""
    try:
        folder, why = checkpoint_of(run) if run is not None else (Path(), "")
        if not why:
            return None
        checkpoint = verify(inspect(folder))
        log.info("Evaluating %s, %s.", folder.name, why)
        return checkpoint
    except UserError as error:
        log.warning("%s The newest undamaged checkpoint is evaluated instead, if there is one.", error)
        return None


def _choose(config: Config) -> Checkpoint | None:
    wanted, run = str(config.MODEL.RESUME), resumed_run(config)
    if run is not None:
        bring_back(run / CHECKPOINTS)
    if config.EVAL and not config.TRAIN.LAST_EPOCH and (best := _best_good(run if wanted == AUTO else Path(wanted))):
        return best
    if wanted != AUTO:
        return find(Path(wanted), config.TRAIN.LAST_EPOCH, resumable)
    if run is not None and (checkpoint := _newest_usable(run / CHECKPOINTS, config.EVAL)):
        return checkpoint
    if config.EVAL and not config.MODEL.PRETRAINED:
        raise UserError(
            f"-eval -resume auto: no checkpoint in {config.OUTPUT}. Name a run's folder with -output, or weights with "
            "-pretrained."
        )
    return None


def _newest_usable(root: Path, evaluated: bool) -> Checkpoint | None:
    """Newest undamaged checkpoint of a run; None before its first one."""
    checkpoint = newest_good(root, check=resumable)
    if checkpoint is None and checkpoints_in(root):
        raise UserError(
            f"-resume auto: none of the checkpoints in {root} is usable (see the warnings above)"
            + ("." if evaluated else ", and a new run would overwrite them. Name another -output, or move them away.")
        )
    return checkpoint
