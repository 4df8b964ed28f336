"""Whether a checkpoint fits the batch and the samples of the run that resumes it; if not, commands that lead on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from engine.checkpoint.find import ended_epochs
from engine.machine.context import global_batch
from engine.measure.progress import Position
from utils.config import Config, DataConfig
from utils.config.kinds import AUTO, one_line
from utils.config.model import LoraConfig
from utils.distributed.again import start_again, tool
from utils.distributed.world import World
from utils.errors import UserError
from utils.log import log
from vitamp.checkpoints import Checkpoint, run_folder_of
from vitamp.tensors import read_state


def check_task(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError if the checkpoint is of a masked autoencoder and the settings are not, or the other way round."""
    key = "MODEL.MAE_PRETRAIN"
    masked = bool(checkpoint.meta["settings"].get(key, False))
    if masked == config.MODEL.MAE_PRETRAIN:
        return
    run = run_folder_of(checkpoint.folder) or checkpoint.folder
    place = shlex.quote(str(run))
    own = start_again(world, f"-resume {place}{' -eval' if config.EVAL else ''}")
    if not masked:
        raise UserError(
            f"{checkpoint.folder}: trained with labels, but the settings are for training without ({key}: true). With "
            f"its own settings: `{own}`."
        )
    features = f"{tool('evaluate')} {place} -knn"
    tune = start_again(world, f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {place}")
    what = "which has no classifier to evaluate" if config.EVAL else "which trains without labels"
    raise UserError(
        f"{checkpoint.folder}: a masked autoencoder ({key}), {what}. With its own settings: `{own}`; how well its "
        f"features tell classes apart: `{features}`; to train a classifier: `{tune}`."
    )


def check_batch(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError for another global batch within an epoch: the rest of the epoch would have other samples."""
    state = read_state(checkpoint, mapped=True)
    saved, done = state["global_batch"], state["position"]
    position = Position(done["epoch"], done["step"], done["update"])
    now = global_batch(config, world)
    if not position.step or saved == now:
        return
    each = checkpoint.meta["batch"]["per_process"]
    each = each if saved % (each * world.size) == 0 else saved // world.size
    kept = (
        f"  {_resume(config, world, str(config.MODEL.RESUME), _batch_flags(checkpoint, config, each, saved))}"
        if saved % world.size == 0
        else f"  impossible with {world.size} processes, which do not divide it"
    )
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch} with a global batch of {saved}, but this run's is "
        f"{now} (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER). It can only change between epochs. Keep the batch:\n"
        f"{kept}\nor go back, with the new batch:\n{_go_back(checkpoint, position, config, world)}"
    )


def check_adapters(checkpoint: Checkpoint, lora: LoraConfig) -> None:
    """Raise UserError unless the adapters are those of the checkpoint. Without MODEL.LORA, they are merged."""
    if lora.RANK is None:
        return
    settings = checkpoint.meta["settings"]
    rank, alpha = settings.get("MODEL.LORA.RANK"), settings.get("MODEL.LORA.ALPHA")
    saved = None if rank is None else LoraConfig(RANK=rank, ALPHA=alpha, TARGETS=settings["MODEL.LORA.TARGETS"])
    if saved is not None and (saved.RANK, saved.factor, {*saved.TARGETS}) == (lora.RANK, lora.factor, {*lora.TARGETS}):
        return
    then = "no adapters" if saved is None else f"MODEL.LORA {one_line(saved.model_dump())}"
    raise UserError(
        f"{checkpoint.folder}: the run has {then}, but MODEL.LORA is {one_line(lora.model_dump())} now. Set it back; "
        f"or start a new run from its merged weights, with -pretrained {checkpoint.folder} in place of -resume."
    )


def check_samples(
    checkpoint: Checkpoint, position: Position, now: dict[str, Any], config: Config, world: World
) -> None:
    """Raise UserError for another fold, or if the rest of an epoch would have other samples or another order.

    `now`: the `identity_of` them.
    """
    _check_fold(checkpoint, config.DATA)
    saved = checkpoint.meta["samples"]
    change = _change_of_samples(saved, now)
    if change is None:
        return
    if not 0 < position.step < saved["updates"]:
        log.warning("The training samples have changed since the checkpoint: %s.", change)
        return
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch}, but the training samples have changed since: "
        f"{change}. They depend on SEED, DATA.SAMPLER, DATA.EXCLUDE, DATA.VAL_FRACTION, DATA.GROUP and the files. "
        f"Restore the former samples and order, or go back:\n{_go_back(checkpoint, position, config, world)}"
    )


def _change_of_samples(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    if saved["number"] != now["number"]:
        return f"{saved['number']} then, {now['number']} now"
    if saved.get("data", now["data"]) != now["data"]:  # checkpoints of 0.1.0 may have only the order and the labels
        return f"{now['number']} as before, but with other names or labels, or named in another order"
    return None if saved["order"] == now["order"] else f"{now['number']} as before, in another order"


def _check_fold(checkpoint: Checkpoint, data: DataConfig) -> None:
    """Raise UserError for another fold: it would validate on images that the run was trained on."""
    settings = checkpoint.meta["settings"]
    saved, seed = settings.get("DATA.FOLD"), settings.get("DATA.SPLIT_SEED", 0)
    if saved != data.FOLD or (saved is not None and seed != data.SPLIT_SEED):
        raise UserError(
            f"{checkpoint.folder}: trained with DATA.FOLD {saved or 'null'} and DATA.SPLIT_SEED {seed}; with DATA.FOLD "
            f"{data.FOLD or 'null'} and DATA.SPLIT_SEED {data.SPLIT_SEED} it would be validated on images that it was "
            "trained on. Set both back, or start a new run."
        )
    if (group := settings.get("DATA.GROUP")) != data.GROUP:
        raise UserError(
            f"{checkpoint.folder}: trained with DATA.GROUP {group or 'null'}; with {data.GROUP or 'null'} it would be "
            "validated on images that it was trained on. Set it back, or start a new run."
        )


def _go_back(checkpoint: Checkpoint, position: Position, config: Config, world: World) -> str:
    """Command that resumes from the last end of an epoch with the batch of this run."""
    root = checkpoint.folder.parent
    epochs = [epoch for epoch, update in ended_epochs(root).items() if update <= position.update]
    if not epochs:
        return f"  impossible: {root} has no checkpoint of the end of an epoch before; start a new run"
    batch = _batch_flags(checkpoint, config, config.DATA.BATCH_SIZE, global_batch(config, world))
    run = run_folder_of(checkpoint.folder) or root
    place, new = shlex.quote(str(run)), shlex.quote(f"{run}-from-epoch-{max(epochs)}")
    return f"  {start_again(world, f'-resume {place} -output {new} -last_epoch {max(epochs)} {batch}')}"


def _batch_flags(checkpoint: Checkpoint, config: Config, each: int, total: int) -> str:
    """Flags for a global batch of `total` images, `each` per process, whatever the run's own settings are."""
    accumulated = checkpoint.meta["batch"]["accumulated"], config.TRAIN.ACCUM_ITER
    plain = accumulated == (1, 1) and config.TRAIN.GLOBAL_BATCH is None
    return f"-batch_size {each}{'' if plain else f' TRAIN.GLOBAL_BATCH={total}'}"


def _resume(config: Config, world: World, place: str, flags: str) -> str:
    """Command that resumes the run at `place`, with its own settings but for `flags`."""
    output = config.OUTPUT
    place = str(output) if place == AUTO else place
    own = run_folder_of(Path(place)) or Path(place)
    elsewhere = output is not None and Path(output).resolve() != own.resolve()
    into = f" -output {shlex.quote(str(output))}" if elsewhere else ""
    return start_again(world, f"-resume {shlex.quote(place)}{into} {flags}")
