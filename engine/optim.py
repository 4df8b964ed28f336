"""The optimiser, by timm's registry and torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim._optim_factory import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import Optimizer

from engine.sharding import is_dealt
from utils.config.schema import TrainConfig
from utils.errors import UserError, nearest

# Kernels that do the whole step at once; GradScaler hands them its flag on the device, so nothing waits.
FUSED = {"adam", "adamw", "momentum", "nesterov"}
# torch's fused kernel of these does not take weights that are dealt out over ranks.
NOT_BY_ROWS = {"momentum", "nesterov"}
# PaddleViT's SGD is momentum without Nesterov; timm's `sgd` is with it.
PADDLE_NAMES = {"sgd": "momentum"}


def optimizer_name(name: str) -> str:
    """timm's name for the optimiser, or an error that lists the near ones."""
    known = [str(known_name) for known_name in list_optimizers()]
    wanted = PADDLE_NAMES.get(name.casefold(), name.casefold())
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
    options: dict[str, Any] = {"eps": train.OPTIMIZER.EPS}
    if get_optimizer_info(name).num_betas == len(train.OPTIMIZER.BETAS):  # Adan has three, and keeps its own
        options["betas"] = train.OPTIMIZER.BETAS
    fused = FUSED - NOT_BY_ROWS if any(map(is_dealt, model.parameters())) else FUSED
    if name in fused and device.type in ("cpu", "cuda", "mps"):
        options["fused"] = True
    if train.WEIGHT_DECAY_ALL:
        decayed = [p for p in model.parameters() if p.requires_grad]
        parameters: Any = [{"params": decayed, "weight_decay": train.WEIGHT_DECAY}]
    else:
        parameters = model
    try:
        optimizer = create_optimizer_v2(
            parameters,
            opt=name,
            lr=base_lr,
            weight_decay=train.WEIGHT_DECAY,
            momentum=train.OPTIMIZER.MOMENTUM,
            **options,
        )
    except (TypeError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise UserError(f"TRAIN.OPTIMIZER.NAME {train.OPTIMIZER.NAME}: cannot be built ({error}).") from None
    if isinstance(optimizer, torch.optim.SGD) and options.get("fused") and train.OPTIMIZER.MOMENTUM:
        _start_momentum(optimizer)
    return optimizer


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
    reference = 512.0 if train.LINEAR_SCALED_LR is True else train.LINEAR_SCALED_LR
    if not reference:
        return rates
    factor = global_batch / reference
    return (rates[0] * factor, rates[1] * factor, rates[2] * factor)
