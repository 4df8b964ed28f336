"""Which layers get the adapters of MODEL.LORA, what these weights are called, and whether the model uses them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from models.freeze import is_inside
from utils.config.model import LORA_TARGETS, LoraConfig
from utils.errors import UserError, either
from vitamp.tensors import is_adapter, parts_of


def layers_to_adapt(model: nn.Module, lora: LoraConfig, heads: Iterable[str]) -> dict[str, nn.Linear]:
    """The layers of the targets by name; UserError for a target without a layer, and for a rank that is too large."""
    modules, kind, heads = dict(model.named_modules()), type(model).__name__, tuple(heads)
    linear = {
        name: module
        for name, module in modules.items()
        if type(module) is nn.Linear and not is_inside(name, heads) and _has_parts(name, module, modules)
    }
    there = {part for name in linear for part in parts_of(name)}
    for target in lora.TARGETS:
        if target not in there:
            known = [one for one in LORA_TARGETS if one in there]
            instead = f"it has {' and '.join(known)}" if known else "LoRA is for transformers, such as a ViT or Swin"
            raise UserError(f"MODEL.LORA.TARGETS {target}: {kind} has no such linear layer; {instead}.")
    chosen = {name: layer for name, layer in linear.items() if set(parts_of(name)) & set(lora.TARGETS)}
    for name, layer in chosen.items():
        rows, columns = layer.out_features // len(parts_of(name)), layer.in_features
        if lora.RANK is not None and min(rows, columns) <= lora.RANK:
            raise UserError(
                f"MODEL.LORA.RANK {lora.RANK}: must be below {min(rows, columns)}, because the matrices in {name} have "
                f"{rows} x {columns} weights; 4 to 16 are common."
            )
    return chosen


def _has_parts(name: str, layer: nn.Linear, modules: dict[str, nn.Module]) -> bool:
    """Whether its rows are what its name says. With `head_first`, timm keeps q, k and v of each head together."""
    parts = len(parts_of(name))
    by_head = getattr(modules[name.rpartition(".")[0]], "head_first", False)
    return parts == 1 or (layer.out_features % parts == 0 and not by_head)


def require_calls(model: nn.Module, lora: LoraConfig, channels: int, image_size: int) -> None:
    """Raise UserError unless `model`, on the meta device, calls all layers that have adapters.

    Some of timm's attention layers, such as BEiT's, compute with the weight of qkv themselves.
    """
    silent = {name.rpartition(".")[0]: None for name, _ in model.named_parameters() if is_adapter(name)}

    def called(name: str, *_: Any) -> None:
        silent.pop(name, None)

    for name in list(silent):
        model.get_submodule(name).register_forward_pre_hook(partial(called, name))
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, channels, image_size, image_size, device="meta"))
    except NotImplementedError:
        pass  # an operation that depends on values: the layers after it count as not called
    if silent:
        name = next(iter(silent))
        targets = [part for part in parts_of(name) if part in lora.TARGETS]
        raise UserError(
            f"MODEL.LORA.TARGETS {', '.join(targets)}: {type(model).__name__} does not call its layer {name}, but "
            f"computes with its weight, so adapters there would have no effect. Leave out {either(targets)}; "
            "[proj, fc1, fc2] may be possible."
        )
