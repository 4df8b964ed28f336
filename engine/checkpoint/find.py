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
from vitamp.files import suggested_path
from vitamp.tensors import read_state

PADDLE_ENDINGS = (".pdparams", ".pdopt", ".pdema", ".pdstates")
Check = Callable[[Checkpoint], Checkpoint]
"""Returns the checkpoint, or raises UserError."""


class OtherVersion(UserError):
    """Another version wrote the training state, so only its weights can be used.

    Older checkpoints of the same run are of that version too, so nobody needs to try them.
    """

    def __init__(self, place: Path, wrote: str) -> None:
        super().__init__(
            f"{place}: vitamp {wrote} wrote its training state, and this version resumes only runs of {VERSION}; start "
            f"a new run from its weights with -pretrained {place}."
        )


def chosen_checkpoint(config: Config, world: World) -> Checkpoint | None:
    """Choose the checkpoint that -resume names, the same one on every rank; None for a new run."""
    if config.MODEL.RESUME is None:
        return None
    checkpoint = on_rank_0(world, lambda: _choose(config, world))  # None on other ranks
    folder = broadcast(str(checkpoint.folder) if checkpoint else None, world)
    if config.MODEL.RESUME == AUTO:
        log.info("-resume auto: %s", _describe_choice(config, folder))

    def inspected() -> Checkpoint | None:
        if world.first or folder is None:
            return checkpoint
        return inspect(Path(folder))

    # A rank that cannot see the folder is reported now, not when it loads the weights.
    return on_every_rank(world, inspected)


def _describe_choice(config: Config, folder: str | None) -> str:
    """Describe for the log which checkpoint -resume auto has chosen. `folder`: the checkpoint's; None without one."""
    if not folder:
        return "no checkpoint found, -pretrained is used" if config.EVAL else "no checkpoint yet, starting a new run"
    name = Path(folder).name
    if config.EVAL:
        return f"evaluating {name}"
    message = f"resuming from {name}"
    if config.TRAIN.LAST_EPOCH:  # the user may expect the run to begin after that epoch
        message += f", the newest; -last_epoch {config.TRAIN.LAST_EPOCH} chooses a checkpoint with -resume RUN only"
    return message


def _choose(config: Config, world: World) -> Checkpoint | None:
    """Find the checkpoint to evaluate (-eval) or to resume from; None if there is none yet. Rank 0 does so for all."""
    run = resumed_run(config)
    if run is not None:
        bring_back(run / CHECKPOINTS)  # checkpoints that were hidden when their run was killed
    if config.EVAL:
        return _checkpoint_to_evaluate(config, run)
    return _checkpoint_to_resume(config, run, world)


def _checkpoint_to_evaluate(config: Config, run: Path | None) -> Checkpoint | None:
    """Find the best checkpoint of a run, or the checkpoint that -resume names.

    `run` is the folder that -resume auto means; None if it is no run yet. Returns None if -resume auto finds no
    checkpoint, and the weights of -pretrained are evaluated instead.
    """
    auto = config.MODEL.RESUME == AUTO
    if auto and (run is None or not checkpoints_in(run / CHECKPOINTS)):
        if not config.MODEL.PRETRAINED:
            raise UserError(
                f"-eval -resume auto: no checkpoint in {config.OUTPUT}. Name a run's folder with -output, or weights "
                "with -pretrained."
            )
        return None
    path = run if auto and run is not None else Path(str(config.MODEL.RESUME))
    if config.TRAIN.LAST_EPOCH:
        return find(path, config.TRAIN.LAST_EPOCH)
    named_checkpoint, _ = place_of(path)
    if named_checkpoint is None:  # of a run, the best checkpoint is evaluated, or else the last one
        try:
            folder, reason = checkpoint_of(path)
            checkpoint = verify(inspect(folder))
        except UserError as error:
            log.warning("%s The newest undamaged checkpoint is evaluated instead, if there is one.", error)
        else:
            log.info("Evaluating %s, %s.", folder.name, reason)
            return checkpoint
    # `path` is a checkpoint, or a run whose best checkpoint is damaged.
    if auto:
        return _newest_of(path, verify)
    return find(path)


def _checkpoint_to_resume(config: Config, auto_run: Path | None, world: World) -> Checkpoint | None:
    """Find the newest checkpoint of a run, or the checkpoint that -resume names.

    `auto_run` is the folder that -resume auto means; None if it is no run yet. Returns None to start a new run.
    """
    if config.MODEL.RESUME == AUTO:
        return _newest_to_resume(auto_run) if auto_run is not None else None
    path = Path(str(config.MODEL.RESUME))
    checkpoint = find(path, config.TRAIN.LAST_EPOCH, check=resumable)
    run = run_folder_of(checkpoint.folder)
    target = target_folder(config)
    # Only a checkpoint that the user chose, by its name or its epoch, may have later ones in its run.
    named_checkpoint, _ = place_of(path)
    may_be_older = config.TRAIN.LAST_EPOCH or named_checkpoint is not None
    if may_be_older and run is not None and target is not None and Path(target).resolve() == run.resolve():
        _check_newest(checkpoint, run, world)
    return checkpoint


def _check_newest(checkpoint: Checkpoint, run: Path, world: World) -> None:
    """Raise UserError if resuming from a checkpoint would overwrite later checkpoints of the same run."""
    update = checkpoint.meta["update"]
    later = [folder.name for number, folder in checkpoints_in(run / CHECKPOINTS).items() if number > update]
    if later:
        checkpoint_folder = shlex.quote(str(checkpoint.folder))
        new_run = shlex.quote(f"{run}-from-{update}")
        raise UserError(
            f"{checkpoint.folder}: the run has later checkpoints, up to {later[-1]}, which are not overwritten. "
            f"Resume in a folder of its own: `{start_again(world, f'-resume {checkpoint_folder} -output {new_run}')}`"
        )


def _newest_to_resume(run: Path) -> Checkpoint | None:
    """Find the newest checkpoint of a run that can be resumed; None if the run has never saved one.

    Raises UserError if the run's checkpoints are unusable, or are no longer there: a new run in this folder would
    overwrite what is left of it.
    """
    root = run / CHECKPOINTS
    checkpoint = _newest_of(
        run, check=resumable, advice=", and a new run would overwrite them. Name another -output, or move them"
    )
    # A run saves a checkpoint before it pauses or ends, and needs one to resume. So if its history has such an event,
    # after at least one update, there was a checkpoint.
    had_checkpoint = any(
        line.get("what") in ("resume", "paused", "end") and line.get("update") for line in read_lines(run)
    )
    if checkpoint is None and (read_index(root)["last"] or had_checkpoint):
        raise UserError(
            f"-resume auto: the checkpoints of this run are not in {root}, and a new run would overwrite its "
            "metrics. Bring them back, or repeat the command that started the run with another -output."
        )
    return checkpoint


def _newest_of(run: Path, check: Check, advice: str = "") -> Checkpoint | None:
    """Find the newest checkpoint of a run that passes `check`; None if the run has no checkpoints at all.

    Raises UserError if it has some, but none passes. `advice` continues the sentence of that error; '' for none.
    """
    root = run / CHECKPOINTS
    checkpoint = newest_good(root, check=check)
    if checkpoint is None and checkpoints_in(root):
        raise UserError(f"-resume auto: none of the checkpoints in {root} is usable (see the warnings above){advice}.")
    return checkpoint


def resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint if its files are undamaged and this version can resume from it; else raise UserError."""
    version = read_state(verify(checkpoint), mapped=True).get("version")
    if version != VERSION:
        raise OtherVersion(checkpoint.folder, version or "of before 0.3")
    return checkpoint


def find(path: Path, epoch: int = 0, check: Check = verify) -> Checkpoint:
    """Find the checkpoint at `path`, or raise UserError.

    `path` is a checkpoint's folder, a file in it, or the folder of a run, whose newest checkpoint that passes `check`
    is taken. With `epoch` above 0, only a checkpoint saved at the end of that epoch will do.
    """
    named_checkpoint, root = _named_checkpoint_and_root(path)
    if named_checkpoint is not None:
        checkpoint = inspect(named_checkpoint)
        _require_end_of_epoch(checkpoint, epoch)
        return check(checkpoint)
    checkpoint = newest_good(root, epoch, check)
    if checkpoint is None:
        which = f" of epoch {epoch}" if epoch else ""
        saved = f" {_describe_ended_epochs(root)}" if epoch else ""
        raise UserError(f"-resume {path}: no usable checkpoint{which} found (looked for {root}/{PREFIX}*).{saved}")
    return checkpoint


def check_resumable(config: Config) -> None:
    """Raise UserError if the path of -resume is wrong, or another version wrote the run.

    Every process checks this at its start. Rank 0 alone checks the checkpoint's files later (`chosen_checkpoint`).
    """
    run = resumed_run(config)
    is_auto = config.MODEL.RESUME == AUTO
    path = Path(str(config.MODEL.RESUME))

    # A run that is still training may not have saved yet: then taking its lock raises a UserError that names the run,
    # which helps more than "no checkpoint".
    if not is_auto and (path / LOCK).exists() and not (path / CHECKPOINTS).exists():
        with FolderLock() as lock:
            lock.take(path)

    if not is_auto:
        named_checkpoint, root = _named_checkpoint_and_root(path)
        if named_checkpoint is not None:
            _require_end_of_epoch(inspect(named_checkpoint), config.TRAIN.LAST_EPOCH)
        elif not checkpoints_in(root):
            raise UserError(f"-resume {path}: no usable checkpoint found (looked for {root}/{PREFIX}*).")

    # Only training needs the version of the run. Weights of any version can be evaluated.
    if run is None or config.EVAL or not checkpoints_in(run / CHECKPOINTS):
        return
    run_version = VERSION
    with contextlib.suppress(UserError, LookupError):  # a run can be resumed without its run.json
        run_version = read_about(run)["versions"]["vitamp"]
    is_same_minor_version = f"{run_version}.".startswith(f"{VERSION}.")  # such as 0.3.1 for 0.3
    if not is_same_minor_version:
        raise OtherVersion(run if is_auto else path, run_version)


def _named_checkpoint_and_root(path: Path) -> tuple[Path | None, Path]:
    """Find the checkpoint's folder, and the folder that holds all checkpoints of its run, for a path of -resume.

    The checkpoint's folder is None if `path` names a whole run. Raises UserError if `path` is neither.
    """
    paddle_weights = None
    with_ending = path.with_name(f"{path.name}.pdparams")
    if path.suffix in PADDLE_ENDINGS:
        paddle_weights = path.with_suffix(".pdparams")
    elif not path.exists() and with_ending.exists():
        # PaddleViT takes the common prefix of X.pdparams and X.pdopt.
        paddle_weights = with_ending
    if paddle_weights is not None:
        raise UserError(
            f"-resume {path}: this is a PaddleViT checkpoint; -resume takes only runs of vitamp. Start a new run "
            f"from its weights: -pretrained {paddle_weights}."
        )
    if not path.exists():
        raise UserError(f"-resume {path}: no such file or folder{suggested_path(path)}.")
    folder, root = place_of(path)
    if folder is None and path.is_file() and path.name.endswith(WEIGHTS):
        raise UserError(
            f"-resume {path}: this is a file of weights alone, without {META} beside it, so there is no run to resume. "
            f"Start a new run from these weights: -pretrained {path}."
        )
    return folder, root


def _require_end_of_epoch(checkpoint: Checkpoint, epoch: int) -> None:
    """Raise UserError if the checkpoint was not saved at the end of `epoch`. Any checkpoint will do for epoch 0."""
    if epoch and not _is_end_of_epoch(checkpoint, epoch):
        raise UserError(
            f"{checkpoint.folder}: saved in epoch {checkpoint.meta['epoch']}, not at the end of epoch {epoch} "
            f"(TRAIN.LAST_EPOCH). {_describe_ended_epochs(checkpoint.folder.parent)}"
        )


def _is_end_of_epoch(checkpoint: Checkpoint, epoch: int) -> bool:
    """Whether the checkpoint was saved at the end of that epoch, not within it."""
    return checkpoint.meta["epoch"] == epoch and checkpoint.meta["epoch_finished"]


def ended_epochs(root: Path) -> dict[int, int]:
    """Map each epoch at whose end a checkpoint was saved to the update of that checkpoint."""
    update_of_epoch = {}
    for update, folder in checkpoints_in(root).items():
        with contextlib.suppress(UserError):
            checkpoint = inspect(folder)
            if _is_end_of_epoch(checkpoint, checkpoint.meta["epoch"]):
                update_of_epoch[checkpoint.meta["epoch"]] = update
    return update_of_epoch


def _describe_ended_epochs(root: Path) -> str:
    """Name the epochs that -last_epoch could choose, as advice at the end of an error."""
    epochs = sorted(ended_epochs(root))
    if not epochs:
        return "No checkpoint was saved at the end of an epoch."
    saved = f"epoch {epochs[0]}"
    if len(epochs) > 1:
        saved = f"epochs {', '.join(map(str, epochs))}"
    return f"There is a checkpoint of the end of {saved}: use -last_epoch {epochs[-1]}."


def newest_good(root: Path, epoch: int = 0, check: Check = verify) -> Checkpoint | None:
    """Find the newest checkpoint in `root` that passes `check`; None if none does. Warns about each that does not.

    With `epoch` above 0, only checkpoints saved at the end of that epoch are considered.
    """
    for folder in reversed(checkpoints_in(root).values()):
        try:
            checkpoint = inspect(folder)
            if epoch and not _is_end_of_epoch(checkpoint, epoch):
                continue
            return check(checkpoint)
        except OtherVersion:  # a UserError, too, but the earlier checkpoints are of that version as well
            raise
        except (UserError, OSError) as error:
            log.warning("%s Trying the checkpoint before it.", error)
    return None
