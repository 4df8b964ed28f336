"""Find the checkpoint that a path means, and check that a run can be resumed from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.fields import State, check_fields
from engine.checkpoint.folder import META, STATE, WEIGHTS, Checkpoint, inspect, verify
from utils.errors import UserError
from utils.log import log

PADDLES = (".pdparams", ".pdopt", ".pdema", ".pdstates")
Check = Callable[[Checkpoint], Checkpoint]
"""Gives the checkpoint back, or raises UserError."""


def resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Check that the files are undamaged and that the state has every field that a resumed run reads."""
    check_fields(State, verify(checkpoint).state(mapped=True), checkpoint.folder / STATE)
    return checkpoint


def find(path: Path, epoch: int = 0, check: Check = verify) -> Checkpoint:
    """The checkpoint that a path means: a checkpoint's folder, a file in it, or a run's folder (its newest good one).

    `epoch` above 0 asks for the one saved at the end of that epoch.
    """
    folder, root = _places(path)
    if folder is not None:
        return check(_of_epoch(inspect(folder), epoch))
    found = newest_good(root, epoch, check)
    if found is None:
        asked = f" of epoch {epoch}" if epoch else ""
        raise UserError(f"-resume {path}: no usable checkpoint{asked} is there (looked for {root}/step-*).")
    return found


def check_resumable(path: Path, epoch: int = 0) -> None:
    """Raise what can be said of -resume at once; a checkpoint's contents are read later, by one process for all."""
    folder, root = _places(path)
    if folder is not None:
        _of_epoch(inspect(folder), epoch)
    elif not any(root.glob("step-*")):
        raise UserError(f"-resume {path}: no usable checkpoint is there (looked for {root}/step-*).")


def _places(path: Path) -> tuple[Path | None, Path]:
    """The one checkpoint that `path` means, if it means one; and where a run's checkpoints would be."""
    prefix = path.with_name(f"{path.name}.pdparams")  # as PaddleViT names two files at once
    if path.suffix in PADDLES or (not path.exists() and prefix.exists()):
        raise UserError(
            f"-resume {path}: a checkpoint of PaddleViT's, and -resume continues runs of vitamp's own. Start a new "
            f"run from its weights: -pretrained {path.with_suffix('.pdparams') if path.suffix in PADDLES else prefix}."
        )
    if not path.exists():
        raise UserError(f"-resume {path}: there is no such file or folder.")
    folder = path.parent if path.is_file() else path
    if (folder / META).exists() or folder.name.startswith("step-"):
        return folder, folder.parent
    if path.is_file() and path.name.endswith(WEIGHTS):
        raise UserError(
            f"-resume {path}: this is a file of weights and not a run of vitamp's to go on with: it has no {META} "
            f"beside it. Start a new run from these weights by -pretrained {path}."
        )
    return None, folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def _of_epoch(checkpoint: Checkpoint, epoch: int) -> Checkpoint:
    if epoch and not _ends(checkpoint, epoch):
        raise UserError(
            f"{checkpoint.folder}: saved in epoch {checkpoint.meta['epoch']}, but TRAIN.LAST_EPOCH is {epoch}."
        )
    return checkpoint


def _ends(checkpoint: Checkpoint, epoch: int) -> bool:
    """Whether it was saved at the end of that epoch, and not in its middle."""
    return checkpoint.meta["epoch"] == epoch and checkpoint.meta.get("epoch_finished", False)


def newest_good(root: Path, epoch: int = 0, check: Check = verify) -> Checkpoint | None:
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            found = inspect(folder)
            if epoch and not _ends(found, epoch):
                continue
            return check(found)
        except UserError as error:
            log.warning("%s The one before it is tried.", error)
    return None
