"""Builds timm's optimisers, and learning rates by layer as timm groups the weights.

It is imported only where a run asks for one of them.
"""

import math
from inspect import signature
from typing import Any

from torch import nn
from torch.optim import Optimizer

from utils.config.train import DEFAULT_MOMENTUM, OptimizerConfig
from utils.errors import UserError, nearest
from utils.log import log


def check_name(wanted: str, name: str) -> None:
    """Raise UserError unless timm has an optimiser `wanted` that works with first derivatives.

    `name`: TRAIN.OPTIMIZER.NAME as the user gave it, for messages.
    """
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


def build_timms(name: str, groups: list[dict[str, Any]], settings: OptimizerConfig, base_lr: float) -> Optimizer:
    """Build timm's optimiser `name`. Logs settings that have no effect with it."""
    # The registry imports sixty optimisers, and torch's compiler with them.
    from timm.optim._optim_factory import create_optimizer_v2, default_registry, get_optimizer_info

    info = get_optimizer_info(name)
    optimizer_class = default_registry.get_optimizer_class(info, bind_defaults=False)  # the class itself, no partial
    parameters = signature(optimizer_class).parameters
    momentum = settings.MOMENTUM
    if momentum is None:
        default = parameters["momentum"].default if "momentum" in parameters else None
        momentum = default or DEFAULT_MOMENTUM  # torch's own default is 0: no momentum
    options = settings.arguments()  # the factory drops those that the optimiser does not take
    for key, is_used in {"EPS": info.has_eps, "BETAS": info.has_betas, "MOMENTUM": info.has_momentum}.items():
        if not is_used and getattr(settings, key) is not None:
            log.info("TRAIN.OPTIMIZER.%s has no effect with TRAIN.OPTIMIZER.NAME %s", key, settings.NAME)
    if "max_grad_norm" in parameters:
        # LAMB clips gradients itself, by default to a norm of 1. Infinity switches that off; apex's LAMB takes no None.
        options["max_grad_norm"] = math.inf
    if info.has_betas and settings.BETAS is not None and info.num_betas != len(settings.BETAS):
        log.info("TRAIN.OPTIMIZER.BETAS has no effect: %s takes %d betas; its defaults are used.", name, info.num_betas)
        del options["betas"]
    return create_optimizer_v2(groups, name, base_lr, 0.0, momentum, **options)


def rate_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each weight, by name (TRAIN.LAYER_DECAY).

    It is 1 in the last layer, and each layer further from the output multiplies it by `decay`.
    """
    from timm.models import group_parameters
    from timm.optim._param_groups import auto_group_layers

    matcher: Any = getattr(model, "group_matcher", None)
    # Weight name -> number of its layer, counted from the input
    layers: Any = auto_group_layers(model) if matcher is None else group_parameters(model, matcher(), reverse=True)
    last = max(layers.values())
    return {name: decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}
