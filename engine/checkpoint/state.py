"""Training state of a checkpoint: collecting it, and restoring it."""

# torch's own optimisers are built on torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.folder import open_tensors, read_state
from engine.checkpoint.optimizer_state import load_optimizer, trained_weights
from engine.checkpoint.saver import Snapshot
from engine.checkpoint.shard_files import OPTIMIZER, into_shards
from engine.measure.progress import Best, Position
from engine.parallel.fsdp import Sharding, is_sharded, local_shard, local_shards
from engine.update import Parts
from models import frozen_weights
from utils.config import Config, differences, load_config
from utils.config.keys import OF_ONE_START, settings
from utils.config.resumed import read_saved
from utils.distributed.world import sum_over_ranks
from utils.errors import UserError
from utils.log import log
from utils.record.checkpoints import STATE, Checkpoint
from utils.record.weight_sets import PLAIN, WeightSet
from utils.text import counted


def tensors_of(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Weights to save, by the file that they are written to."""
    return {which.file: module.state_dict() for which, module in parts.weights.items()}


def state_of(parts: Parts, position: Position, best: Best, global_batch: int, meters: dict[str, Any]) -> dict[str, Any]:
    """Training state, of plain Python types and tensors only, so that it can be read safely from any source.

    Training goes on to change its tensors: copy or write them before it does.
    """
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "optimizer_name": type(parts.optimizer).__name__,
        "trained": trained_weights(parts.model, parts.optimizer),
        "fp32_modules": list(parts.moved_to_fp32),
        "moved": parts.schedule.moved,
        "scaler": _plain(parts.precision.scaler.state_dict()),
        "position": asdict(position),
        "best": asdict(best),
        "meters": meters,
        "global_batch": global_batch,
        **{key: value for ability in parts.abilities for key, value in ability.state().items()},
    }


def snapshot_of(
    parts: Parts, position: Position, best: Best, global_batch: int, meters: dict[str, Any], meta: dict[str, Any]
) -> Snapshot:
    """All that this rank saves. Training goes on to change its tensors."""
    tensors, state = tensors_of(parts), state_of(parts, position, best, global_batch, meters)
    if parts.sharding is not None:
        tensors, state = into_shards(tensors, state, parts.sharding)
    return Snapshot(tensors, state, meta, best.update if best.figure is not None else None)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else str(value)


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
    load_weights(parts.model, open_tensors(checkpoint, start.file), f"{checkpoint.folder / start.file}", sharding)
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
        load_weights(module, open_tensors(checkpoint, name), f"{checkpoint.folder / name}", sharding)
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


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all weights are finite. Waits for the device once."""
    floats = [t for t in local_shards(tensors).values() if t.is_floating_point() and t.numel()]
    # The Euclidean norm takes a tenth of the time of the maximum norm, but may overflow where that one does not.
    return _all_finite(floats, 2.0) or _all_finite(floats, float("inf"))


def finite_everywhere(parts: Parts) -> bool:
    """Whether all weights that a checkpoint would hold are finite. A collective call: the ranks agree.

    Of unsharded tensors, rank 0's are saved. The others' may differ: batch norm's statistics of their own images do.
    """
    tensors = parts.model.state_dict()
    saved = {name: tensor for name, tensor in tensors.items() if parts.world.first or is_sharded(tensor)}
    bad = torch.tensor(int(not finite(saved)), device=parts.precision.device)
    return not bool(sum_over_ranks(bad, parts.world))


def _all_finite(tensors: list[Tensor], order: float) -> bool:
    norms = torch._foreach_norm(tensors, order) if tensors else [torch.zeros(())]
    return bool(torch.isfinite(torch.stack([n.float() for n in norms])).all())


def _log_frozen_changes(checkpoint: Checkpoint, parts: Parts) -> None:
    now, before = set(frozen_weights(parts.model)), set(checkpoint.meta.get("frozen", ()))
    for names, what in ((now - before, "frozen from now on"), (before - now, "trained from now on")):
        if names:
            shown = ", ".join(name for name, _ in parts.model.named_parameters() if name in names)
            log.info("  %s (MODEL.FREEZE): %s: %s", what, counted(len(names), "tensor"), textwrap.shorten(shown, 200))


def log_resumption(checkpoint: Checkpoint, config: Config, parts: Parts, position: Position) -> None:
    """Log where the run resumes and at which learning rate, and how the settings differ from the checkpoint's."""
    rate = f"; the next update's learning rate is {parts.schedule.rate_at(parts.schedule.moved):.3e}"
    log.info(
        "Resuming from %s: epoch %d, %s done%s.",
        checkpoint.folder,
        position.epoch,
        counted(position.update, "update"),
        rate if position.epoch <= config.TRAIN.NUM_EPOCHS else "",
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
