"""Builds the optimiser with its parameter groups and learning rates, and clips gradients.

timms.py builds the optimisers that only timm has.
"""

from fnmatch import fnmatch
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from engine.optim.schedule import SCALE
from engine.parallel.shards import is_sharded
from utils.config.train import DEFAULT_MOMENTUM, OPTIMIZERS, TrainConfig
from utils.errors import UserError

# PaddleViT's SGD has momentum without Nesterov; timm's `sgd` is Nesterov.
PADDLE_NAMES = {"sgd": "momentum"}


def optimizer_name(name: str) -> str:
    """Return timm's name of the optimiser that TRAIN.OPTIMIZER.NAME names. UserError for an unknown name.

    Upper and lower case do not matter, and PaddleViT's names are translated.
    """
    wanted = PADDLE_NAMES.get(name.casefold(), name.casefold())
    is_torchs = wanted in OPTIMIZERS and OPTIMIZERS[wanted].torch != ""
    if not is_torchs:
        from engine.optim.timms import check_name

        check_name(wanted, name)
    return wanted


def build_optimizer(
    model: nn.Module, train: TrainConfig, base_lr: float, device: torch.device, amp: bool = False
) -> Optimizer:
    """Build the optimiser of TRAIN.OPTIMIZER for the weights of `model` that train.

    `amp`: training is in mixed precision, so Muon may compute in bf16.
    """
    settings = train.OPTIMIZER
    facts = settings.facts
    name = optimizer_name(settings.NAME)
    groups = _group_weights(model, train)
    torch_class = facts.torch  # name of a class in torch.optim; '' for an optimiser of ours or timm's
    fused = (torch_class != "" or facts.is_ours) and device.type in ("cpu", "cuda", "mps")
    try:
        if torch_class == "SGD":
            return _sgd(groups, base_lr, settings.MOMENTUM, fused, nesterov=name == "nesterov")
        if torch_class != "":
            # Not fused is None: torch then chooses between its other two implementations.
            return getattr(torch.optim, torch_class)(groups, lr=base_lr, fused=fused or None, **settings.arguments())
        if facts.is_ours:  # muon and nmuon, which timm has with and without Nesterov's momentum; ours always has it
            from engine.optim.muon import Muon

            dtype = torch.bfloat16 if amp else torch.float32
            return Muon(groups, base_lr, settings.MOMENTUM, dtype, fused=fused, **settings.arguments())
        from engine.optim.timms import build_timms

        return build_timms(name, groups, settings, base_lr)
    except (TypeError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise UserError(f"TRAIN.OPTIMIZER.NAME {settings.NAME}: cannot be built ({error}).") from None


def _sgd(groups: list[dict[str, Any]], lr: float, momentum: float | None, fused: bool, nesterov: bool) -> Optimizer:
    """Build torch's SGD. `momentum`: None for the default. `fused`: use the fused kernel if the weights allow it."""
    momentum = DEFAULT_MOMENTUM if momentum is None else momentum
    weights = list(chain.from_iterable(group["params"] for group in groups))
    # torch's fused kernel does not support sharded weights.
    fused = fused and not any(is_sharded(weight) for weight in weights)
    # Not fused is None: torch then chooses between its other two implementations.
    sgd = torch.optim.SGD(groups, lr, momentum, nesterov=nesterov, fused=fused or None)
    if fused and momentum:
        # torch's fused SGD allocates momentum in the first step, and leaves it uninitialised if that step is skipped
        # for an overflow; the next step would then add arbitrary numbers. So the momentum begins at zero, which does
        # not change the first step.
        for weight in weights:
            sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


def describe_optimizer(optimizer: Optimizer, name: str) -> str:
    """Describe the optimiser with the values it uses: 'AdamW (betas 0.9 and 0.999, eps 1e-08)'."""
    options = []
    for key in ("betas", "beta1", "momentum", "nesterov", "eps"):
        value = optimizer.defaults.get(key)
        if value is True:
            options.append(key)
        elif value is not None and value is not False:
            values = value if isinstance(value, tuple | list) else (value,)
            numbers = " and ".join(f"{float(number):g}" for number in values)
            options.append(f"{key} {numbers}")
    return f"{name} ({', '.join(options)})" if options else name


def _group_weights(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of the weights that train.

    Weights of a group have the same factor of the learning rate (LAYER_DECAY), the same weight decay and, with Muon,
    the same number of matrices in a weight: 3 in a fused qkv, 0 if AdamW updates it. Biases, norms and the weights in
    the model's `no_weight_decay` do not decay, unless WEIGHT_DECAY_ALL says so. The groups are sorted, so that their
    order does not depend on that of the weights.
    """
    scale_of_weight: dict[str, float] = {}
    if train.LAYER_DECAY is not None:
        from engine.optim.timms import rate_scales

        scale_of_weight = rate_scales(model, train.LAYER_DECAY)
    no_decay_patterns: Any = getattr(model, "no_weight_decay", set)()  # a method of timm's models
    matrices_in_weight: dict[str, int] = {}
    muon_key = ""
    if train.OPTIMIZER.facts.by_matrix:
        from engine.optim.muon import USES_MUON, matrices_of

        matrices_in_weight = matrices_of(model, train.OPTIMIZER.MUON.EVERY_MATRIX)
        muon_key = USES_MUON

    # (factor of the learning rate, weight decay, matrices) -> weights
    weights_of_group: dict[tuple[float, float, int], list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_listed = any(fnmatch(name, pattern) for pattern in no_decay_patterns)
        is_exempt = weight.ndim <= 1 or name.endswith(".bias") or is_listed
        decay = train.WEIGHT_DECAY if train.WEIGHT_DECAY_ALL or not is_exempt else 0.0
        key = (scale_of_weight.get(name, 1.0), decay, matrices_in_weight.get(name, 0))
        weights_of_group.setdefault(key, []).append(weight)

    groups: list[dict[str, Any]] = []
    for (scale, decay, matrices), weights in sorted(weights_of_group.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {"params": weights, "weight_decay": decay}
        if scale_of_weight:
            group[SCALE] = scale
        if matrices_in_weight:
            group[muon_key] = matrices > 0
            group["matrices"] = matrices
        groups.append(group)
    return groups


def scaled_learning_rates(train: TrainConfig, global_batch: int) -> tuple[float, float, float]:
    """Return BASE_LR, WARMUP_START_LR and END_LR, scaled with the global batch if LINEAR_SCALED_LR is set."""
    rates = (train.BASE_LR, train.WARMUP_START_LR, train.END_LR)
    if train.scale_reference is None:
        return rates
    factor = global_batch / train.scale_reference
    return (rates[0] * factor, rates[1] * factor, rates[2] * factor)


def describe_learning_rate(train: TrainConfig, global_batch: int) -> str:
    """Describe the learning rate after the warm-up, with its formula if it is scaled."""
    rate = f"{scaled_learning_rates(train, global_batch)[0]:.3g}"
    reference = train.scale_reference
    if reference is None:
        return rate
    return f"{rate} = BASE_LR {train.BASE_LR:g} x global batch {global_batch} / LINEAR_SCALED_LR {reference:g}"


def clip_gradients(weights: list[nn.Parameter], limit: float | None) -> Tensor:
    """Clip the unscaled gradients of `weights` to norm `limit`. Returns their norm before clipping.

    `limit`: None to compute the norm only. A collective call for sharded weights.
    """
    norm: Any = get_total_norm([p.grad for p in weights if p.grad is not None])
    if is_sharded(norm):
        norm = norm.full_tensor()
    if limit is not None:
        # Where clipping would multiply by exactly 1, it is skipped. Only on a CPU is this known without waiting.
        changes_nothing = False
        if norm.device.type == "cpu":
            factor = limit / (norm + 1e-6)  # as torch computes it, to the last bit
            changes_nothing = bool(factor.float().numpy() >= 1)
        if not changes_nothing:
            clip_grads_with_norm_(weights, limit, norm)
    return torch.as_tensor(norm)
