"""Restoring an optimiser's state by the names of its weights, even if other weights are trained now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.checkpoint.shard_files import add_moments, shard_state
from utils.errors import UserError

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding

GROUPS = "param_groups"


def trained_weights(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the trained weights, in the order in which the optimiser numbers them."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    moments: Mapping[str, Tensor],
    sharding: Sharding | None,
) -> None:
    """Load the saved `state` into `optimizer`. `moments`: the part of it that is in a checkpoint's shards."""
    if state["optimizer_name"] != type(optimizer).__name__:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: the run was trained with {state['optimizer_name']}, but the optimiser "
            f"is {type(optimizer).__name__} now. Set the name back, or start a new run with -pretrained."
        )
    saved, now = state["optimizer"], optimizer.state_dict()
    add_moments(saved, moments)
    before, names = state["trained"], trained_weights(model, optimizer)
    sizes = [[len(group["params"]) for group in groups] for groups in (saved[GROUPS], now[GROUPS])]
    if before != names or sizes[0] != sizes[1]:
        saved = _regrouped(saved, before, now, names)
    if sharding is not None:
        shard_state(saved, [weight for group in optimizer.param_groups for weight in group["params"]], sharding)
    # Settings are those of now. A key that a new group lacks is no setting: LAMB counts its steps there.
    groups = [{**old, **new} for old, new in zip(saved[GROUPS], now[GROUPS], strict=True)]
    optimizer.load_state_dict({"state": saved["state"], GROUPS: groups})
    _match_memory_format(optimizer)


def _match_memory_format(optimizer: Optimizer) -> None:
    """Bring state from a file into the memory format of its weights, as fused kernels need."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _regrouped(saved: dict[str, Any], before: list[str], now: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Saved state, renumbered for the weights and groups of now. Newly trained weights start with a new state."""
    states = {before[number]: values for number, values in saved["state"].items()}
    fresh = {names[number]: values for number, values in now["state"].items()}
    numbered = {
        number: states.get(name, fresh.get(name))
        for number, name in enumerate(names)
        if name in states or name in fresh
    }
    return {"state": numbered, GROUPS: [{**saved[GROUPS][0], **group} for group in now[GROUPS]]}
