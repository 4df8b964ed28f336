"""Models that the user's own files register: timm offers them under their names, so all rooms find them."""

from __future__ import annotations

from typing import Any

import timm
from timm.models import register_model
from torch import nn

from utils.errors import UserError
from utils.own.execute import own_lines
from utils.own.registry import KINDS, Own, names_of, registered

CLASSES = 1000
"""Where none are asked for, as of most of timm's models"""
_offered: set[str] = set()


def offer_models() -> None:
    for name in names_of("model"):
        if name not in _offered:
            _offer(registered[name])


def values_of(name: str) -> dict[str, Any]:
    """The settings of its own of a model; none of timm's models has any."""
    return registered[name].values if name in _offered else {}


def _offer(own: Own) -> None:
    if timm.is_model(own.name) and timm.model_entrypoint(own.name).__module__ != __name__:
        raise UserError(f"-use {own.file}: timm has a model {own.name} already; rename yours.")

    def build(pretrained: bool = False, **given: Any) -> nn.Module:  # noqa: ARG001 - timm passes it
        taken = {name: value for name, value in given.items() if value is not None and _is_taken(own, name)}
        try:
            module = own.call(**{"num_classes": CLASSES, **taken, **own.values})
        except Exception as error:
            raise UserError(own_lines(error) or f"model {own.name}: {error}") from None
        if not isinstance(module, nn.Module):
            raise UserError(f"-use {own.file}: model {own.name} returned {type(module).__name__}, not an nn.Module.")
        if own.takes("img_size") and not getattr(module, "pretrained_cfg", None):
            # What timm says of models that are built for one size: the program then passes it.
            vars(module)["pretrained_cfg"] = {"fixed_input_size": True}
        return module

    build.__name__ = own.name
    register_model(build)
    _offered.add(own.name)


def _is_taken(own: Own, name: str) -> bool:
    """Arguments of timm's own that this model lacks are left out; a size that was asked for is not."""
    return own.takes(name) or name not in (
        *KINDS["model"].named,
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "cache_dir",
    )
