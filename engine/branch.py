"""Resuming from an older checkpoint starts a branch: later checkpoints move to a folder of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from engine.checkpoint.base import link_base
from engine.measure.progress import Best
from engine.report.mlflow import STORE
from engine.report.tracking import NOTES
from utils.distributed.world import World, broadcast, on_rank_0
from utils.log import log
from utils.record.checkpoints import Checkpoint, best_of, checkpoints_in, folder_name, write_index
from utils.record.metrics_file import METRICS
from utils.record.run_folder import ABOUT, CHECKPOINTS, CONFIG, os_errors_as_user_errors

ABANDONED = "before-resume-{}"
COPIED = (CONFIG, ABOUT, METRICS, "curves.png", "broken.txt", STORE)
"""Files that make a folder a run's. The resumed run truncates its metrics and rewrites the others."""
MOVED = ("tensorboard", *NOTES.values())
"""TensorBoard's files are rewritten from the metrics; trackers get a new run."""


def move_later_checkpoints(folder: Path, checkpoint: Checkpoint, best: Best) -> Path | None:
    """Move the checkpoints after `checkpoint` to a run's folder inside this one. None if there are none.

    Other files are copied first, so that after an interruption everything is in one of the two folders.
    """
    root, update = folder / CHECKPOINTS, int(checkpoint.meta["update"])
    later = [found for number, found in reversed(checkpoints_in(root).items()) if number > update]
    if not later:
        return None
    with os_errors_as_user_errors(folder):
        place = _new_folder(folder, ABANDONED.format(update))
        (place / CHECKPOINTS).mkdir()
        for name in filter(lambda name: (folder / name).exists(), COPIED):
            shutil.copy2(folder / name, place / name)
        for name in filter(lambda name: (folder / name).exists(), MOVED):
            os.rename(folder / name, place / name)
        link_base(root, place / CHECKPOINTS)
        before = best_of(root, None)
        for found in later:
            os.rename(found, place / CHECKPOINTS / found.name)
        moved = {found.name for found in later}
        write_index(place / CHECKPOINTS, later[0].name, before if before in moved else None)
        write_index(root, folder_name(update), best_of(root, best.update))
    log.warning(
        "Resuming from an older checkpoint. The later checkpoints (%d, up to %s), their metrics and TensorBoard files "
        "are moved to the folder %s, which can be resumed, evaluated and reported like any run.",
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


def best_to_beat(best: Best, folder: Path, checkpoint: Checkpoint, world: World) -> Best:
    """Best metric so far, or none if the checkpoint that reached it is not in this run's folder."""
    if best.figure is None:
        return best
    name = folder_name(best.update)
    exists = world.first and (folder / CHECKPOINTS / name).is_dir()
    if broadcast(exists, world):
        return best
    elsewhere = checkpoint.folder.parent / name
    where = f"its checkpoint is in another folder ({elsewhere})" if elsewhere.is_dir() else "its checkpoint is gone"
    log.warning("Best so far: %s, but %s. The search for the best starts anew in this run.", best.words(), where)
    return Best(kind=best.kind, stale=best.stale)


def start_branch(folder: Path, checkpoint: Checkpoint, best: Best, world: World) -> Best:
    """Move later checkpoints away before a run is resumed in `folder`. Returns the best metric that it has to beat."""
    on_rank_0(world, lambda: move_later_checkpoints(folder, checkpoint, best))
    return best_to_beat(best, folder, checkpoint, world)
