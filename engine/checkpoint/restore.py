"""Restores the training state of a checkpoint, the optimiser's by the names of its weights.

Before, it is checked that the checkpoint fits the batch and the samples of the run that resumes it; if not, the error
has commands that lead on.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from datasets import comes_unsplit, source_of
from datasets.sources.split import keys_of_split
from engine.amp.precision import PRECISION, Precision
from engine.checkpoint.find import ended_epochs
from engine.checkpoint.sharded_saver import OPTIMIZER
from engine.checkpoint.state import trained_weights
from engine.machine.device import global_batch
from engine.measure.meters import Best, Position
from engine.optim.build import optimizer_name
from engine.optim.schedule import SCALE
from engine.parallel.shards import is_sharded, local_shard
from engine.update import TrainState
from models.build import sizes_in
from models.parts import base_weights, frozen_weights
from utils.config import Config, differences, load_config
from utils.config.keys import OF_ONE_START, deciding, default_of, value_of, values_by_key
from utils.config.kinds import OWN_SETTING, one_line
from utils.config.model import LoraConfig
from utils.config.resumed import FROM_WEIGHTS, known_settings, resume_of
from utils.distributed.world import World, broadcast
from utils.errors import UserError
from utils.log import IN_FULL, log
from utils.own_code import FIELD, noted_files
from utils.program import start_again, tool
from utils.text import counted
from vitamp.checkpoints import CHECKPOINTS, LORA, MODEL, Checkpoint, folder_name, run_folder_of
from vitamp.metrics import KNN, PLAIN
from vitamp.sizes import sides
from vitamp.tensors import open_tensors, read_state

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding


def check_and_restore(
    parts: TrainState, checkpoint: Checkpoint, samples: dict[str, Any], config: Config, world: World
) -> tuple[Position, Best, list[str]]:
    """Restore the training state if the checkpoint fits the run, and give warnings of what differs.

    `samples`: `identity_of` those of the run.
    """
    check_task(checkpoint, config, world)
    check_adapters(checkpoint, config.MODEL.LORA)
    check_unchanged(checkpoint, config)
    check_batch(checkpoint, config, world)
    position, best = restore(parts, checkpoint, samples["updates"])
    warnings = check_samples(checkpoint, position, samples, config, world)
    if position.step >= checkpoint.meta["samples"]["updates"]:  # at the end of an epoch, which is not trained further
        position.step = samples["updates"]
    return position, best, warnings


def restore(parts: TrainState, checkpoint: Checkpoint, per_epoch: int) -> tuple[Position, Best]:
    """Restore all of the training state but the optimiser's settings, which come from the config."""
    state = read_state(checkpoint)
    sharding = parts.sharding
    merged = not base_weights(parts.model)  # adapters are merged if all weights are trained from now on
    load_weights(parts.model, open_tensors(checkpoint, MODEL, merged), f"{checkpoint.folder / MODEL}", sharding)
    load_optimizer(parts, state, open_tensors(checkpoint, OPTIMIZER) if checkpoint.has(OPTIMIZER) else {})
    if state["fp32_modules"] and parts.precision.level in ("O1", "O2"):
        if sharding is None:
            parts.force_fp32(state["fp32_modules"])
        else:  # done before the weights were sharded
            parts.moved_to_fp32 = list(state["fp32_modules"])
        log.info("Modules that AMP.AUTO_FP32 moved to fp32 before the resume: %s", ", ".join(state["fp32_modules"]))
    if state["scaler"] and parts.precision.scaler.is_enabled():
        parts.precision.scaler.load_state_dict(state["scaler"])
    for which, module in parts.others.items():
        name = which.file if checkpoint.has(which.file) else PLAIN.file
        load_weights(module, open_tensors(checkpoint, name, merged), f"{checkpoint.folder / name}", sharding)
        if name == PLAIN.file:
            words = "The %s starts from the checkpoint's weights, since the checkpoint has no %s."
            log.info(words, which.label, which.label)
    for callback in parts.callbacks:
        callback.restore(state)
    moved = state["moved"]
    before = checkpoint.meta["samples"]["updates"]
    parts.schedule.restore(moved if before == per_epoch else round(moved * per_epoch / before))
    parts.meters.restore(**state["meters"])
    return Position(**state["position"]), Best(**state["best"])


def restore_fp32(model: nn.Module, checkpoint: Checkpoint, precision: Precision) -> None:
    """Compute modules in fp32 that AMP.AUTO_FP32 had moved there: before the weights are sharded, or evaluated."""
    if precision.level in ("O1", "O2"):
        from engine.amp.low_precision import force_fp32

        force_fp32(model, read_state(checkpoint, mapped=True)["fp32_modules"], precision.device.type)


def load_weights(model: nn.Module, saved: Mapping[str, Tensor], where: str, sharding: Sharding | None = None) -> None:
    """Load weights with exactly the model's names and shapes. Otherwise raise UserError that lists the differences."""
    own = model.state_dict()
    lines = [
        f"{name}: {tuple(saved[name].shape)} in the file, {tuple(value.shape)} in the model"
        for name, value in own.items()
        if name in saved and saved[name].shape != value.shape
    ]
    lines += [f"{name}: missing in the file" for name in own if name not in saved]
    lines += [f"{name}: only in the file" for name in saved if name not in own]
    if lines:
        more = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise UserError(
            f"{where}: weights of another architecture. Use the config that they were trained with; or, if they differ "
            "in the classifier or the image size only, start from them with -pretrained. Tensors that "
            "differ:\n  " + "\n  ".join(lines[:10]) + more
        )
    if sharding is None:
        model.load_state_dict(saved)
        return
    for name, value in own.items():
        local_shard(value).copy_(sharding.rows(saved[name]) if is_sharded(value) else saved[name])


def best_to_beat(best: Best, val_data: str, folder: Path, checkpoint: Checkpoint, config: Config, world: World) -> Best:
    """Best metric so far; none if measured otherwise or on other images, or its checkpoint is not in this folder."""
    if best.figure is None:
        return Best(kind=config.SAVE_BEST_BY, stale=best.stale if best.by == config.SAVE_BEST_BY else 0)
    changed = _measured_otherwise(best, val_data, checkpoint.meta, config)
    if changed:
        log.info("%s: the best so far, %s, is ignored.", changed, best.words())
        return Best(kind=config.SAVE_BEST_BY)
    name = folder_name(best.update)
    if broadcast((folder / CHECKPOINTS / name).is_dir(), world):
        return best
    elsewhere = checkpoint.folder.parent / name
    where = f"its checkpoint is in another folder ({elsewhere})" if elsewhere.is_dir() else "its checkpoint is gone"
    log.warning("Best so far: %s, but %s. The search for the best starts anew in this run.", best.words(), where)
    return Best(kind=best.kind)


def _measured_otherwise(best: Best, val_data: str, meta: Mapping[str, Any], config: Config) -> str | None:
    """What of the metric has changed since the checkpoint of `meta`."""
    settings = meta["settings"]
    measured = "TRAIN.KNN" if best.by == KNN.name else "MODEL.MASK_RATIO"
    before = {"SAVE_BEST_BY": best.by, measured: settings.get(measured, default_of(measured))}
    for key, old in before.items():
        now = value_of(config, key)
        if now != old:
            return f"{key} is now {now}"
    if meta.get("val_data", val_data) != val_data:
        return "The validation images have changed"
    # A metric may be one of the user's own, and change with its file or a setting.
    files = [*noted_files(), *meta.get(FIELD, ())]
    hashes = {one["sha256"] for one in files if best.by in one["registers"]}
    words = set(config.own_settings) ^ set(filter(OWN_SETTING.fullmatch, settings.get("USE", ())))
    if len(hashes) > 1 or any(word.startswith(f"{best.by}.") for word in words):
        return f"The metric {best.by} has changed"
    return None


def log_resumption(checkpoint: Checkpoint, config: Config, parts: TrainState, position: Position) -> None:
    """Log where the run resumes and at which learning rate, and how the settings differ from the checkpoint's."""
    rate = ""
    if position.epoch <= config.TRAIN.NUM_EPOCHS:
        rate = f"; the next update's learning rate is {parts.schedule.rate_at(parts.schedule.stepped):.3e}"
    done = counted(position.update, "update")
    log.info("Resuming from %s: epoch %d, %s done%s.", checkpoint.folder, position.epoch, done, rate, extra=IN_FULL)
    _log_frozen(checkpoint.meta, parts.model)
    try:
        # Not config.yaml's: it may be from a resumed run that was killed before it saved.
        settings = known_settings(checkpoint.meta["settings"], checkpoint.folder)
        old = load_config(None, {key: (value, f"{checkpoint.folder}") for key, value in settings.items()}).config
    except UserError as error:
        log.warning("The checkpoint's settings cannot be compared with the current ones: %s", error)
        return
    for line in differences(old, config):
        if line.partition(":")[0] not in OF_ONE_START:
            log.info("  changed since: %s", line)
    chosen = checkpoint.meta.get("choices", {}).get(PRECISION)
    precision = parts.precision
    if chosen not in (None, precision.name) and old.AMP == config.AMP:  # -amp on another device
        log.info("  changed since: -amp is %s here (%s), and was %s", precision.name, precision.choice.reason, chosen)
    before = old.TRAIN.NUM_EPOCHS
    now = config.TRAIN.NUM_EPOCHS
    if before != now:
        more = ": the learning rate may rise, and accuracy fall at first" if before < now else ""
        log.info("  the schedule now spans %s instead of %d%s", counted(now, "epoch"), before, more)


def _log_frozen(meta: Mapping[str, Any], model: nn.Module) -> None:
    """Log which weights are frozen now and were not in the checkpoint of `meta`, or the other way round."""
    frozen = set(frozen_weights(model))
    earlier = set(meta.get("frozen", ()))
    setting = "MODEL.LORA" if meta.get(LORA) else "MODEL.FREEZE"
    for names, what in ((frozen - earlier, "frozen from now on"), (earlier - frozen, "trained from now on")):
        if names:
            shown = ", ".join(name for name, _ in model.named_parameters() if name in names)
            log.info("  %s (%s): %s: %s", what, setting, counted(len(names), "tensor"), textwrap.shorten(shown, 200))


GROUPS = "param_groups"


def load_optimizer(parts: TrainState, state: dict[str, Any], moments: Mapping[str, Tensor]) -> None:
    """Load the saved `state` of the optimiser. `moments`: the part of it that is in a checkpoint's shards."""
    optimizer = parts.optimizer
    saved = state["optimizer"]
    now = optimizer.state_dict()
    for name, moment in moments.items():  # which `into_shards` took out
        number, _, key = name.partition(".")
        saved["state"].setdefault(int(number), {})[key] = moment
    before = state["trained"]
    names = trained_weights(parts.model, optimizer)
    if before != names or [one["params"] for one in saved[GROUPS]] != [one["params"] for one in now[GROUPS]]:
        # Saved state, renumbered for the weights and groups of now. Newly trained weights start with a new state.
        states = {names[number]: values for number, values in now["state"].items()}
        states |= {before[number]: values for number, values in saved["state"].items()}
        saved["state"] = {number: states[name] for number, name in enumerate(names) if name in states}
        saved[GROUPS] = [{**saved[GROUPS][0], **group} for group in now[GROUPS]]
    if parts.sharding is not None:
        weights = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        for number, values in saved["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = parts.sharding.like(value, weights[number])
    # Settings are those of now. A key that a new group lacks is no setting: LAMB counts its steps there.
    # A factor of the rate is one, which only groups of LAYER_DECAY have.
    for group in saved[GROUPS]:
        group.pop(SCALE, None)
    groups = [{**old, **new} for old, new in zip(saved[GROUPS], now[GROUPS], strict=True)]
    optimizer.load_state_dict({**saved, GROUPS: groups})
    _match_memory_format(optimizer)


def _match_memory_format(optimizer: Optimizer) -> None:
    """Fused kernels need the state in the memory format of its weights."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_task(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError if the checkpoint is of a masked autoencoder and the settings are not, or the other way round."""
    key = "MODEL.MAE_PRETRAIN"
    masked = bool(checkpoint.meta["settings"].get(key, False))
    if masked and checkpoint.meta["settings"].get("MODEL.NORM_PIX_LOSS") is False:  # of an earlier version
        raise UserError(
            f"{checkpoint.folder}: learned to predict pixels that are not normalised (MODEL.NORM_PIX_LOSS: false), "
            "which this version cannot resume or evaluate. To fine-tune it, use -pretrained in place of -resume."
        )
    if masked == config.MODEL.MAE_PRETRAIN:
        return
    place = shlex.quote(str(run_folder_of(checkpoint.folder) or checkpoint.folder))
    own = start_again(world, f"-resume {place} -eval" if config.EVAL else f"-resume {place}")
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


def check_classes(place: Path, known: list[str] | None, now: list[str] | None, config: Config) -> None:
    """Raise UserError if a label of the data was another class in the training of the weights at `place`.

    `known`, `now`: names of the classes then and now, in the order of their labels; None if they have no names. New
    names may be other words for the same classes, such as those of ImageNet, so they are only warned of.
    """
    if config.MODEL.MAE_PRETRAIN or known is None or now is None:
        return
    changed = [label for label, name in enumerate(now) if [name] != known[label : label + 1]]
    label = next((label for label in changed if now[label] in known), None)
    if changed and label is None:
        names = ", ".join(now[one] for one in changed[:3])
        log.warning("%s: its classes had other names (now: %s, ...); labels are taken to be the same.", place, names)
    if label is None:
        return
    way = "Restore the names, or start a new run with -pretrained."
    if config.EVAL:
        way = f"`{tool('evaluate')} {shlex.quote(str(place))}`, with the same data, matches classes by name."
    raise UserError(
        f"{place}: label {label} was {dict(enumerate(known)).get(label, 'no class')} in training, but is {now[label]} "
        f"in {source_of(config.DATA)}. {way}"
    )


def check_batch(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError for another global batch within an epoch: the rest of the epoch would have other samples."""
    state = read_state(checkpoint, mapped=True)
    saved = state["global_batch"]
    now = global_batch(config, world)
    position = Position(**state["position"])
    if not 0 < position.step < checkpoint.meta["samples"]["updates"] or saved == now:
        return
    kept = f"impossible with {world.size} processes, which do not divide it"
    resume = resume_of(values_by_key(config)) if saved % world.size == 0 else None
    if resume:
        place = resume.place
        into = ""
        if config.OUTPUT is not None and Path(config.OUTPUT).resolve() != (run_folder_of(place) or place).resolve():
            into = f" -output {shlex.quote(str(config.OUTPUT))}"
        each = checkpoint.meta["batch"]["per_process"]
        if saved % (each * world.size) != 0:
            each = saved // world.size
        flags = _batch_flags(checkpoint, config, each, saved)
        kept = start_again(world, f"-resume {shlex.quote(str(place))}{into} {flags}")
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch} with a global batch of {saved}, but this run's is "
        f"{now} (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER). It can only change between epochs. Keep the batch:\n"
        f"  {kept}\nor go back, with the new batch:\n{_go_back(checkpoint, position, config, world)}"
    )


def check_adapters(checkpoint: Checkpoint, lora: LoraConfig) -> None:
    """Raise UserError unless the adapters are those of the checkpoint. Without MODEL.LORA, they are merged."""
    if lora.RANK is None:
        return
    then = "no adapters"
    settings = checkpoint.meta["settings"]
    rank = settings.get("MODEL.LORA.RANK")
    if rank is not None:
        alpha = settings.get("MODEL.LORA.ALPHA")
        saved = LoraConfig(RANK=rank, ALPHA=alpha, TARGETS=settings["MODEL.LORA.TARGETS"])
        same_targets = set(saved.TARGETS) == set(lora.TARGETS)
        if saved.RANK == lora.RANK and saved.factor == lora.factor and same_targets:
            return
        then = f"MODEL.LORA {one_line(saved.model_dump())}"
    raise UserError(
        f"{checkpoint.folder}: the run has {then}, but MODEL.LORA is {one_line(lora.model_dump())} now. Set it back; "
        f"or start a new run from its merged weights, with -pretrained {checkpoint.folder} in place of -resume."
    )


def check_unchanged(checkpoint: Checkpoint, config: Config) -> None:
    """Raise UserError for another optimiser or other use of the same weights; in an evaluation, log other input."""
    named = config.MODEL.changed(NUM_HEADS=None)  # with the heads of timm's model
    refused: list[tuple[str, Callable[[Any], object]]] = [
        ("MODEL.POOL", one_line),
        ("MODEL.NUM_HEADS", lambda n: one_line(n or sizes_in(named).get("NUM_HEADS"))),
        ("DATA.IMAGE_SIZE", lambda size: Fraction(*sides(size))),  # as many patches can form another grid
    ]
    logged = []
    if config.EVAL:
        logged = [(key, one_line) for key in FROM_WEIGHTS if key.startswith("DATA.")]
    else:
        refused.append(("TRAIN.OPTIMIZER.NAME", optimizer_name))
        if config.TRAIN.OPTIMIZER.facts.by_matrix:
            refused.append(("TRAIN.OPTIMIZER.MUON.EVERY_MATRIX", bool))
    for key, as_built in refused + logged:
        before = checkpoint.meta["settings"].get(key, default_of(key))
        now = value_of(config, key)
        if before != now and as_built(before) != as_built(now):
            changed = f"{key}: the run was trained with {one_line(before)}, but it is {one_line(now)} now."
            if (key, as_built) not in logged:
                raise UserError(f"{changed} Set it back, leave out -cfg, or start a new run with -pretrained.")
            log.info(changed)


def check_samples(
    checkpoint: Checkpoint, position: Position, now: dict[str, Any], config: Config, world: World
) -> list[str]:
    """Raise UserError for another split, or if the rest of an epoch would have other samples or another order.

    Warnings of other updates or samples of the coming epochs. `now`: the `identity_of` the samples.
    """
    data = config.DATA
    is_unsplit = comes_unsplit(data)
    if is_unsplit:
        _check_split(checkpoint, config)
    saved = checkpoint.meta["samples"]
    warnings = []
    if saved["updates"] != now["updates"]:
        warnings.append(
            f"An epoch has {counted(now['updates'], 'update')} now, but had {saved['updates']} in the checkpoint. The "
            "learning-rate schedule resumes at the same epoch, and the update number continues from the checkpoint's. "
            "The result will differ from that of an uninterrupted run."
        )
    if saved["number"] != now["number"]:
        change = f"{saved['number']} then, {now['number']} now"
    elif saved.get("data", now["data"]) != now["data"]:  # older checkpoints may have only the order and the labels
        change = f"{now['number']} as before, but with other names or labels, or named in another order"
    elif saved["order"] != now["order"]:
        change = f"{now['number']} as before, in another order"
    else:
        return warnings
    if not 0 < position.step < saved["updates"]:
        leaks = is_unsplit and saved.get("data") != now["data"]
        more = " Validation may now have images that the run was trained on." if leaks else ""
        warnings.append(f"The training samples have changed since the checkpoint: {change}.{more}")
        return warnings
    machines = " (by_machine: the number of machines)" if data.SAMPLER == "by_machine" else ""
    keys = ", ".join(deciding("images", "training images", "split", "random split"))
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch}, but the training samples have changed since: "
        f"{change}. They depend on SEED, DATA.SAMPLER{machines}, DATA.REPEATED_AUGMENT, {keys} and the files. Restore "
        "the former samples and order, or go back:\n"
        f"{_go_back(checkpoint, position, config, world)}"
    )


def _check_split(checkpoint: Checkpoint, config: Config) -> None:
    """Raise UserError if data that come unsplit are divided by other settings."""
    for key in keys_of_split(config.DATA):
        before = checkpoint.meta["settings"].get(key, default_of(key))
        own = value_of(config, key)
        if before != own:
            raise UserError(
                f"{checkpoint.folder}: trained with {key} {one_line(before)}; with {one_line(own)} it would be "
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
    place = shlex.quote(str(run))
    new = shlex.quote(f"{run}-from-epoch-{max(epochs)}")
    return f"  {start_again(world, f'-resume {place} -output {new} -last_epoch {max(epochs)} {batch}')}"


def _batch_flags(checkpoint: Checkpoint, config: Config, each: int, total: int) -> str:
    """Flags for a global batch of `total` images, `each` per process, whatever the run's own settings are."""
    accumulated = checkpoint.meta["batch"]["accumulated"], config.TRAIN.ACCUM_ITER
    if accumulated == (1, 1) and config.TRAIN.GLOBAL_BATCH is None:
        return f"-batch_size {each}"
    return f"-batch_size {each} TRAIN.GLOBAL_BATCH={total}"
