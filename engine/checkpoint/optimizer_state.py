"""What an optimiser remembers of each weight, put back: by the weights' names, whichever of them are trained now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from engine.checkpoint.shard_files import put_in
from engine.parallel.fsdp import Sharding
from utils.errors import UserError

GROUPS = "param_groups"


def trained_weights(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names, in the order in which the optimiser numbers them."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    moments: Mapping[str, Tensor],
    sharding: Sharding | None,
) -> None:
    """`moments`: what the shards of a checkpoint hold beside `state`."""
    if state["optimizer_name"] != type(optimizer).__name__:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: the run was trained with {state['optimizer_name']}, now it is "
            f"{type(optimizer).__name__}; keep it, or start a new run by -pretrained."
        )
    saved, now = state["optimizer"], optimizer.state_dict()
    put_in(saved, moments, [], None)
    before, names = state.get("trained"), trained_weights(model, optimizer)
    if before is not None and before != names:
        saved = _as_grouped_now(saved, before, now, names)
    sizes = [[len(group["params"]) for group in groups] for groups in (saved[GROUPS], now[GROUPS])]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the optimiser's groups hold {sizes[0]} tensors in the checkpoint and {sizes[1]} now; was "
            "TRAIN.WEIGHT_DECAY or TRAIN.WEIGHT_DECAY_ALL changed between zero and not?"
        )
    put_in(saved, {}, [weight for group in optimizer.param_groups for weight in group["params"]], sharding)
    # Settings are the present ones; what a fresh group lacks is not a setting: LAMB counts its steps there.
    groups = [{**old, **new} for old, new in zip(saved[GROUPS], now[GROUPS], strict=True)]
    optimizer.load_state_dict({"state": saved["state"], GROUPS: groups})


def _as_grouped_now(saved: dict[str, Any], before: list[str], now: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The saved state as if these weights, in these groups, had been trained then. New ones begin as fresh."""
    states = {before[number]: values for number, values in saved["state"].items()}
    fresh = {names[number]: values for number, values in now["state"].items()}
    numbered = {
        number: states.get(name, fresh.get(name))
        for number, name in enumerate(names)
        if name in states or name in fresh
    }
    return {"state": numbered, GROUPS: [{**saved[GROUPS][0], **group} for group in now[GROUPS]]}
