"""Restoring the training state of a checkpoint."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engine.checkpoint.folder import open_tensors, read_state
from engine.checkpoint.optimizer_state import load_optimizer
from engine.checkpoint.shard_files import OPTIMIZER
from engine.measure.progress import Best, Position
from engine.parallel.shards import is_sharded, local_shard
from engine.update import Parts
from models import base_weights, frozen_weights
from utils.config import Config, differences, load_config
from utils.config.keys import OF_ONE_START, settings
from utils.config.resumed import read_saved
from utils.errors import UserError
from utils.log import log
from utils.record.base import LORA
from utils.record.checkpoints import STATE, Checkpoint
from utils.record.weight_sets import PLAIN, WeightSet
from utils.terminal import IN_FULL
from utils.text import counted

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding


def restore(parts: Parts, checkpoint: Checkpoint, per_epoch: int, which: WeightSet = PLAIN) -> tuple[Position, Best]:
    """Restore all of the training state but the optimiser's settings, which come from the config.

    `which`: the saved weights that the model resumes with (MODEL.RESUME_EMA).
    """
    if which != PLAIN and not checkpoint.has(which.file):
        raise UserError(
            f"MODEL.RESUME_EMA: {checkpoint.folder} has no {which.file}; the run had no {which.label}. "
            "Leave the setting out."
        )
    try:
        return _restore(parts, checkpoint, read_state(checkpoint), per_epoch, which)
    except (KeyError, TypeError) as error:
        raise UserError(f"{checkpoint.folder / STATE}: not a state that vitamp saved ({error!r}).") from None


def _restore(
    parts: Parts, checkpoint: Checkpoint, state: dict[str, Any], per_epoch: int, start: WeightSet
) -> tuple[Position, Best]:
    sharding = parts.sharding
    merged = not base_weights(parts.model)  # adapters are merged if all weights are trained from now on
    saved = open_tensors(checkpoint, start.file, merged)
    load_weights(parts.model, saved, f"{checkpoint.folder / start.file}", sharding)
    if start != PLAIN:
        log.info("MODEL.RESUME_EMA: the model resumes from the %s weights.", start.label)
    moments = open_tensors(checkpoint, OPTIMIZER) if checkpoint.has(OPTIMIZER) else {}
    load_optimizer(parts.model, parts.optimizer, state, moments, sharding)
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
            log.info("The %s starts from the checkpoint's weights, since the checkpoint has no %s.", *[which.label] * 2)
    for ability in parts.abilities:
        ability.restore(state)
    parts.schedule.restore(_place_on_schedule(state["moved"], checkpoint.meta["samples"]["updates"], per_epoch))
    parts.meters.restore(**state["meters"])
    return Position(**state["position"]), Best(**state["best"])


def _place_on_schedule(moved: int, before: int, now: int) -> int:
    """Updates that the schedule counts as done: as many epochs as before, with the epoch's length of now."""
    if before == now:
        return moved
    log.warning(
        "An epoch has %s now, but had %d in the checkpoint. The learning-rate schedule resumes at the same "
        "epoch, and the update number continues from the checkpoint's. The result will differ from that of an "
        "uninterrupted run.",
        counted(now, "update"),
        before,
    )
    return round(moved * now / before)


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


def _log_frozen_changes(checkpoint: Checkpoint, parts: Parts) -> None:
    now, before = set(frozen_weights(parts.model)), set(checkpoint.meta.get("frozen", ()))
    setting = "MODEL.LORA" if checkpoint.meta.get(LORA) else "MODEL.FREEZE"
    for names, what in ((now - before, "frozen from now on"), (before - now, "trained from now on")):
        if names:
            shown = ", ".join(name for name, _ in parts.model.named_parameters() if name in names)
            log.info("  %s (%s): %s: %s", what, setting, counted(len(names), "tensor"), textwrap.shorten(shown, 200))


def log_resumption(checkpoint: Checkpoint, config: Config, parts: Parts, position: Position) -> None:
    """Log where the run resumes and at which learning rate, and how the settings differ from the checkpoint's."""
    rate = f"; the next update's learning rate is {parts.schedule.rate_at(parts.schedule.moved):.3e}"
    log.info(
        "Resuming from %s: epoch %d, %s done%s.",
        checkpoint.folder,
        position.epoch,
        counted(position.update, "update"),
        rate if position.epoch <= config.TRAIN.NUM_EPOCHS else "",
        extra=IN_FULL,
    )
    _log_frozen_changes(checkpoint, parts)
    try:
        old = _saved_settings(checkpoint)
    except UserError as error:
        log.warning("The checkpoint's settings cannot be compared with the current ones: %s", error)
        return
    for line in differences(old, config):
        if line.partition(":")[0] not in OF_ONE_START:
            log.info("  changed since: %s", line)
    if old.TRAIN.NUM_EPOCHS != config.TRAIN.NUM_EPOCHS:
        now = counted(config.TRAIN.NUM_EPOCHS, "epoch")
        log.info("  the schedule now spans %s instead of %d", now, old.TRAIN.NUM_EPOCHS)


def _saved_settings(checkpoint: Checkpoint) -> Config:
    """Settings in the checkpoint itself: config.yaml may be from a resumed run that was killed before it saved."""
    folder, saved = str(checkpoint.folder), checkpoint.meta["settings"]
    own = {key: (value, folder) for key, value in read_saved(saved, folder).items() if key in settings()}
    return load_config(None, own).config
