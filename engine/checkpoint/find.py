"""Finds the checkpoint to resume from or to evaluate, and checks that a run can be resumed from it.

A run resumes from its newest checkpoint; evaluation takes its best one. Rank 0 finds and hashes it for all ranks.
"""

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.folder import bring_back
from engine.checkpoint.state import VERSION
from utils.config import Config
from utils.config.kinds import AUTO
from utils.config.resumed import resumed_run, target_folder
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import UserError
from utils.log import log
from utils.program import start_again
from utils.record.folder_lock import LOCK, FolderLock
from utils.record.history import read_lines
from utils.record.run_folder import read_about
from vitamp.checkpoints import (
    CHECKPOINTS,
    META,
    PREFIX,
    WEIGHTS,
    Checkpoint,
    checkpoint_of,
    checkpoints_in,
    inspect,
    place_of,
    read_index,
    run_folder_of,
    verify,
)
from vitamp.tensors import read_state

PADDLE_ENDINGS = (".pdparams", ".pdopt", ".pdema", ".pdstates")
Check = Callable[[Checkpoint], Checkpoint]
"""Returns the checkpoint, or raises UserError."""


class OtherVersion(UserError):
    """The state is of another version, whose weights alone can be used. Older checkpoints are no better."""

    def __init__(self, place: Path, wrote: str) -> None:
        super().__init__(
            f"{place}: vitamp {wrote} wrote its training state, and this version resumes only runs of {VERSION}; start "
            f"a new run from its weights with -pretrained {place}."
        )


def chosen_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint that -resume names, the same on every rank; None for a new run."""
    if config.MODEL.RESUME is None:
        return None
    checkpoint = on_rank_0(world, lambda: _choose(config, world))
    name = broadcast(str(checkpoint.folder) if checkpoint else None, world)
    if config.MODEL.RESUME == AUTO:
        log.info("-resume auto: %s", _chosen_in_words(config, name))
    # A rank that cannot see the folder is reported now, not when it loads the weights.
    return on_every_rank(world, lambda: checkpoint if world.first or name is None else inspect(Path(name)))


def _chosen_in_words(config: Config, place: str | None) -> str:
    """What -resume auto has found at `place`, or None."""
    if not place:
        return "no checkpoint found, -pretrained is used" if config.EVAL else "no checkpoint yet, starting a new run"
    name = Path(place).name
    if config.EVAL:
        return f"evaluating {name}"
    what = f"resuming from {name}"
    if config.TRAIN.LAST_EPOCH:  # a new run begins after it
        what += f", the newest; -last_epoch {config.TRAIN.LAST_EPOCH} chooses a checkpoint with -resume RUN only"
    return what


def _choose(config: Config, world: World) -> Checkpoint | None:
    run = resumed_run(config)
    if run is not None:
        bring_back(run / CHECKPOINTS)
    return _to_evaluate(config, run) if config.EVAL else _to_resume(config, run, world)


def _to_evaluate(config: Config, run: Path | None) -> Checkpoint | None:
    """The best checkpoint of a run, or the one that is named. `run`: of -resume auto. None: -pretrained has weights."""
    auto = config.MODEL.RESUME == AUTO
    if auto and (run is None or not checkpoints_in(run / CHECKPOINTS)):
        if not config.MODEL.PRETRAINED:
            raise UserError(
                f"-eval -resume auto: no checkpoint in {config.OUTPUT}. Name a run's folder with -output, or weights "
                "with -pretrained."
            )
        return None
    place = run if run and auto else Path(str(config.MODEL.RESUME))
    if config.TRAIN.LAST_EPOCH:
        return find(place, config.TRAIN.LAST_EPOCH)
    try:
        folder, why = checkpoint_of(place)
        if why:  # the best one of a run
            checkpoint = verify(inspect(folder))
            log.info("Evaluating %s, %s.", folder.name, why)
            return checkpoint
    except UserError as error:
        log.warning("%s The newest undamaged checkpoint is evaluated instead, if there is one.", error)
    return _newest_of(place, verify) if auto else find(place)


def _to_resume(config: Config, run: Path | None, world: World) -> Checkpoint | None:
    """The newest checkpoint of a run, or the one that is named. `run`: of -resume auto. None: a new run."""
    if config.MODEL.RESUME == AUTO:
        return _newest_to_resume(run) if run is not None else None
    place = Path(str(config.MODEL.RESUME))
    checkpoint = find(place, config.TRAIN.LAST_EPOCH, resumable)
    is_named = config.TRAIN.LAST_EPOCH or place_of(place)[0] is not None
    run = run_folder_of(checkpoint.folder)
    target = target_folder(config)
    if is_named and run is not None and target is not None and Path(target).resolve() == run.resolve():
        _check_newest(checkpoint, run, world)
    return checkpoint


def _check_newest(checkpoint: Checkpoint, run: Path, world: World) -> None:
    """Raise UserError if training on from a checkpoint would overwrite later ones of the same run."""
    update = checkpoint.meta["update"]
    later = [folder.name for number, folder in checkpoints_in(run / CHECKPOINTS).items() if number > update]
    if later:
        named = shlex.quote(str(checkpoint.folder))
        new = shlex.quote(f"{run}-from-{update}")
        raise UserError(
            f"{checkpoint.folder}: the run has later checkpoints, up to {later[-1]}, which are not overwritten. "
            f"Resume in a folder of its own: `{start_again(world, f'-resume {named} -output {new}')}`"
        )


def _newest_to_resume(run: Path) -> Checkpoint | None:
    root = run / CHECKPOINTS
    would = ", and a new run would overwrite them. Name another -output, or move them"
    checkpoint = _newest_of(run, resumable, would)
    # A run is paused or ends only once it is saved, and resumes from what was saved, if in another folder.
    saved = (line.get("what") in ("resume", "paused", "end") and line.get("update") for line in read_lines(run))
    if checkpoint is None and (read_index(root)["last"] or any(saved)):
        raise UserError(
            f"-resume auto: the checkpoints of this run are not in {root}, and a new run would overwrite its "
            "metrics. Bring them back, or repeat the command that started the run with another -output."
        )
    return checkpoint


def _newest_of(run: Path, check: Check, advice: str = "") -> Checkpoint | None:
    """The newest checkpoint of a run that passes `check`; None of a run that has none at all."""
    root = run / CHECKPOINTS
    checkpoint = newest_good(root, check=check)
    if checkpoint is None and checkpoints_in(root):
        raise UserError(f"-resume auto: none of the checkpoints in {root} is usable (see the warnings above){advice}.")
    return checkpoint


def resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Check that the files are undamaged, and that this version resumes from the state."""
    version = read_state(verify(checkpoint), mapped=True).get("version")
    if version != VERSION:
        raise OtherVersion(checkpoint.folder, version or "of before 0.3")
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
        raise UserError(f"-resume {path}: no usable checkpoint{which} found (looked for {root}/{PREFIX}*).{saved}")
    return found


def check_resumable(config: Config) -> None:
    """Raise UserError for a wrong -resume path, or a run of another version. One process checks the rest for all."""
    run = resumed_run(config)
    path = Path(str(config.MODEL.RESUME))
    if (path / LOCK).exists() and not (path / CHECKPOINTS).exists():  # perhaps it is training and has not saved yet
        with FolderLock() as lock:
            lock.take(path)
    if config.MODEL.RESUME != AUTO:
        folder, root = _places(path)
        if folder is not None:
            _of_epoch(inspect(folder), config.TRAIN.LAST_EPOCH)
        elif not checkpoints_in(root):
            raise UserError(f"-resume {path}: no usable checkpoint found (looked for {root}/{PREFIX}*).")
    if run is None or config.EVAL or not checkpoints_in(run / CHECKPOINTS):
        return
    wrote = VERSION
    with contextlib.suppress(UserError, LookupError):  # resuming does without run.json
        wrote = read_about(run)["versions"]["vitamp"]
    if not f"{wrote}.".startswith(f"{VERSION}."):
        raise OtherVersion(run if config.MODEL.RESUME == AUTO else path, wrote)


def _places(path: Path) -> tuple[Path | None, Path]:
    """The checkpoint's folder, if `path` names a single one; and the folder of a run's checkpoints."""
    of_paddle = None
    prefix = path.with_name(f"{path.name}.pdparams")  # PaddleViT names two files by their common prefix
    if path.suffix in PADDLE_ENDINGS:
        of_paddle = path.with_suffix(".pdparams")
    elif not path.exists() and prefix.exists():
        of_paddle = prefix
    if of_paddle is not None:
        raise UserError(
            f"-resume {path}: this is a PaddleViT checkpoint; -resume takes only runs of vitamp. Start a new run "
            f"from its weights: -pretrained {of_paddle}."
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
    saved = f"epoch {epochs[0]}"
    if len(epochs) > 1:
        saved = f"epochs {', '.join(map(str, epochs))}"
    return f"There is a checkpoint of the end of {saved}: use -last_epoch {epochs[-1]}."


def newest_good(root: Path, epoch: int = 0, check: Check = verify) -> Checkpoint | None:
    """Newest checkpoint in `root` that passes `check`. Warns about each one that does not."""
    for folder in reversed(checkpoints_in(root).values()):
        try:
            found = inspect(folder)
            if epoch and not _ends(found, epoch):
                continue
            return check(found)
        except OtherVersion:
            raise
        except (UserError, OSError) as error:
            log.warning("%s Trying the checkpoint before it.", error)
    return None
