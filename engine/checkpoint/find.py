"""Finding the checkpoint at a path, and checking that a run can be resumed from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.fields import State
from engine.checkpoint.folder import read_state
from utils.errors import UserError
from utils.log import log
from utils.record.checkpoints import META, STATE, WEIGHTS, Checkpoint, checkpoints_in, inspect, place_of, verify
from utils.record.meta import check_fields

PADDLE_ENDINGS = (".pdparams", ".pdopt", ".pdema", ".pdstates")
Check = Callable[[Checkpoint], Checkpoint]
"""Returns the checkpoint, or raises UserError."""


def resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Check that the files are undamaged and that the state has every field that a resumed run reads."""
    check_fields(State, read_state(verify(checkpoint), mapped=True), checkpoint.folder / STATE)
    return checkpoint


def find(path: Path, epoch: int = 0, check: Check = verify) -> Checkpoint:
    """The checkpoint at `path`: its folder, a file in it, or a run's folder (its newest undamaged checkpoint).

    `epoch` above 0: only a checkpoint saved at the end of that epoch.
    """
    folder, root = _places(path)
    if folder is not None:
        return check(_of_epoch(inspect(folder), epoch))
    found = newest_good(root, epoch, check)
    if found is None:
        which = f" of epoch {epoch}" if epoch else ""
        saved = f" {_ends_in_words(root)}" if epoch else ""
        raise UserError(f"-resume {path}: no usable checkpoint{which} found (looked for {root}/step-*).{saved}")
    return found


def check_resumable(path: Path, epoch: int = 0) -> None:
    """Raise UserError for a wrong -resume path. Contents are checked later, by one process for all."""
    folder, root = _places(path)
    if folder is not None:
        _of_epoch(inspect(folder), epoch)
    elif not checkpoints_in(root):
        raise UserError(f"-resume {path}: no usable checkpoint found (looked for {root}/step-*).")


def _places(path: Path) -> tuple[Path | None, Path]:
    """The checkpoint's folder, if `path` names a single one; and the folder of a run's checkpoints."""
    prefix = path.with_name(f"{path.name}.pdparams")  # PaddleViT names two files by their common prefix
    if path.suffix in PADDLE_ENDINGS or (not path.exists() and prefix.exists()):
        raise UserError(
            f"-resume {path}: this is a PaddleViT checkpoint; -resume takes only runs of vitamp. Start a new run "
            "from its weights: -pretrained "
            f"{path.with_suffix('.pdparams') if path.suffix in PADDLE_ENDINGS else prefix}."
        )
    if not path.exists():
        raise UserError(f"-resume {path}: no such file or folder.")
    folder, root = place_of(path)
    if folder is None and path.is_file() and path.name.endswith(WEIGHTS):
        raise UserError(
            f"-resume {path}: this is a file of weights alone, without {META} beside it, so there is no run to resume. "
            f"Start a new run from these weights: -pretrained {path}."
        )
    return folder, root


def _of_epoch(checkpoint: Checkpoint, epoch: int) -> Checkpoint:
    if epoch and not _ends(checkpoint, epoch):
        raise UserError(
            f"{checkpoint.folder}: saved in epoch {checkpoint.meta['epoch']}, not at the end of epoch {epoch} "
            f"(TRAIN.LAST_EPOCH). {_ends_in_words(checkpoint.folder.parent)}"
        )
    return checkpoint


def _ends(checkpoint: Checkpoint, epoch: int) -> bool:
    """Whether it was saved at the end of that epoch, not within it."""
    return checkpoint.meta["epoch"] == epoch and checkpoint.meta["epoch_finished"]


def ended_epochs(root: Path) -> dict[int, int]:
    """Epochs at whose end a checkpoint was saved -> its update."""
    found = {}
    for update, folder in checkpoints_in(root).items():
        with contextlib.suppress(UserError):
            checkpoint = inspect(folder)
            if _ends(checkpoint, checkpoint.meta["epoch"]):
                found[checkpoint.meta["epoch"]] = update
    return found


def _ends_in_words(root: Path) -> str:
    epochs = sorted(ended_epochs(root))
    if not epochs:
        return "No checkpoint was saved at the end of an epoch."
    saved = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {', '.join(map(str, epochs))}"
    return f"There is a checkpoint of the end of {saved}: use -last_epoch {epochs[-1]}."


def newest_good(root: Path, epoch: int = 0, check: Check = verify) -> Checkpoint | None:
    """Newest checkpoint in `root` that passes `check`. Warns about each one that does not."""
    for folder in reversed(checkpoints_in(root).values()):
        try:
            found = inspect(folder)
            if epoch and not _ends(found, epoch):
                continue
            return check(found)
        except UserError as error:
            log.warning("%s Trying the checkpoint before it.", error)
    return None
