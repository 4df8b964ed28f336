"""DROPOUT, ATTENTION_DROPOUT, DROPPATH and INIT_VALUES as arguments of timm's models."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from utils.config.model import ModelConfig

LAYER_SCALE = ("init_values", "ls_init_value", "eta")
"""Names of the initial value of layer scale in timm's models"""


def rate_arguments(model: ModelConfig, module: nn.Module) -> tuple[dict[str, float], list[str]]:
    """timm's arguments for the rates and the layer scale, and problems with those that this model does not have."""
    defaults = _arguments(type(module))
    # DROPOUT means dropout inside the blocks; models without it (ResNet) have dropout in the head alone.
    inside = [name for name in ("pos_drop_rate", "proj_drop_rate") if name in defaults]
    wanted = {
        "DROPOUT": (model.DROPOUT, inside or ["drop_rate"]),
        "ATTENTION_DROPOUT": (model.ATTENTION_DROPOUT, ["attn_drop_rate"]),
        "DROPPATH": (model.DROPPATH, ["drop_path_rate"]),
    }
    arguments: dict[str, float] = {}
    problems = []
    for key, (rate, names) in wanted.items():
        known = [name for name in names if name in defaults]
        if rate and not known:
            problems.append(f"MODEL.{key} {rate}: {type(module).__name__} has no such rate; set the key to 0")
        # A rate of 0 is passed only if timm's default is not 0, as for Swin's drop path: 0 in the YAML means 0.
        arguments |= {name: rate for name in known if rate or defaults[name]}
    if model.INIT_VALUES is not None:
        known = [name for name in LAYER_SCALE if name in defaults]
        arguments |= dict.fromkeys(known, model.INIT_VALUES)
        if not known:
            problems.append(
                f"MODEL.INIT_VALUES {model.INIT_VALUES:g}: {type(module).__name__} takes no initial value of layer "
                "scale; leave the key out"
            )
    return arguments, problems


def _arguments(kind: type) -> dict[str, Any]:
    """Arguments of a class's constructor with their defaults, including those passed on to its base classes."""
    defaults: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            defaults.setdefault(name, parameter.default)
    return defaults
