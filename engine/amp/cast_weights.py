"""The weights that autocast casts to half precision whenever they are used."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from engine.amp.fp32_modules import forced_modules
from engine.amp.op_lists import operators_named
from models import is_inside

OPERATORS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("linear",),
    nn.Conv1d: ("conv1d",),
    nn.Conv2d: ("conv2d",),
    nn.Conv3d: ("conv3d",),
}
"""Layers, and the only operators that use their weights. Subclasses may use them otherwise: to standardise them, say.

A class of our own says so in its attribute `autocast_operators`.
"""


def cast_weights(model: nn.Module, black_list: Iterable[str]) -> list[nn.Parameter]:
    """The weights of `model` that autocast always casts. `black_list`: AMP.CUSTOM_BLACK_LIST."""
    forced, in_fp32 = forced_modules(model), set(operators_named(black_list))
    cast: list[nn.Parameter] = []
    used_otherwise: set[int] = set()
    for name, module in model.named_modules():
        operators = getattr(module, "autocast_operators", OPERATORS_OF.get(type(module)))
        casts = operators and in_fp32.isdisjoint(operators) and not is_inside(name, forced)
        for own, weight in module.named_parameters(recurse=False):
            if casts and own in ("weight", "bias"):  # weight_norm and its like compute the weight from others
                cast.append(weight)
            else:
                used_otherwise.add(id(weight))
    return [weight for weight in cast if id(weight) not in used_otherwise]
