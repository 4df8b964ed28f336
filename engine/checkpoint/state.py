"""What a checkpoint carries beside the weights, and putting it back."""

# torch._foreach_* are what torch's own optimisers are made of; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from engine.amp.skip_watch import SkipRecord
from engine.checkpoint.folder import EMA, MODEL, STATE, Checkpoint
from engine.checkpoint.optimizer_state import load_optimizer, trained_weights
from engine.checkpoint.shard_files import OPTIMIZER
from engine.measure.progress import Best, Position
from engine.parallel.fsdp import Sharding, is_dealt, own_part, own_parts
from engine.speed.channels_last import lay_out_alike
from engine.update import Parts
from models import frozen_weights
from utils.config import Config, differences, load_config
from utils.config.keys import OF_ONE_START, settings
from utils.errors import UserError
from utils.log import log
from utils.run_folder import run_folder_of


def _best_of(saved: dict[str, Any]) -> Best:
    if "acc1" in saved:  # as it was called when nothing else could decide
        figure = saved["acc1"]
        saved = {**saved, "figure": figure if figure >= 0 else None}
        del saved["acc1"]
    return Best(**saved)


def tensors_of(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """The weights that are saved, by the file they go to."""
    average = {EMA: parts.ema.module.state_dict()} if parts.ema else {}
    return {MODEL: parts.model.state_dict(), **average}


def state_of(parts: Parts, position: Position, best: Best, global_batch: int, meters: dict[str, Any]) -> dict[str, Any]:
    """Plain Python types and tensors only, so that it can be read without trusting it.

    The tensors are those that training goes on to change: to be copied or written before it does.
    """
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "optimizer_name": type(parts.optimizer).__name__,
        "trained": trained_weights(parts.model, parts.optimizer),
        "fp32_modules": list(parts.moved_to_fp32),
        "moved": parts.schedule.moved,
        "scaler": _plain(parts.precision.scaler.state_dict()),
        "skips": asdict(parts.skips),
        "ema_updates": int(parts.ema.updates) if parts.ema else 0,
        "position": asdict(position),
        "best": asdict(best),
        "meters": meters,
        "global_batch": global_batch,
    }


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


def restore(
    parts: Parts, checkpoint: Checkpoint, global_batch: int, per_epoch: int, average: bool = False
) -> tuple[Position, Best]:
    """Put everything back as it was saved. The settings of the optimiser are those of the present config.

    `average`: go on with the saved average as the weights.
    """
    if average and not checkpoint.has(EMA):
        raise UserError(f"MODEL.RESUME_EMA: {checkpoint.folder} has no {EMA}; the run kept no average. Leave it out.")
    try:
        return _restore(parts, checkpoint, checkpoint.state(), global_batch, per_epoch, EMA if average else MODEL)
    except (KeyError, TypeError) as error:
        raise UserError(f"{checkpoint.folder / STATE}: does not hold what vitamp saves ({error!r}).") from None


def _restore(
    parts: Parts, checkpoint: Checkpoint, state: dict[str, Any], global_batch: int, per_epoch: int, weights: str
) -> tuple[Position, Best]:
    sharding = parts.sharding
    load_weights(parts.model, checkpoint.one_by_one(weights), f"{checkpoint.folder / weights}", sharding)
    if weights == EMA:
        log.info("MODEL.RESUME_EMA: the weights it goes on with are those of the average.")
    moments = checkpoint.one_by_one(OPTIMIZER) if checkpoint.has(OPTIMIZER) else {}
    load_optimizer(parts.model, parts.optimizer, state, moments, sharding)
    lay_out_alike(parts.optimizer)
    if state["fp32_modules"] and sharding is not None and parts.precision.level == "O2":
        raise UserError(
            f"{checkpoint.folder}: AMP.AUTO_FP32 had moved modules to fp32, which DIST.STRATEGY fsdp cannot do to "
            f"weights that are dealt out; set AMP.FP32_MODULES to {state['fp32_modules']}."
        )
    if state["fp32_modules"] and parts.precision.level in ("O1", "O2"):
        parts.force_fp32(state["fp32_modules"])
        log.info("In fp32, as AMP.AUTO_FP32 had moved them: %s", ", ".join(state["fp32_modules"]))
    if state["scaler"] and parts.precision.scaler.is_enabled():
        parts.precision.scaler.load_state_dict(state["scaler"])
        parts.skips = SkipRecord(**state["skips"])
    if parts.ema is not None:
        name = EMA if checkpoint.has(EMA) else MODEL
        load_weights(parts.ema.module, checkpoint.one_by_one(name), f"{checkpoint.folder / name}", sharding)
        if name == EMA:
            parts.ema.updates = state["ema_updates"]
        else:
            log.info("The EMA starts from the checkpoint's weights: it holds no EMA.")
    position = Position(**{"validated": state["position"]["update"], **state["position"]})
    best = _best_of(state["best"])
    if position.step and state["global_batch"] != global_batch:
        raise UserError(
            f"{checkpoint.folder}: saved in the middle of an epoch with a global batch of {state['global_batch']}, "
            f"and this run's is {global_batch} (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER); make them equal."
        )
    parts.schedule.restore(_place_on_schedule(state["moved"], _updates_of_an_epoch(checkpoint, position), per_epoch))
    parts.meters.restore(**state["meters"])
    return position, best


def check_samples(checkpoint: Checkpoint, position: Position, now: dict[str, Any]) -> None:
    """What is left of an epoch is known for the samples and the order that it began with. `now`: identity_of these."""
    saved = checkpoint.meta.get("samples") or now  # older checkpoints do not say
    if saved["order"] == now["order"]:
        return
    if not 0 < position.step < saved["updates"]:
        log.warning(
            "The training samples are not those of before, or in another order: %d now, %d when this was saved.",
            now["number"],
            saved["number"],
        )
        return
    raise UserError(
        f"{checkpoint.folder}: saved in the middle of epoch {position.epoch}, whose {saved['number']} training samples "
        f"are not the {now['number']} of now, or stand in another order (SEED, DATA.EXCLUDE, DATA.VAL_FRACTION, the "
        "files themselves). Go on with those it had, or go back to the end of an epoch that was saved, by -last_epoch."
    )


def _updates_of_an_epoch(checkpoint: Checkpoint, position: Position) -> int | None:
    """How many an epoch had when this was saved. Old checkpoints do not say, and only count."""
    if samples := checkpoint.meta.get("samples"):
        return int(samples["updates"])
    epochs = position.epoch - 1
    return position.update // epochs if epochs and not position.step else None


def _place_on_schedule(moved: int, before: int | None, now: int) -> int:
    """The updates that the schedule counts as done: as many epochs of it as before, however long an epoch is now."""
    if before is None or before == now:
        return moved
    log.warning(
        "An epoch has %d updates now and had %d when this was saved. The learning rate follows the epochs; updates are "
        "counted on. The run will not be the one it would have been.",
        now,
        before,
    )
    return round(moved * now / before)


def load_weights(model: nn.Module, saved: Mapping[str, Tensor], where: str, sharding: Sharding | None = None) -> None:
    """Load weights that must fit exactly; otherwise say which tensors differ."""
    own = model.state_dict()
    lines = [f"{n}: {tuple(saved[n].shape)} there, {tuple(own[n].shape)} here" for n in own if _differs(own, saved, n)]
    lines += [f"{name}: not there" for name in own if name not in saved]
    lines += [f"{name}: only there" for name in saved if name not in own]
    if lines:
        more = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise UserError(
            f"{where}: weights of another architecture. Start from them by -pretrained, or use the config they were "
            "trained with. Tensors that differ:\n  " + "\n  ".join(lines[:10]) + more
        )
    if sharding is None:
        model.load_state_dict(saved)
        return
    for name, value in own.items():
        own_part(value).copy_(sharding.rows(saved[name]) if is_dealt(value) else saved[name])


def _differs(own: dict[str, Tensor], saved: Mapping[str, Tensor], name: str) -> bool:
    return name in saved and saved[name].shape != own[name].shape


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all weights are numbers; one answer from the device."""
    floats = [t for t in own_parts(tensors).values() if t.is_floating_point() and t.numel()]
    # The Euclidean norm takes a tenth of the time of the largest absolute value, but can overflow where that cannot.
    return _all_finite(floats, 2.0) or _all_finite(floats, float("inf"))


def finite_everywhere(parts: Parts) -> bool:
    """The same of the model's, on all ranks alike. A collective call where its weights are dealt out."""
    good = finite(parts.model.state_dict())
    return good if parts.sharding is None else parts.sharding.agree(good)


def _all_finite(tensors: list[Tensor], order: float) -> bool:
    norms = torch._foreach_norm(tensors, order)
    return bool(torch.isfinite(torch.stack([n.float() for n in norms])).all())


def _say_what_is_trained(checkpoint: Checkpoint, parts: Parts) -> None:
    now, before = set(frozen_weights(parts.model)), set(checkpoint.meta.get("frozen", ()))
    for names, what in ((now - before, "frozen from here on"), (before - now, "trained from here on")):
        if names:
            shown = ", ".join(name for name, _ in parts.model.named_parameters() if name in names)
            log.info("  %s (MODEL.FREEZE): %d tensors: %s", what, len(names), textwrap.shorten(shown, 200))


def say_what_changed(checkpoint: Checkpoint, config: Config, parts: Parts, position: Position) -> None:
    """Where the run goes on and at which rate, and what differs from the settings that the checkpoint was made with."""
    rate = f"; the next update's learning rate is {parts.schedule.rate_at(parts.schedule.moved):.3e}"
    log.info(
        "Going on from %s: epoch %d, %d updates done%s.",
        checkpoint.folder,
        position.epoch,
        position.update,
        rate if position.epoch <= config.TRAIN.NUM_EPOCHS else "",
    )
    _say_what_is_trained(checkpoint, parts)
    try:
        old = _settings_then(checkpoint)
    except UserError as error:
        log.warning("The settings saved with it cannot be compared: %s", error)
        return
    if old is None:
        return
    for line in differences(old, config):
        if line.partition(":")[0] not in OF_ONE_START:
            log.info("  changed since: %s", line)
    if old.TRAIN.NUM_EPOCHS != config.TRAIN.NUM_EPOCHS:
        epochs = config.TRAIN.NUM_EPOCHS, old.TRAIN.NUM_EPOCHS
        log.info("  the schedule now spans %d epochs instead of %d", *epochs)


def _settings_then(checkpoint: Checkpoint) -> Config | None:
    """The checkpoint's own: config.yaml may be of a resume that was killed before it saved anything."""
    if kept := checkpoint.meta.get("settings"):
        known = {key: (value, str(checkpoint.folder)) for key, value in kept.items() if key in settings()}
        return load_config(None, known).config
    run = run_folder_of(checkpoint.folder)  # checkpoints of older versions have none
    return load_config(str(run / "config.yaml")).config if run and (run / "config.yaml").exists() else None
