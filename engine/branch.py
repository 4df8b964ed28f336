"""Resuming from an older checkpoint: what the run did after it is kept, in a folder of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from engine.checkpoint.folder import Checkpoint, best_of, folder_name, write_index
from engine.measure.progress import Best
from engine.report.reporter import METRICS
from engine.report.wandb import NOTE
from utils.distributed.world import World, broadcast, on_rank_0
from utils.log import log
from utils.run_folder import os_errors_as_user_errors

ABANDONED = "before-resume-{}"
COPIED = ("config.yaml", "run.json", METRICS, "curves.png", "broken.txt")
"""The files that make a folder a run's. The run that resumes cuts its metrics back and writes the others anew."""
MOVED = ("tensorboard", NOTE)
"""TensorBoard's files are drawn anew from the metrics; Weights & Biases gets a new run."""


def keep_abandoned(folder: Path, checkpoint: Checkpoint, best: Best) -> Path | None:
    """Move the checkpoints after `checkpoint` to a run's folder inside this one; None where there are none.

    Copies come first: whoever is interrupted here finds everything in one of the two folders.
    """
    root, update = folder / "checkpoints", int(checkpoint.meta["update"])
    later = [found for found in sorted(root.glob("step-*"), reverse=True) if found.name > folder_name(update)]
    if not later:
        return None
    with os_errors_as_user_errors(folder):
        place = _new_folder(folder, ABANDONED.format(update))
        (place / "checkpoints").mkdir()
        for name in filter(lambda name: (folder / name).exists(), COPIED):
            shutil.copy2(folder / name, place / name)
        for name in filter(lambda name: (folder / name).exists(), MOVED):
            os.rename(folder / name, place / name)
        before = best_of(root, None)
        for found in later:
            os.rename(found, place / "checkpoints" / found.name)
        moved = {found.name for found in later}
        write_index(place / "checkpoints", later[0].name, before if before in moved else None)
        write_index(root, folder_name(update), best_of(root, best.update))
    log.warning(
        "Resuming from an older checkpoint: the %d after it (to %s), their metrics and TensorBoard files are kept in "
        "%s, which can be resumed, evaluated and reported like any run.",
        len(later),
        later[0].name,
        place,
    )
    return place


def _new_folder(parent: Path, name: str) -> Path:
    for number in range(1, 1000):
        place = parent / (name if number == 1 else f"{name}-{number}")
        if not place.exists():
            place.mkdir()
            return place
    raise FileExistsError(17, "too many folders of that name", str(parent / name))


def best_that_is_there(best: Best, folder: Path, checkpoint: Checkpoint, world: World) -> Best:
    """What the run has to beat: its best so far, unless the weights of that are not among its checkpoints."""
    if best.figure is None:
        return best
    name = folder_name(best.update)
    there = world.first and (folder / "checkpoints" / name).is_dir()
    if broadcast(there, world):
        return best
    elsewhere = checkpoint.folder.parent / name
    where = f"its checkpoint is {elsewhere}" if elsewhere.is_dir() else "its checkpoint is no longer there"
    log.warning("Best so far: %s; %s. This run's best is the best from here on.", best.words(), where)
    return Best(kind=best.kind, stale=best.stale)


def prepare_folder(folder: Path, checkpoint: Checkpoint, best: Best, world: World) -> Best:
    """Before a run is resumed in `folder`. The best that it has to beat."""
    on_rank_0(world, lambda: keep_abandoned(folder, checkpoint, best))
    return best_that_is_there(best, folder, checkpoint, world)
