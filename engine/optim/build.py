"""The optimiser: torch's fused ones, and all others from timm's registry.

The registry is imported only when needed: it imports sixty optimisers, and torch's compiler with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from engine.amp.precision import dtype_name
from engine.parallel.shards import is_sharded, local_shard
from models.parts import count_parameters, frozen_weights, weights_to_train
from utils.config.schema import Config
from utils.config.train import TrainConfig
from utils.errors import UserError, nearest
from utils.log import log
from utils.text import counted

# Their fused kernels do the whole step at once. GradScaler passes them its overflow flag on the device: no wait.
FUSED: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "momentum": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
}
# torch's fused kernels of these do not support sharded weights.
NOT_FUSED_WHEN_SHARDED = {"momentum", "nesterov"}
# Ours; Nesterov's momentum is in both.
MUON = {"muon", "nmuon"}
# timm's, which divide each parameter's update by its RMS too.
ADAMUON = {"adamuon", "nadamuon"}
MUON_MOMENTUM = 0.95
# Used where neither the settings nor the optimiser have a default, as with torch's SGD. It is timm's default too.
DEFAULT_MOMENTUM = 0.9
# PaddleViT's SGD has momentum without Nesterov; timm's `sgd` is Nesterov.
PADDLE_NAMES = {"sgd": "momentum"}


def optimizer_name(name: str) -> str:
    """timm's name of the optimiser; an unknown name is an error that lists the nearest ones."""
    wanted = PADDLE_NAMES.get(name.casefold(), name.casefold())
    if wanted in FUSED:
        return wanted
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
    return wanted


def build_optimizer(
    model: nn.Module, train: TrainConfig, base_lr: float, device: torch.device, amp: bool = False
) -> Optimizer:
    """The optimiser of TRAIN.OPTIMIZER. `amp`: whether training is in mixed precision."""
    settings = train.OPTIMIZER
    name, momentum = optimizer_name(settings.NAME), settings.MOMENTUM
    groups = _groups(model, train, name)
    fused = name in {*FUSED, *MUON} and device.type in ("cpu", "cuda", "mps")
    if fused and name in NOT_FUSED_WHEN_SHARDED and any(map(is_sharded, model.parameters())):
        fused = False
    options: dict[str, Any] = {"fused": True} if fused else {}
    if name in MUON:
        from engine.optim.muon import Muon

        dtype = torch.bfloat16 if amp else torch.float32
        return Muon(
            groups, base_lr, MUON_MOMENTUM if momentum is None else momentum, dtype, **options, **settings.arguments()
        )
    try:
        if name not in FUSED:
            return _timm_optimizer(name, groups, train, base_lr)
        if FUSED[name] is not torch.optim.SGD:
            return FUSED[name](groups, lr=base_lr, **options, **settings.arguments())
        momentum = DEFAULT_MOMENTUM if momentum is None else momentum
        sgd = torch.optim.SGD(groups, lr=base_lr, momentum=momentum, nesterov=name == "nesterov", **options)
    except (TypeError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise UserError(f"TRAIN.OPTIMIZER.NAME {settings.NAME}: cannot be built ({error}).") from None
    if fused and momentum:
        # Zero gives the same first step as none. torch's fused SGD allocates momentum in the first step, and leaves it
        # uninitialised if that step is skipped for an overflow; the next step would then add arbitrary numbers.
        for weight in (weight for group in sgd.param_groups for weight in group["params"]):
            sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


def compiles_step(optimizer: Optimizer) -> bool:
    """Whether the optimiser calls torch.compile, whatever TRAIN.COMPILE is: timm's Kron does."""
    return type(optimizer).__name__ == "Kron"


def describe_optimizer(optimizer: Optimizer, name: str) -> str:
    """Name of the optimiser and the values it uses: 'AdamW (betas 0.9 and 0.999, eps 1e-08)'."""
    used = []
    for key in ("betas", "beta1", "momentum", "nesterov", "eps"):
        value = optimizer.defaults.get(key)
        if value is True:
            used.append(key)
        elif value is not None and value is not False:
            values = value if isinstance(value, tuple | list) else (value,)
            used.append(f"{key} {' and '.join(f'{float(v):g}' for v in values)}")
    return f"{name} ({', '.join(used)})" if used else name


def _groups(model: nn.Module, train: TrainConfig, optimizer: str) -> list[dict[str, Any]]:
    """Parameter groups by learning-rate scale, weight decay and, with Muon, matrices per weight.

    Biases, norms and the weights in the model's `no_weight_decay` do not decay, unless WEIGHT_DECAY_ALL says so.
    """
    trained = weights_to_train(model)
    no_decay: Any = getattr(model, "no_weight_decay", set)()

    def decays(name: str, weight: torch.Tensor) -> bool:
        exempt = weight.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in no_decay)
        return train.WEIGHT_DECAY_ALL or not exempt

    matrices: dict[str, int] = {}
    if optimizer in MUON | ADAMUON:
        from engine.optim.muon import matrices_of

        matrices = matrices_of(model, train.OPTIMIZER.MUON.EVERY_MATRIX)
    scales = rate_scales(model, train)
    groups: dict[tuple[float, float, int], list[torch.Tensor]] = {}
    for name, weight in trained.items():
        decay = train.WEIGHT_DECAY if decays(name, weight) else 0.0
        groups.setdefault((scales.get(name, 1.0), decay, matrices.get(name, 0)), []).append(weight)
    return [
        {"params": weights, "weight_decay": decay}
        | ({SCALE: scale} if scales else {})
        | ({USES_MUON: number > 0, "matrices": number} if matrices else {})
        for (scale, decay, number), weights in sorted(groups.items(), key=lambda item: item[0])
    ]


def _timm_optimizer(name: str, groups: list[dict[str, Any]], train: TrainConfig, base_lr: float) -> Optimizer:
    from timm.optim._optim_factory import create_optimizer_v2, default_registry, get_optimizer_info

    settings, info = train.OPTIMIZER, get_optimizer_info(name)
    parameters = signature(default_registry.get_optimizer_class(info, bind_defaults=False)).parameters
    momentum = settings.MOMENTUM
    if momentum is None:
        momentum = (parameters["momentum"].default if "momentum" in parameters else None) or DEFAULT_MOMENTUM
    options = settings.arguments()  # the factory drops those that the optimiser does not take
    if name in ADAMUON:
        log.info("TRAIN.OPTIMIZER.NAME %s is timm's: it orthogonalises a fused qkv as one matrix.", name)
    if info.has_betas and settings.BETAS is not None and info.num_betas != len(settings.BETAS):
        log.info("TRAIN.OPTIMIZER.BETAS has no effect: %s takes %d betas; its defaults are used.", name, info.num_betas)
        del options["betas"]
    return create_optimizer_v2(groups, name, base_lr, 0.0, momentum, **options)


def scaled_learning_rates(train: TrainConfig, global_batch: int) -> tuple[float, float, float]:
    """BASE_LR, WARMUP_START_LR and END_LR, scaled with the global batch if LINEAR_SCALED_LR is set."""
    rates = (train.BASE_LR, train.WARMUP_START_LR, train.END_LR)
    if train.scale_reference is None:
        return rates
    factor = global_batch / train.scale_reference
    return (rates[0] * factor, rates[1] * factor, rates[2] * factor)


def describe_learning_rate(train: TrainConfig, global_batch: int) -> str:
    """The learning rate after the warm-up, with its formula if it is scaled."""
    rate, reference = f"{scaled_learning_rates(train, global_batch)[0]:.3g}", train.scale_reference
    if reference is None:
        return rate
    return f"{rate} = BASE_LR {train.BASE_LR:g} x global batch {global_batch} / LINEAR_SCALED_LR {reference:g}"


# Learning rates by layer (TRAIN.LAYER_DECAY), and a summary of what is trained.

SCALE = "lr_scale"
"""Key of a parameter group that timm's schedules multiply its learning rate by."""


def rate_scales(model: nn.Module, train: TrainConfig) -> dict[str, float]:
    """Factors of the learning rate by weight name; empty if all weights have the same rate."""
    if train.LAYER_DECAY is None:
        return {}
    from timm.models import group_parameters
    from timm.optim._param_groups import auto_group_layers

    matcher: Any = getattr(model, "group_matcher", None)
    # Number of each weight's layer, from the input on
    layers: Any = auto_group_layers(model) if matcher is None else group_parameters(model, matcher(), reverse=True)
    last = max(layers.values())
    return {name: train.LAYER_DECAY ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


def describe_parameters(model: nn.Module) -> str:
    total, trained = count_parameters(model)
    return f"Parameters: {total:,}, trainable {trained:,} ({100 * trained / total:.1f} %)"


def describe_fine_tuning(config: Config, model: nn.Module, optimizer: Optimizer, rate: float) -> str:
    """One line for the banner; empty if all weights train at the same rate. `rate`: the unscaled learning rate."""
    train, frozen = config.TRAIN, frozen_weights(model)
    parts = []
    if config.MODEL.LORA.RANK is not None:
        from models.lora import describe_lora

        parts.append(describe_lora(model, config.MODEL.LORA))
    elif frozen:
        by = f" ({', '.join(config.MODEL.FREEZE)})" if config.MODEL.FREEZE else ""
        until = config.MODEL.UNFREEZE_EPOCH
        later = "" if until is None else f", trained from epoch {until} on"
        parts.append(f"{len(frozen)} of {len(list(model.parameters()))} tensors frozen{by}{later}")
    scales = [group[SCALE] for group in optimizer.param_groups if SCALE in group]
    if scales and train.LAYER_DECAY is not None:
        least, most = f"{rate * min(scales):.3g}", f"{rate * max(scales):.3g}"
        rates = f"learning rate {most}" if least == most else f"learning rates from {least} to {most}"
        parts.append(f"{rates} (layer decay {train.LAYER_DECAY:g})")
    return "; ".join(parts)


# Which parameters Muon updates and which AdamW, for the log.

USES_MUON = "use_muon"
"""Key of a group of Muon and its relatives, as timm reads it: false if AdamW updates the group's parameters."""


def describe_muon(optimizer: Optimizer, rate: float) -> str:
    """Parameters that Muon and that AdamW updates, for the banner; empty for other optimisers."""
    muon = [group for group in optimizer.param_groups if group.get(USES_MUON)]
    if not muon:
        return ""
    others = [group for group in optimizer.param_groups if not group[USES_MUON]]
    dtype = getattr(optimizer, "dtype", torch.bfloat16)  # timm's relatives of Muon have no other
    text = f"Muon {_size(muon)}, {muon[0]['ns_steps']} Newton-Schulz steps in {dtype_name(dtype)}"
    if not others:
        return text
    ends = [f"{rate * end(group.get(SCALE, 1.0) for group in others):.3g}" for end in (min, max)]
    return f"{text}; AdamW {_size(others)}, learning rate {' to '.join(dict.fromkeys(ends))}"


def _size(groups: Sequence[dict[str, Any]]) -> str:
    weights = [weight for group in groups for weight in group["params"]]
    return f"{counted(len(weights), 'tensor')} ({sum(w.numel() for w in weights):,} parameters)"


# Gradient norm and clipping. The list of weights is made once.


class Gradients:
    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())

    def divide(self, by: Tensor) -> None:
        for weight in self._weights:
            if weight.grad is not None:
                local_shard(weight.grad).div_(by)

    def clip(self, limit: float | None) -> Tensor:
        """Clip the unscaled gradients to norm `limit`. Returns their norm before clipping."""
        gradients = [p.grad for p in self._weights if p.grad is not None]
        norm: Any = get_total_norm(gradients)
        if is_sharded(norm):
            norm = norm.full_tensor()
        if limit is not None and not _is_known_within(norm, limit):
            clip_grads_with_norm_(self._weights, limit, norm)
        return torch.as_tensor(norm)


def _is_known_within(norm: Tensor, limit: float) -> bool:
    """Whether clipping would multiply by exactly 1, so that it can be skipped. Known without waiting on a CPU only.

    The factor is computed as torch does, to the last bit.
    """
    return norm.device.type == "cpu" and bool((limit / (norm + 1e-6)).float().numpy() >= 1)
