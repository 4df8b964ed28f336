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
    """Return timm's name of an optimiser. UserError for an unknown name, with the nearest ones."""
    wanted = PADDLE_NAMES.get(name.casefold(), name.casefold())
    if wanted not in OPTIMIZERS or not OPTIMIZERS[wanted].torch:
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
    groups = _groups(model, train)
    fused = (facts.torch != "" or facts.is_ours) and device.type in ("cpu", "cuda", "mps")
    try:
        if facts.torch == "SGD":
            return _sgd(groups, base_lr, settings.MOMENTUM, fused, nesterov=name == "nesterov")
        if facts.torch:
            return getattr(torch.optim, facts.torch)(groups, lr=base_lr, fused=fused or None, **settings.arguments())
        if facts.is_ours:  # Nesterov's momentum is in both
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
    sgd = torch.optim.SGD(groups, lr, momentum, nesterov=nesterov, fused=fused or None)
    if fused and momentum:
        # Zero gives the same first step as none. torch's fused SGD allocates momentum in the first step, and leaves it
        # uninitialised if that step is skipped for an overflow; the next step would then add arbitrary numbers.
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


def _groups(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Group the weights that train by learning-rate scale, weight decay and, with Muon, matrices per weight.

    Biases, norms and the weights in the model's `no_weight_decay` do not decay, unless WEIGHT_DECAY_ALL says so. The
    groups are sorted, so that their order does not depend on that of the weights.
    """
    no_decay: Any = getattr(model, "no_weight_decay", set)()
    matrices: dict[str, int] = {}
    uses_muon = ""
    if train.OPTIMIZER.facts.by_matrix:
        from engine.optim.muon import USES_MUON, matrices_of

        matrices = matrices_of(model, train.OPTIMIZER.MUON.EVERY_MATRIX)
        uses_muon = USES_MUON
    scales: dict[str, float] = {}
    if train.LAYER_DECAY is not None:
        from engine.optim.timms import rate_scales

        scales = rate_scales(model, train.LAYER_DECAY)
    groups: dict[tuple[float, float, int], list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        exempt = weight.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in no_decay)
        decay = train.WEIGHT_DECAY if train.WEIGHT_DECAY_ALL or not exempt else 0.0
        groups.setdefault((scales.get(name, 1.0), decay, matrices.get(name, 0)), []).append(weight)
    settings: list[dict[str, Any]] = []
    for (scale, decay, matrices_per_weight), weights in sorted(groups.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {"params": weights, "weight_decay": decay}
        if scales:
            group[SCALE] = scale
        if matrices:
            group[uses_muon] = matrices_per_weight > 0
            group["matrices"] = matrices_per_weight
        settings.append(group)
    return settings


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
    # Where clipping would multiply by exactly 1, it is skipped. Only on a CPU is this known without waiting. The factor
    # is computed as torch does, to the last bit.
    is_within = norm.device.type == "cpu" and limit and bool((limit / (norm + 1e-6)).float().numpy() >= 1)
    if limit is not None and not is_within:
        clip_grads_with_norm_(weights, limit, norm)
    return torch.as_tensor(norm)
