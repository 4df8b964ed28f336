"""What is trained of a model, and how fast: MODEL.FREEZE in words, TRAIN.LAYER_DECAY and TRAIN.HEAD_LR."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from models import classifiers, count_parameters, frozen_weights, is_inside
from utils.config.schema import Config
from utils.config.train import TrainConfig
from utils.errors import UserError

SCALE = "lr_scale"
"""What timm's schedules multiply a group's learning rate by."""


def rate_scales(model: nn.Module, train: TrainConfig) -> dict[str, float]:
    """The factor of each weight's learning rate, by its name; empty where all have the same rate."""
    scales: dict[str, float] = {}
    if train.LAYER_DECAY is not None:
        layers = _layers_of(model)
        last = max(layers.values())
        scales = {name: train.LAYER_DECAY ** (last - layer) for name, layer in layers.items()}
    if train.HEAD_LR != 1:
        heads = classifiers(model)
        if not heads:
            raise UserError(
                f"TRAIN.HEAD_LR {train.HEAD_LR:g}: {type(model).__name__} does not tell which part is its classifier; "
                "leave it out."
            )
        scales |= {
            name: scales.get(name, 1.0) * (train.HEAD_LR if is_inside(name, heads) else 1.0)
            for name, _ in model.named_parameters()
        }
    return scales


def _layers_of(model: nn.Module) -> dict[str, int]:
    """Which layer each weight belongs to, counted from the images on, as timm's layer decay counts them."""
    from timm.models import group_parameters
    from timm.optim._param_groups import auto_group_layers

    matcher: Any = getattr(model, "group_matcher", None)
    found: Any = auto_group_layers(model) if matcher is None else group_parameters(model, matcher(), reverse=True)
    last = max(found.values())
    return {name: found.get(name, last) for name, _ in model.named_parameters()}


def tell_parameters(model: nn.Module) -> str:
    total, trained = count_parameters(model)
    return f"Parameters: {total:,}, trainable {trained:,} ({100 * trained / total:.1f} %)"


def fine_tuning_words(config: Config, model: nn.Module, optimizer: Optimizer, rate: float) -> str:
    """One line for the banner; nothing where all weights are trained alike. `rate`: the learning rate of most."""
    train, frozen = config.TRAIN, frozen_weights(model)
    parts = []
    if frozen:
        by = f" ({', '.join(config.MODEL.FREEZE)})" if config.MODEL.FREEZE else ""
        parts.append(f"{len(frozen)} of {len(list(model.parameters()))} tensors frozen{by}")
    scales = [group[SCALE] for group in optimizer.param_groups if SCALE in group]
    if scales:
        why = [f"layer decay {train.LAYER_DECAY:g}"] if train.LAYER_DECAY is not None else []
        why += [f"the classifier's times {train.HEAD_LR:g}"] if train.HEAD_LR != 1 else []
        least, most = f"{rate * min(scales):.3g}", f"{rate * max(scales):.3g}"
        rates = f"learning rate {most}" if least == most else f"learning rates from {least} to {most}"
        parts.append(f"{rates} ({', '.join(why)})")
    return "; ".join(parts)
