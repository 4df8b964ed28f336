"""The optimiser: torch's own by their fused kernels, all others by timm's registry.

That registry is imported where it is needed only: it brings sixty optimisers along, and with them torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.optim.layer_rates import SCALE, rate_scales
from engine.parallel.fsdp import is_dealt
from utils.config.train import TrainConfig
from utils.errors import UserError, nearest
from utils.log import log

# Kernels that do the whole step at once; GradScaler hands them its flag on the device, so nothing waits.
FUSED: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "momentum": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
}
# torch's fused kernel of these does not take weights that are dealt out over ranks.
NOT_BY_ROWS = {"momentum", "nesterov"}
# Where neither the settings nor the optimiser itself have one, as with torch's SGD; timm's default, too.
USUAL_MOMENTUM = 0.9
# PaddleViT's SGD is momentum without Nesterov; timm's `sgd` is with it.
PADDLE_NAMES = {"sgd": "momentum"}


def optimizer_name(name: str) -> str:
    """timm's name for the optimiser, or an error that lists the near ones."""
    wanted = PADDLE_NAMES.get(name.casefold(), name.casefold())
    if wanted in FUSED:
        return wanted
    from timm.optim._optim_factory import get_optimizer_info, list_optimizers

    known = [str(known_name) for known_name in list_optimizers()]
    if wanted not in known:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: {name!r} is not an optimiser of torch or timm.{nearest(wanted, known)} "
            f"Known: AdamW, Adam, SGD, LAMB, Lion and {len(known)} in all (timm.optim.list_optimizers())."
        )
    if get_optimizer_info(wanted).second_order:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: {name} needs second derivatives, which training here does not compute; "
            "AdamW, LAMB and Lion do without."
        )
    return wanted


def build_optimizer(model: nn.Module, train: TrainConfig, base_lr: float, device: torch.device) -> Optimizer:
    name = optimizer_name(train.OPTIMIZER.NAME)
    build = _of_torch if name in FUSED else _of_timm
    fused = name in FUSED and device.type in ("cpu", "cuda", "mps")
    if fused and name in NOT_BY_ROWS and any(map(is_dealt, model.parameters())):
        fused = False
    try:
        optimizer = build(name, _groups(model, train), train, base_lr, {"fused": True} if fused else {})
    except (TypeError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise UserError(f"TRAIN.OPTIMIZER.NAME {train.OPTIMIZER.NAME}: cannot be built ({error}).") from None
    if isinstance(optimizer, torch.optim.SGD) and fused and optimizer.defaults["momentum"]:
        _start_momentum(optimizer)
    return optimizer


def optimizer_words(optimizer: Optimizer, name: str) -> str:
    """Its name and the values it really uses: 'AdamW (betas 0.9 and 0.999, eps 1e-08)'."""
    used = []
    for key in ("betas", "beta1", "momentum", "nesterov", "eps"):
        value = optimizer.defaults.get(key)
        if value is True:
            used.append(key)
        elif value is not None and value is not False:
            values = value if isinstance(value, tuple | list) else (value,)
            used.append(f"{key} {' and '.join(f'{float(v):g}' for v in values)}")
    return f"{name} ({', '.join(used)})" if used else name


def _groups(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """What is trained, by its learning rate; those that do not decay first: biases, norms, what the model names."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    named: Any = getattr(model, "no_weight_decay", set)()

    def decays(name: str, weight: torch.Tensor) -> bool:
        free = weight.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in named)
        return train.WEIGHT_DECAY_ALL or not free

    scales = rate_scales(model, train)
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, weight in trained:
        decay = train.WEIGHT_DECAY if decays(name, weight) else 0.0
        groups.setdefault((scales.get(name, 1.0), decay), []).append(weight)
    return [
        {"params": weights, "weight_decay": decay} | ({SCALE: scale} if scales else {})
        for (scale, decay), weights in sorted(groups.items(), key=lambda item: item[0])
    ]


def _of_torch(
    name: str, groups: list[dict[str, Any]], train: TrainConfig, base_lr: float, options: dict[str, Any]
) -> Optimizer:
    settings = train.OPTIMIZER
    if FUSED[name] is torch.optim.SGD:
        momentum = USUAL_MOMENTUM if settings.MOMENTUM is None else settings.MOMENTUM
        options |= {"momentum": momentum, "nesterov": name == "nesterov"}
    else:
        options |= settings.arguments()
    return FUSED[name](groups, lr=base_lr, **options)


def _of_timm(
    name: str, groups: list[dict[str, Any]], train: TrainConfig, base_lr: float, options: dict[str, Any]
) -> Optimizer:
    from timm.optim._optim_factory import create_optimizer_v2, default_registry, get_optimizer_info

    settings, takes = train.OPTIMIZER, get_optimizer_info(name)
    own = signature(default_registry.get_optimizer_class(takes, bind_defaults=False)).parameters
    momentum = settings.MOMENTUM
    if momentum is None:
        momentum = (own["momentum"].default if "momentum" in own else None) or USUAL_MOMENTUM
    options |= settings.arguments()  # the factory drops those that it does not take
    if takes.has_betas and settings.BETAS is not None and takes.num_betas != len(settings.BETAS):
        log.info("TRAIN.OPTIMIZER.BETAS has no effect: %s takes %d numbers and keeps its own.", name, takes.num_betas)
        del options["betas"]
    return create_optimizer_v2(groups, name, base_lr, 0.0, momentum, **options)


def _start_momentum(optimizer: Optimizer) -> None:
    """Momentum that begins at zero, which gives the same first step as none.

    torch's fused SGD otherwise allocates it in the first step and leaves it unwritten where that step is skipped for
    an overflow: the next would add whatever lay in that memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def scaled_rates(train: TrainConfig, global_batch: int) -> tuple[float, float, float]:
    """BASE_LR, WARMUP_START_LR and END_LR, scaled by the global batch where LINEAR_SCALED_LR asks for it."""
    rates = (train.BASE_LR, train.WARMUP_START_LR, train.END_LR)
    if train.scale_reference is None:
        return rates
    factor = global_batch / train.scale_reference
    return (rates[0] * factor, rates[1] * factor, rates[2] * factor)


def rate_words(train: TrainConfig, global_batch: int) -> str:
    """The learning rate after the warm-up, with the arithmetic it comes from where it is scaled."""
    rate, reference = f"{scaled_rates(train, global_batch)[0]:.3g}", train.scale_reference
    if reference is None:
        return rate
    return f"{rate} = BASE_LR {train.BASE_LR:g} x global batch {global_batch} / LINEAR_SCALED_LR {reference:g}"
