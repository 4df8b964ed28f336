"""Which parameters Muon updates and which AdamW, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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


def _size(groups: Sequence[dict[str, Any]]) -> str:
    weights = [weight for group in groups for weight in group["params"]]
    return f"{counted(len(weights), 'tensor')} ({sum(w.numel() for w in weights):,} parameters)"
