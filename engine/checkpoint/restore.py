"""Restores the training state of a checkpoint, the optimiser's by the names of its weights.

First, it checks that the checkpoint fits the settings, the global batch and the samples of the run that resumes it. If
not, the error has commands that would work.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from datasets import comes_unsplit, source_of
from datasets.registry import crop_of
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
from utils.config.keys import DATASET, OF_ONE_START, deciding, default_of, value_of, values_by_key
from utils.config.kinds import OWN_SETTING, one_line
from utils.config.model import LoraConfig
from utils.config.resumed import FROM_WEIGHTS, OF_EVALUATION, known_settings, resume_of
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
    """Restore the training state if the checkpoint fits the run; raise UserError if it does not.

    `samples`: what `identity_of` returns for the run's training split. Returns the position at which training resumes,
    the best validation so far, and warnings of differences that are allowed.
    """
    check_task(checkpoint, config, world)
    check_adapters(checkpoint, config.MODEL.LORA)
    check_unchanged(checkpoint, config)
    check_batch(checkpoint, config, world)
    position, best = restore(parts, checkpoint, samples["updates"])
    warnings = check_samples(checkpoint, position, samples, config, world)
    # A run that was at the end of an epoch is still there if an epoch has more or fewer updates now.
    if position.step >= checkpoint.meta["samples"]["updates"]:
        position.step = samples["updates"]
    return position, best, warnings


def restore(parts: TrainState, checkpoint: Checkpoint, per_epoch: int) -> tuple[Position, Best]:
    """Restore all of the training state but the optimiser's settings, which come from the config.

    `per_epoch`: updates that an epoch has in this run. Returns the saved position and the best validation so far.
    """
    state = read_state(checkpoint)
    sharding = parts.sharding

    # The weights. A model without adapters has no frozen base weights; adapters of the checkpoint are merged for it.
    merge_adapters = not base_weights(parts.model)
    saved_weights = open_tensors(checkpoint, MODEL, merge_adapters)
    load_weights(parts.model, saved_weights, f"{checkpoint.folder / MODEL}", sharding)
    load_optimizer(parts, state, open_tensors(checkpoint, OPTIMIZER) if checkpoint.has(OPTIMIZER) else {})

    # Precision
    fp32_modules = state["fp32_modules"]
    if fp32_modules and parts.precision.level in ("O1", "O2"):
        if sharding is None:
            parts.force_fp32(fp32_modules)
        else:  # the function `restore_fp32` has moved them already, before the weights were sharded
            parts.moved_to_fp32 = list(fp32_modules)
        log.info("Modules that AMP.AUTO_FP32 moved to fp32 before the resume: %s", ", ".join(fp32_modules))
    if state["scaler"] and parts.precision.scaler.is_enabled():
        parts.precision.scaler.load_state_dict(state["scaler"])

    # Other sets of weights, such as the EMA, and the callbacks
    for weight_set, module in parts.others.items():
        file_name = weight_set.file if checkpoint.has(weight_set.file) else PLAIN.file
        where = f"{checkpoint.folder / file_name}"
        load_weights(module, open_tensors(checkpoint, file_name, merge_adapters), where, sharding)
        if file_name == PLAIN.file:
            words = "The %s starts from the checkpoint's weights, since the checkpoint has no %s."
            log.info(words, weight_set.label, weight_set.label)
    for callback in parts.callbacks:
        callback.restore(state)

    # The schedule counts the updates that moved the weights. It resumes at the same epoch, so the count is rescaled if
    # an epoch has another number of updates now.
    steps = state["moved"]
    saved_per_epoch = checkpoint.meta["samples"]["updates"]
    if saved_per_epoch != per_epoch:
        steps = round(steps * per_epoch / saved_per_epoch)
    parts.schedule.restore(steps)
    parts.meters.restore(**state["meters"])
    return Position(**state["position"]), Best(**state["best"])


def restore_fp32(model: nn.Module, checkpoint: Checkpoint, precision: Precision) -> None:
    """Let the modules compute in fp32 that AMP.AUTO_FP32 had moved to fp32 before the checkpoint was saved.

    Called before the weights are sharded, or evaluated.
    """
    if precision.level in ("O1", "O2"):  # the levels with autocast; the others compute in one precision
        from engine.amp.low_precision import force_fp32

        state = read_state(checkpoint, mapped=True)  # mapped: the tensors in the file are not read
        force_fp32(model, state["fp32_modules"], precision.device.type)


def load_weights(model: nn.Module, saved: Mapping[str, Tensor], where: str, sharding: Sharding | None = None) -> None:
    """Load `saved` weights into the model, which must have exactly their names and shapes.

    Otherwise raises UserError, which lists the differences. `where`: the file that they are from, for this error.
    With `sharding`, each rank copies only its rows.
    """
    current = model.state_dict()
    problems = [
        f"{name}: {tuple(saved[name].shape)} in the file, {tuple(tensor.shape)} in the model"
        for name, tensor in current.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    problems += [f"{name}: missing in the file" for name in current if name not in saved]
    problems += [f"{name}: only in the file" for name in saved if name not in current]
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise UserError(
            f"{where}: weights of another architecture. Use the config that they were trained with; or, if they differ "
            "in the classifier or the image size only, start from them with -pretrained. Tensors that "
            "differ:\n  " + "\n  ".join(problems[:10]) + more
        )
    if sharding is None:
        model.load_state_dict(saved)
        return
    for name, tensor in current.items():
        values = sharding.rows(saved[name]) if is_sharded(tensor) else saved[name]
        local_shard(tensor).copy_(values)


def best_to_beat(best: Best, val_data: str, folder: Path, checkpoint: Checkpoint, config: Config, world: World) -> Best:
    """Return the best validation that the resumed run has to beat: the saved one, `best`, if it still counts.

    The search starts anew if its metric is measured differently now or on other images, or if the run's `folder` no
    longer has the checkpoint of that validation. `val_data`: fingerprint of the current validation images.
    `checkpoint`: the one that the run resumes from. A collective call.
    """
    if best.figure is None:
        # No validation had a finite metric. Their number still counts for TRAIN.PATIENCE if the metric is the same.
        is_same_metric = best.by == config.SAVE_BEST_BY
        return Best(kind=config.SAVE_BEST_BY, stale=best.stale if is_same_metric else 0)
    change = _change_of_metric(best, val_data, checkpoint.meta, config)
    if change is not None:
        log.info("%s: the best so far, %s, is ignored.", change, best.words())
        return Best(kind=config.SAVE_BEST_BY)
    name_of_best = folder_name(best.update)
    is_in_run = broadcast((folder / CHECKPOINTS / name_of_best).is_dir(), world)  # as rank 0 sees it
    is_resumed = best.update == checkpoint.meta["update"]  # which is saved in the run's folder, too
    if is_in_run or is_resumed:
        return best
    elsewhere = checkpoint.folder.parent / name_of_best
    where = f"its checkpoint is in another folder ({elsewhere})" if elsewhere.is_dir() else "its checkpoint is gone"
    log.warning("Best so far: %s, but %s. The search for the best starts anew in this run.", best.words(), where)
    return Best(kind=best.kind)


def _change_of_metric(best: Best, val_data: str, meta: Mapping[str, Any], config: Config) -> str | None:
    """Say why the metric of `best` cannot be compared with new values; None if it can.

    It cannot if SAVE_BEST_BY, a setting of its input, the validation images, or own code that computes it has changed
    since the checkpoint of `meta`.
    """
    settings = meta["settings"]
    # k-NN accuracy depends on TRAIN.KNN. Of the other metrics, only the loss of a masked autoencoder depends on a
    # setting: MODEL.MASK_RATIO.
    input_key = "TRAIN.KNN" if best.by == KNN.name else "MODEL.MASK_RATIO"
    saved_values = {"SAVE_BEST_BY": best.by, input_key: settings.get(input_key, default_of(input_key))}
    for key, saved_value in saved_values.items():
        value = value_of(config, key)
        if value != saved_value:
            return f"{key} is now {value}"
    if meta.get("val_data", val_data) != val_data:
        return "The validation images have changed"

    # A metric of the user's own code changes with the file that registers it, or with a setting of its own.
    current_files = noted_files()
    saved_files = meta.get(FIELD, ())
    hashes = {file["sha256"] for file in [*current_files, *saved_files] if best.by in file["registers"]}
    saved_own_settings = filter(OWN_SETTING.fullmatch, settings.get("USE", ()))
    changed_settings = set(config.own_settings).symmetric_difference(saved_own_settings)
    file_has_changed = len(hashes) > 1
    if file_has_changed or any(setting.startswith(f"{best.by}.") for setting in changed_settings):
        return f"The metric {best.by} has changed"
    return None


def log_resumption(checkpoint: Checkpoint, config: Config, parts: TrainState, position: Position) -> None:
    """Log where the run resumes and at which learning rate, and how the settings differ from the checkpoint's."""
    rate = ""
    all_epochs_are_done = position.epoch > config.TRAIN.NUM_EPOCHS
    if not all_epochs_are_done:
        rate = f"; the next update's learning rate is {parts.schedule.rate_at(parts.schedule.stepped):.3e}"
    done = counted(position.update, "update")
    log.info("Resuming from %s: epoch %d, %s done%s.", checkpoint.folder, position.epoch, done, rate, extra=IN_FULL)
    _log_frozen(checkpoint.meta, parts.model)

    # Changed settings
    try:
        # The settings are not read from config.yaml: a run that was resumed since may have written other ones into it,
        # and been killed before it saved.
        settings = known_settings(checkpoint.meta["settings"], checkpoint.folder)
        old = load_config(None, {key: (value, f"{checkpoint.folder}") for key, value in settings.items()}).config
    except UserError as error:
        log.warning("The checkpoint's settings cannot be compared with the current ones: %s", error)
        return
    for line in differences(old, config):  # "KEY: old value -> new value"
        key, _, _ = line.partition(":")
        if key not in OF_ONE_START:
            log.info("  changed since: %s", line)

    # With the same settings, -amp may have chosen another precision for another device.
    precision = parts.precision
    old_name = checkpoint.meta.get("choices", {}).get(PRECISION)
    if old_name not in (None, precision.name) and old.AMP == config.AMP:
        log.info("  changed since: -amp is %s here (%s), and was %s", precision.name, precision.choice.reason, old_name)

    # The schedule
    old_epochs = old.TRAIN.NUM_EPOCHS
    epochs = config.TRAIN.NUM_EPOCHS
    if old_epochs != epochs:
        effect = ": the learning rate may rise, and accuracy fall at first" if old_epochs < epochs else ""
        log.info("  the schedule now spans %s instead of %d%s", counted(epochs, "epoch"), old_epochs, effect)


def _log_frozen(meta: Mapping[str, Any], model: nn.Module) -> None:
    """Log which weights are frozen now and were trained before the checkpoint of `meta`, or the other way round."""
    frozen = set(frozen_weights(model))
    frozen_before = set(meta.get("frozen", ()))
    setting = "MODEL.LORA" if meta.get(LORA) else "MODEL.FREEZE"
    changes = ((frozen - frozen_before, "frozen from now on"), (frozen_before - frozen, "trained from now on"))
    for names, change in changes:
        if names:
            in_order = ", ".join(name for name, _ in model.named_parameters() if name in names)
            shown = textwrap.shorten(in_order, 200)
            log.info("  %s (%s): %s: %s", change, setting, counted(len(names), "tensor"), shown)


GROUPS = "param_groups"


def load_optimizer(parts: TrainState, state: dict[str, Any], moments: Mapping[str, Tensor]) -> None:
    """Load the optimiser's state from the training `state` of a checkpoint, matching weights by their names.

    The optimiser keeps its current settings, and may have other weights and groups than were saved. `moments`: the
    part of its state that sharded checkpoints hold in files of their own, by the number of the weight and the key of
    its state, such as "12.exp_avg"; empty for other checkpoints.
    """
    optimizer = parts.optimizer
    saved = state["optimizer"]
    current = optimizer.state_dict()

    # Sharded checkpoints: put the moments back into the state.
    for name, moment in moments.items():
        number, _, key = name.partition(".")
        saved["state"].setdefault(int(number), {})[key] = moment

    # torch numbers the weights through all groups. Other weights may be trained now, or in other groups.
    saved_names = state["trained"]
    names = trained_weights(parts.model, optimizer)
    saved_numbers = [group["params"] for group in saved[GROUPS]]
    numbers = [group["params"] for group in current[GROUPS]]
    if saved_names != names or saved_numbers != numbers:
        _renumber(saved, saved_names, current, names)

    # FSDP: each rank keeps its rows of the tensors.
    if parts.sharding is not None:
        weights = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        for number, values in saved["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = parts.sharding.like(value, weights[number])

    # Current settings replace saved ones. A saved key that a current group lacks is kept, since it is no setting: LAMB
    # counts its steps there. The one exception is the factor of the learning rate (LAYER_DECAY), which is a setting.
    for group in saved[GROUPS]:
        group.pop(SCALE, None)
    groups = [{**old, **new} for old, new in zip(saved[GROUPS], current[GROUPS], strict=True)]
    optimizer.load_state_dict({**saved, GROUPS: groups})
    _match_memory_format(optimizer)


def _renumber(saved: dict[str, Any], saved_names: list[str], current: dict[str, Any], names: list[str]) -> None:
    """Give a saved state of the optimiser, in place, the numbers and groups that its weights have now.

    `saved_names`, `names`: name of each trained weight by its number, in `saved` and in the `current` state. Weights
    that are newly trained keep their current state.
    """
    state_of_name = {names[number]: values for number, values in current["state"].items()}
    state_of_name |= {saved_names[number]: values for number, values in saved["state"].items()}
    saved["state"] = {number: state_of_name[name] for number, name in enumerate(names) if name in state_of_name}
    # Of the saved groups, only keys that are no settings count, such as LAMB's count of steps. All groups have the same
    # values there, so the first is taken.
    saved[GROUPS] = [{**saved[GROUPS][0], **group} for group in current[GROUPS]]


def _match_memory_format(optimizer: Optimizer) -> None:
    """Give the state of each weight the memory format of the weight, which fused kernels need."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_task(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError if the checkpoint is of a masked autoencoder and the settings are not, or the other way round.

    The error has the command that starts with the settings of the checkpoint.
    """
    key = "MODEL.MAE_PRETRAIN"
    settings = checkpoint.meta["settings"]
    was_masked = bool(settings.get(key, False))
    if was_masked and settings.get("MODEL.NORM_PIX_LOSS") is False:  # a setting of an earlier version
        raise UserError(
            f"{checkpoint.folder}: learned to predict pixels that are not normalised (MODEL.NORM_PIX_LOSS: false), "
            "which this version cannot resume or evaluate. To fine-tune it, use -pretrained in place of -resume."
        )
    if was_masked == config.MODEL.MAE_PRETRAIN:
        return

    run = shlex.quote(str(run_folder_of(checkpoint.folder) or checkpoint.folder))
    resume_command = start_again(world, f"-resume {run} -eval" if config.EVAL else f"-resume {run}")
    if not was_masked:
        raise UserError(
            f"{checkpoint.folder}: trained with labels, but the settings are for training without ({key}: true). With "
            f"its own settings: `{resume_command}`."
        )
    knn_command = f"{tool('evaluate')} {run} -knn"
    fine_tune_command = start_again(world, f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {run}")
    problem = "which has no classifier to evaluate" if config.EVAL else "which trains without labels"
    raise UserError(
        f"{checkpoint.folder}: a masked autoencoder ({key}), {problem}. With its own settings: `{resume_command}`; "
        f"how well its features tell classes apart: `{knn_command}`; to train a classifier: `{fine_tune_command}`."
    )


def check_classes(place: Path, trained: list[str] | None, current: list[str] | None, config: Config) -> None:
    """Raise UserError if a label of the data was another class in the training of the weights at `place`.

    `trained`, `current`: names of the classes in that training and in the current data, in the order of their labels;
    None if they have no names. Names that the training does not know cause only a warning, since they may be other
    words for the same classes, such as those of ImageNet.
    """
    if config.MODEL.MAE_PRETRAIN or trained is None or current is None:
        return
    renamed = [label for label, name in enumerate(current) if label >= len(trained) or name != trained[label]]
    with_another_label_before = [label for label in renamed if current[label] in trained]
    if not with_another_label_before:
        if renamed:
            names = ", ".join(current[label] for label in renamed[:3])
            message = "%s: its classes had other names (now: %s, ...); labels are taken to be the same."
            log.warning(message, place, names)
        return
    label = with_another_label_before[0]
    class_in_training = trained[label] if label < len(trained) else "no class"
    advice = "Restore the names, or start a new run with -pretrained."
    if config.EVAL:
        advice = f"`{tool('evaluate')} {shlex.quote(str(place))}`, with the same data, matches classes by name."
    raise UserError(
        f"{place}: label {label} was {class_in_training} in training, but is {current[label]} in "
        f"{source_of(config.DATA)}. {advice}"
    )


def check_batch(checkpoint: Checkpoint, config: Config, world: World) -> None:
    """Raise UserError if the global batch has changed within an epoch: the rest of it would have other samples.

    The error has two commands: one that keeps the checkpoint's batch, and one that resumes from the end of an epoch.
    """
    state = read_state(checkpoint, mapped=True)
    saved_batch = state["global_batch"]
    batch = global_batch(config, world)
    position = Position(**state["position"])
    is_within_epoch = 0 < position.step < checkpoint.meta["samples"]["updates"]
    if not is_within_epoch or saved_batch == batch:
        return
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch} with a global batch of {saved_batch}, but this "
        f"run's is {batch} (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER). It can only change between epochs. Keep "
        f"the batch:\n  {_command_to_keep_batch(checkpoint, saved_batch, config, world)}\nor go back, with the new "
        f"batch:\n{_command_to_go_back(checkpoint, position, config, world)}"
    )


def _command_to_keep_batch(checkpoint: Checkpoint, saved_batch: int, config: Config, world: World) -> str:
    """Return the command that resumes with the checkpoint's global batch, `saved_batch`, for an error.

    If the processes cannot share that batch equally, it says so instead.
    """
    resume = resume_of(values_by_key(config))
    if resume is None or saved_batch % world.size != 0:
        return f"impossible with {world.size} processes, which do not divide it"
    path = resume.place
    output = ""
    run = run_folder_of(path) or path
    if config.OUTPUT is not None and Path(config.OUTPUT).resolve() != run.resolve():  # the run continues elsewhere
        output = f" -output {shlex.quote(str(config.OUTPUT))}"
    per_process = checkpoint.meta["batch"]["per_process"]
    if saved_batch % (per_process * world.size) != 0:  # no number of micro-batches of this size fits
        per_process = saved_batch // world.size
    flags = _batch_flags(checkpoint, config, per_process, saved_batch)
    return start_again(world, f"-resume {shlex.quote(str(path))}{output} {flags}")


def check_adapters(checkpoint: Checkpoint, lora: LoraConfig) -> None:
    """Raise UserError if MODEL.LORA is set, but the checkpoint has other adapters or none.

    Without MODEL.LORA, there is nothing to check: adapters that the checkpoint has are merged into the weights.
    """
    if lora.RANK is None:
        return
    saved_words = "no adapters"
    settings = checkpoint.meta["settings"]
    rank = settings.get("MODEL.LORA.RANK")
    if rank is not None:
        alpha = settings.get("MODEL.LORA.ALPHA")
        saved = LoraConfig(RANK=rank, ALPHA=alpha, TARGETS=settings["MODEL.LORA.TARGETS"])
        same_targets = set(saved.TARGETS) == set(lora.TARGETS)
        if saved.RANK == lora.RANK and saved.factor == lora.factor and same_targets:  # the factor is made of ALPHA
            return
        saved_words = f"MODEL.LORA {one_line(saved.model_dump())}"
    raise UserError(
        f"{checkpoint.folder}: the run has {saved_words}, but MODEL.LORA is {one_line(lora.model_dump())} now. Set "
        f"it back; or start a new run from its merged weights, with -pretrained {checkpoint.folder} in place of "
        "-resume."
    )


def check_unchanged(checkpoint: Checkpoint, config: Config) -> None:
    """Raise UserError if the model would now compute something else with the same weights, or the optimiser changed.

    This is about settings that the shapes of the weights do not show. An evaluation has no optimiser; instead, it logs
    settings of the input that have changed.
    """
    with_timms_heads = config.MODEL.changed(NUM_HEADS=None)
    # Each setting, and a function of its value. Values for which it returns the same mean the same, such as None and
    # timm's own number of heads. Of the image size, only the aspect ratio counts: the number of patches is a shape,
    # but another ratio puts as many patches into another grid.
    compared: list[tuple[str, Callable[[Any], object]]] = [
        ("MODEL.POOL", one_line),
        ("MODEL.NUM_HEADS", lambda heads: one_line(heads or sizes_in(with_timms_heads).get("NUM_HEADS"))),
        ("DATA.IMAGE_SIZE", lambda size: Fraction(*sides(size))),
    ]
    if not config.EVAL:
        compared.append(("TRAIN.OPTIMIZER.NAME", optimizer_name))
        if config.TRAIN.OPTIMIZER.facts.by_matrix:  # Muon and its relatives
            compared.append(("TRAIN.OPTIMIZER.MUON.EVERY_MATRIX", bool))
    for key, meaning_of in compared:
        change = _change_of_setting(key, checkpoint.meta["settings"], config, meaning_of)
        if change is not None:
            raise UserError(f"{change} Set it back, leave out -cfg, or start a new run with -pretrained.")
    if config.EVAL:
        of_input = [key for key in FROM_WEIGHTS if key.startswith("DATA.")]
        log_changes(checkpoint.meta["settings"], config, dict.fromkeys((*of_input, *OF_EVALUATION)))


def log_changes(saved: Mapping[str, Any], config: Config, keys: Iterable[str]) -> None:
    """Log which of these settings are not those of the run whose weights are evaluated.

    `saved`: the run's settings, by dotted key
    """
    of_crop = {key: saved.get(f"DATA.{key}", default_of(f"DATA.{key}")) for key in ("CROP", "CROP_MODE", "CROP_PCT")}
    run_data = config.DATA.changed(DATASET=saved.get(DATASET, config.DATA.DATASET), **of_crop)
    for key in keys:
        if key == "DATA.CROP" and crop_of(run_data) == crop_of(config.DATA):  # it may change training images alone
            continue
        change = _change_of_setting(key, saved, config, one_line)
        if change is not None:
            log.info(change)


def _change_of_setting(
    key: str, saved: Mapping[str, Any], config: Config, meaning_of: Callable[[Any], object]
) -> str | None:
    """Say how a setting has changed since the run that has `saved` it; None if both values mean the same.

    `meaning_of`: returns the same for values that mean the same.
    """
    before = saved.get(key, default_of(key))
    now = value_of(config, key)
    if before == now or meaning_of(before) == meaning_of(now):
        return None
    return f"{key}: the run was trained with {one_line(before)}, but it is {one_line(now)} now."


def check_samples(
    checkpoint: Checkpoint, position: Position, now: dict[str, Any], config: Config, world: World
) -> list[str]:
    """Check that the training samples are those of the checkpoint, or may have changed.

    `now`: what `identity_of` returns for the training split. Raises UserError if the split has changed, or if the rest
    of an epoch would have other samples or another order. Returns warnings if only the coming epochs have other
    samples, or another number of updates.
    """
    data = config.DATA
    is_split_by_us = comes_unsplit(data)
    if is_split_by_us:
        _check_split(checkpoint, config)
    saved = checkpoint.meta["samples"]
    warnings = []
    if saved["updates"] != now["updates"]:
        warnings.append(
            f"An epoch has {counted(now['updates'], 'update')} now, but had {saved['updates']} in the checkpoint. The "
            "learning-rate schedule resumes at the same epoch, and the update number continues from the checkpoint's. "
            "The result will differ from that of an uninterrupted run."
        )

    change = _change_of_samples(saved, now)
    if change is None:
        return warnings
    is_within_epoch = 0 < position.step < saved["updates"]
    if not is_within_epoch:
        may_leak = is_split_by_us and saved.get("data") != now["data"]
        risk = " Validation may now have images that the run was trained on." if may_leak else ""
        warnings.append(f"The training samples have changed since the checkpoint: {change}.{risk}")
        return warnings
    machines = " (by_machine: the number of machines)" if data.SAMPLER == "by_machine" else ""
    deciding_settings = ", ".join(deciding("images", "training images", "split", "random split"))
    raise UserError(
        f"{checkpoint.folder}: saved within epoch {position.epoch}, but the training samples have changed since: "
        f"{change}. They depend on SEED, DATA.SAMPLER{machines}, DATA.REPEATED_AUGMENT, {deciding_settings} and the "
        "files. Restore the former samples and order, or go back:\n"
        f"{_command_to_go_back(checkpoint, position, config, world)}"
    )


def _change_of_samples(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Say how the training samples have changed; None if they and their order are the same.

    `saved`, `now`: what `identity_of` returned for the checkpoint and returns now.
    """
    if saved["number"] != now["number"]:
        return f"{saved['number']} then, {now['number']} now"
    # Older checkpoints may have no fingerprint of the data, only the order and the labels.
    if "data" in saved and saved["data"] != now["data"]:
        return f"{now['number']} as before, but with other names or labels, or named in another order"
    if saved["order"] != now["order"]:
        return f"{now['number']} as before, in another order"
    return None


def _check_split(checkpoint: Checkpoint, config: Config) -> None:
    """Raise UserError if a setting has changed that decides which images are split off for validation."""
    for key in keys_of_split(config.DATA):
        before = checkpoint.meta["settings"].get(key, default_of(key))
        now = value_of(config, key)
        if before != now:
            raise UserError(
                f"{checkpoint.folder}: trained with {key} {one_line(before)}; with {one_line(now)} it would be "
                "validated on images that it was trained on. Set it back, or start a new run."
            )


def _command_to_go_back(checkpoint: Checkpoint, position: Position, config: Config, world: World) -> str:
    """Return the command that resumes with this run's batch from the end of an earlier epoch, for an error.

    The last such checkpoint is taken. If none is left, the text says so instead.
    """
    root = checkpoint.folder.parent
    epochs = [epoch for epoch, update in ended_epochs(root).items() if update <= position.update]
    if not epochs:
        return f"  impossible: {root} has no checkpoint of the end of an epoch before; start a new run"
    batch = _batch_flags(checkpoint, config, config.DATA.BATCH_SIZE, global_batch(config, world))
    run = run_folder_of(checkpoint.folder) or root
    last_epoch = max(epochs)
    old_run = shlex.quote(str(run))
    new_run = shlex.quote(f"{run}-from-epoch-{last_epoch}")
    return f"  {start_again(world, f'-resume {old_run} -output {new_run} -last_epoch {last_epoch} {batch}')}"


def _batch_flags(checkpoint: Checkpoint, config: Config, per_process: int, total: int) -> str:
    """Return flags for a global batch of `total` images, `per_process` of them in each process and micro-batch.

    They are added to a command whose settings may accumulate gradients: TRAIN.GLOBAL_BATCH decides then.
    """
    nothing_accumulates = checkpoint.meta["batch"]["accumulated"] == 1 and config.TRAIN.ACCUM_ITER == 1
    if nothing_accumulates and config.TRAIN.GLOBAL_BATCH is None:
        return f"-batch_size {per_process}"
    return f"-batch_size {per_process} TRAIN.GLOBAL_BATCH={total}"
