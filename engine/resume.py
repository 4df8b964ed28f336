"""What a checkpoint carries beside the weights, and putting it back."""

# torch._foreach_* are what torch's own optimisers are made of; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.checkpoint import EMA, MODEL, Checkpoint
from engine.fp32_modules import force_fp32, forced
from engine.overflow import SkipRecord
from engine.update import Parts
from utils.config import Config, differences, load_config
from utils.errors import UserError
from utils.log import log
from utils.run_folder import run_of


@dataclass
class Position:
    """Where a run stands. `epoch` and `step` are those of the next update: epochs from 1, steps (done in it) from 0."""

    epoch: int = 1
    step: int = 0
    update: int = 0


@dataclass
class Best:
    """The best figure so far, which weights gave it, and for how many validations nothing was better."""

    acc1: float = -1.0
    kind: str = "acc1"
    update: int = 0
    epoch: int = 0
    stale: int = 0


def state_of(parts: Parts, position: Position, best: Best, global_batch: int) -> dict[str, Any]:
    """Plain Python types and tensors only, so that it can be read without trusting it."""
    return {
        "optimizer": _plain(parts.optimizer.state_dict()),
        "optimizer_name": type(parts.optimizer).__name__,
        "fp32_modules": forced(parts.model),
        "moved": parts.schedule.moved,
        "scaler": _plain(parts.precision.scaler.state_dict()),
        "skips": asdict(parts.skips),
        "ema_updates": int(parts.ema.updates) if parts.ema else 0,
        "position": asdict(position),
        "best": asdict(best),
        "meters": parts.meters.state(),
        "global_batch": global_batch,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def restore(parts: Parts, checkpoint: Checkpoint, global_batch: int) -> tuple[Position, Best]:
    """Put everything back as it was saved. The settings of the optimiser are those of the present config."""
    state = checkpoint.state()
    load_weights(parts.model, checkpoint.tensors(MODEL), f"{checkpoint.folder / MODEL}")
    _load_optimizer(parts.optimizer, state)
    parts.schedule.restore(state["moved"])
    moved_to_fp32 = [name for name in state["fp32_modules"] if name not in forced(parts.model)]
    if moved_to_fp32 and parts.precision.level in ("O1", "O2"):
        force_fp32(parts.model, moved_to_fp32, parts.precision.device.type)
        log.info("In fp32, as when it was saved: %s", ", ".join(moved_to_fp32))
    if state["scaler"] and parts.precision.scaler.is_enabled():
        parts.precision.scaler.load_state_dict(state["scaler"])
        parts.skips = SkipRecord(**state["skips"])
    if parts.ema is not None:
        if EMA in checkpoint.meta["files"]:
            load_weights(parts.ema.module, checkpoint.tensors(EMA), f"{checkpoint.folder / EMA}")
            parts.ema.updates = state["ema_updates"]
        else:
            load_weights(parts.ema.module, checkpoint.tensors(MODEL), f"{checkpoint.folder / MODEL}")
    position, best = Position(**state["position"]), Best(**state["best"])
    if position.step and state["global_batch"] != global_batch:
        raise UserError(
            f"{checkpoint.folder}: saved in the middle of an epoch with a global batch of {state['global_batch']}, "
            f"and this run's is {global_batch} (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER); make them equal."
        )
    parts.meters.restore(**state["meters"])
    return position, best


def load_weights(model: nn.Module, saved: dict[str, Tensor], where: str) -> None:
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
    model.load_state_dict(saved)


def _differs(own: dict[str, Tensor], saved: dict[str, Tensor], name: str) -> bool:
    return name in saved and saved[name].shape != own[name].shape


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    if state["optimizer_name"] != type(optimizer).__name__:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: the run was trained with {state['optimizer_name']}, now it is "
            f"{type(optimizer).__name__}; keep it, or start a new run by -pretrained."
        )
    now = optimizer.state_dict()
    saved = state["optimizer"]
    sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], now["param_groups"])]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the optimiser's groups hold {sizes[0]} tensors in the checkpoint and {sizes[1]} now; was "
            "TRAIN.WEIGHT_DECAY or TRAIN.WEIGHT_DECAY_ALL changed between zero and not?"
        )
    groups = zip(saved["param_groups"], now["param_groups"], strict=True)
    # Settings are the present ones; what a fresh group lacks is not a setting: LAMB counts its steps there.
    merged = [{**old, **new} for old, new in groups]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": merged})


def finite(tensors: dict[str, Tensor]) -> bool:
    """Whether all weights are numbers; one answer from the device."""
    floats = [t for t in tensors.values() if t.is_floating_point()]
    norms = torch._foreach_norm(floats, float("inf"))
    return bool(torch.isfinite(torch.stack([n.float() for n in norms])).all())


def say_what_changed(checkpoint: Checkpoint, config: Config, parts: Parts, position: Position) -> None:
    """Where the run goes on, what differs from its saved settings, and what that does to the schedule."""
    log.info("Going on from %s: epoch %d, %d updates done.", checkpoint.folder, position.epoch, position.update)
    run = run_of(checkpoint.folder)
    if run is None or not (run / "config.yaml").exists():
        return
    old = load_config(str(run / "config.yaml")).config
    changed = [line for line in differences(old, config) if not line.startswith(("MODEL.RESUME:", "OUTPUT:"))]
    for line in changed:
        log.info("  changed since: %s", line)
    if old.TRAIN.NUM_EPOCHS != config.TRAIN.NUM_EPOCHS:
        log.info(
            "  the schedule now spans %d epochs instead of %d: the next update's learning rate is %.3e",
            config.TRAIN.NUM_EPOCHS,
            old.TRAIN.NUM_EPOCHS,
            parts.schedule.rate_at(parts.schedule.moved),
        )
