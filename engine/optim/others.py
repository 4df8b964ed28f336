"""Optimisers beside Adam, AdamW and Muon, and learning rates by layer: imported only where a run asks for them."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.parallel.shards import is_sharded
from models.parts import frozen_weights
from utils.config.schema import Config
from utils.config.train import TrainConfig
from utils.errors import UserError, nearest
from utils.log import log

# Used where neither the settings nor the optimiser have a default, as with torch's SGD. It is timm's default too.
DEFAULT_MOMENTUM = 0.9


def check_name(wanted: str, name: str) -> None:
    """Raise UserError unless timm has an optimiser `wanted`, which TRAIN.OPTIMIZER.NAME calls `name`."""
    from timm.optim._optim_factory import get_optimizer_info, list_optimizers

    known = [str(known_name) for known_name in list_optimizers()]
    if wanted not in known:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: {name!r} is not an optimiser that vitamp supports.{nearest(wanted, known)} "
            f"{len(known)} are known, such as AdamW, Adam, SGD, LAMB and Lion (timm.optim.list_optimizers())."
        )
    if get_optimizer_info(wanted).second_order:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: {name} needs second derivatives, which training here does not compute; "
            "use an optimiser that works without them, such as AdamW, LAMB or Lion."
        )


def build_other(name: str, groups: list[dict[str, Any]], train: TrainConfig, base_lr: float, fused: bool) -> Optimizer:
    """torch's SGD, or one of timm's optimisers."""
    settings, momentum = train.OPTIMIZER, train.OPTIMIZER.MOMENTUM
    if name in ("momentum", "nesterov"):
        momentum = DEFAULT_MOMENTUM if momentum is None else momentum
        # torch's fused kernel does not support sharded weights.
        fused = fused and not any(is_sharded(weight) for group in groups for weight in group["params"])
        sgd = torch.optim.SGD(groups, base_lr, momentum, nesterov=name == "nesterov", fused=fused or None)
        if fused and momentum:
            # Zero gives the same first step as none. torch's fused SGD allocates momentum in the first step, and leaves
            # it uninitialised if that step is skipped for an overflow; the next step would then add arbitrary numbers.
            for weight in (weight for group in sgd.param_groups for weight in group["params"]):
                sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        return sgd
    # The registry imports sixty optimisers, and torch's compiler with them.
    from timm.optim._optim_factory import create_optimizer_v2, default_registry, get_optimizer_info

    info = get_optimizer_info(name)
    parameters = signature(default_registry.get_optimizer_class(info, bind_defaults=False)).parameters
    if momentum is None:
        momentum = (parameters["momentum"].default if "momentum" in parameters else None) or DEFAULT_MOMENTUM
    options = settings.arguments()  # the factory drops those that the optimiser does not take
    for key, taken in {"EPS": info.has_eps, "BETAS": info.has_betas, "MOMENTUM": info.has_momentum}.items():
        if not taken and getattr(settings, key) is not None:
            log.info("TRAIN.OPTIMIZER.%s has no effect with TRAIN.OPTIMIZER.NAME %s", key, settings.NAME)
    if "max_grad_norm" in parameters:  # LAMB's own clipping, at 1 if not set; not None, which apex's LAMB cannot take
        options["max_grad_norm"] = math.inf
    if info.has_betas and settings.BETAS is not None and info.num_betas != len(settings.BETAS):
        log.info("TRAIN.OPTIMIZER.BETAS has no effect: %s takes %d betas; its defaults are used.", name, info.num_betas)
        del options["betas"]
    return create_optimizer_v2(groups, name, base_lr, 0.0, momentum, **options)


def rate_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """TRAIN.LAYER_DECAY: factors of the learning rate by weight name."""
    from timm.models import group_parameters
    from timm.optim._param_groups import auto_group_layers

    matcher: Any = getattr(model, "group_matcher", None)
    # Number of each weight's layer, from the input on
    layers: Any = auto_group_layers(model) if matcher is None else group_parameters(model, matcher(), reverse=True)
    last = max(layers.values())
    return {name: decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


def describe_fine_tuning(config: Config, model: nn.Module, optimizer: Optimizer, rate: float) -> str:
    """Frozen weights, adapters and learning rates by layer, for the banner. `rate`: the unscaled learning rate."""
    train, frozen = config.TRAIN, frozen_weights(model)
    parts = []
    if config.MODEL.LORA.RANK is not None:
        from models.lora import describe_lora

        parts.append(describe_lora(model, config.MODEL.LORA))
    elif frozen:
        by = f" ({', '.join(config.MODEL.FREEZE)})" if config.MODEL.FREEZE else ""
        parts.append(f"{len(frozen)} of {len(list(model.parameters()))} tensors frozen{by}")
    scales = [group["lr_scale"] for group in optimizer.param_groups if "lr_scale" in group]
    if scales and train.LAYER_DECAY is not None:
        least, most = f"{rate * min(scales):.3g}", f"{rate * max(scales):.3g}"
        rates = f"learning rate {most}" if least == most else f"learning rates from {least} to {most}"
        parts.append(f"{rates} (layer decay {train.LAYER_DECAY:g})")
    return "; ".join(parts)
