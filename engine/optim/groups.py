"""Which parameters an optimiser updates in which way, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.amp.precision import dtype_name
from engine.optim.layer_rates import SCALE
from utils.text import counted

USES_MUON = "use_muon"
"""Key of a group of Muon and its relatives, as timm reads it: false if AdamW updates the group's parameters."""


def describe_muon(optimizer: Optimizer, rate: float) -> str:
    """Parameters that Muon and that AdamW updates, for the banner; empty for other optimisers."""
    muon = [group for group in optimizer.param_groups if group.get(USES_MUON)]
    if not muon:
        return ""
    others = [group for group in optimizer.param_groups if not group[USES_MUON]]
    dtype = getattr(optimizer, "dtype", torch.bfloat16)  # timm's relatives of Muon have no other
    text = f"Muon {_size(muon)}, {muon[0]['ns_steps']} Newton-Schulz steps in {dtype_name(dtype)}"
    if not others:
        return text
    ends = [f"{rate * end(group.get(SCALE, 1.0) for group in others):.3g}" for end in (min, max)]
    return f"{text}; AdamW {_size(others)}, learning rate {' to '.join(dict.fromkeys(ends))}"


def list_groups(model: nn.Module, optimizer: Optimizer) -> str:
    """Each group of the optimiser with the names of its parameters (TRAIN.OPTIMIZER.LIST)."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    lines = ["Parameters by group of the optimiser (TRAIN.OPTIMIZER.LIST):"]
    for group in optimizer.param_groups:
        lines.append(
            f"  {_updated_by(group, optimizer)}, weight decay {group['weight_decay']:g}, learning rate x "
            f"{group.get(SCALE, 1.0):g}: {_size([group])}"
        )
        lines += [f"    {names[id(weight)]} {_shape(weight)}" for weight in group["params"]]
    return "\n".join(lines)


def _updated_by(group: dict[str, Any], optimizer: Optimizer) -> str:
    if USES_MUON not in group:
        return type(optimizer).__name__
    if not group[USES_MUON]:
        return "AdamW"
    number = group["matrices"]
    return "Muon" if number == 1 else f"Muon (each tensor split into {number} matrices)"


def _shape(weight: torch.Tensor) -> str:
    return " x ".join(str(size) for size in weight.shape) or "scalar"


def _size(groups: Sequence[dict[str, Any]]) -> str:
    weights = [weight for group in groups for weight in group["params"]]
    return f"{counted(len(weights), 'tensor')} ({sum(w.numel() for w in weights):,} parameters)"
