"""Which checkpoint is meant: the one a run goes on from, or the one to evaluate, predict with, or export.

A run resumes from its newest checkpoint, and is judged by its best one. Rank 0 looks and hashes, for all ranks.
"""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.find import find, newest_good, resumable
from engine.checkpoint.folder import META, Checkpoint, bring_back, inspect, read_index, verify
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log
from utils.resumed_run import resumed_run


def chosen_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint that -resume means, the same on every rank; None where the run starts afresh."""
    if config.MODEL.RESUME is None:
        return None
    found = on_rank_0(world, lambda: _look(config))
    name = broadcast(str(found.folder) if found else None, world)
    if config.MODEL.RESUME == AUTO:
        goes_on = f"{'evaluating' if config.EVAL else 'going on from'} {Path(name).name}" if name else ""
        log.info("-resume auto: %s", goes_on or "nothing to go on from, starting")
    # A rank that cannot see the folder is told of before training, not when it misses the weights.
    return on_every_rank(world, lambda: found if world.first or name is None else inspect(Path(name)))


def checkpoint_of(path: Path) -> tuple[Path, str]:
    """The checkpoint that a path means, and why it is that one: itself; of a run the best one, else the last."""
    folder = path.parent if path.is_file() else path
    if (folder / META).exists() or folder.name.startswith("step-"):
        return folder, ""
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    there = {found.name: found for found in sorted(root.glob("step-*"))}
    if not there:
        raise UserError(f"{folder}: no checkpoint is there (looked for {root}/step-*).")
    index = read_index(root)
    if best := there.get(index["best"] or ""):
        return best, "the run's best"
    return there.get(index["last"] or "") or there[max(there)], "the run's last; no best one is recorded"


def _best_good(run: Path | None) -> Checkpoint | None:
    """The best checkpoint of a run; None where `run` is no run or has none, and where its best one is damaged."""
    try:
        folder, why = checkpoint_of(run) if run is not None else (Path(), "")
        if not why:
            return None
        found = verify(inspect(folder))
        log.info("Evaluating %s, %s.", folder.name, why)
        return found
    except UserError as error:
        log.warning("%s The newest good checkpoint is evaluated instead.", error)
        return None


def _look(config: Config) -> Checkpoint | None:
    wanted, run = str(config.MODEL.RESUME), resumed_run(config)
    if run is not None:
        bring_back(run / "checkpoints")
    if config.EVAL and not config.TRAIN.LAST_EPOCH and (best := _best_good(run if wanted == AUTO else Path(wanted))):
        return best
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
