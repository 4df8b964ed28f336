"""Learning rates by layer (TRAIN.LAYER_DECAY, TRAIN.HEAD_LR), and a summary of what is trained."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from models import classifiers, count_parameters, frozen_weights, is_inside
from utils.config.schema import Config
from utils.config.train import TrainConfig
from utils.errors import UserError

SCALE = "lr_scale"
"""Key of a parameter group that timm's schedules multiply its learning rate by."""


def rate_scales(model: nn.Module, train: TrainConfig) -> dict[str, float]:
    """Factors of the learning rate by weight name; empty if all weights have the same rate."""
    scales: dict[str, float] = {}
    if train.LAYER_DECAY is not None:
        layers = _layers_of(model)
        last = max(layers.values())
        scales = {name: train.LAYER_DECAY ** (last - layer) for name, layer in layers.items()}
    if train.HEAD_LR != 1:
        heads = classifiers(model)
        if not heads:
            raise UserError(
                f"TRAIN.HEAD_LR {train.HEAD_LR:g}: {type(model).__name__} does not name its classifier; "
                "remove the setting."
            )
        scales |= {
            name: scales.get(name, 1.0) * (train.HEAD_LR if is_inside(name, heads) else 1.0)
            for name, _ in model.named_parameters()
        }
    return scales


def _layers_of(model: nn.Module) -> dict[str, int]:
    """Layer number of each weight, from the input on, as timm's layer decay counts them."""
    from timm.models import group_parameters
    from timm.optim._param_groups import auto_group_layers

    matcher: Any = getattr(model, "group_matcher", None)
    layers: Any = auto_group_layers(model) if matcher is None else group_parameters(model, matcher(), reverse=True)
    last = max(layers.values())
    return {name: layers.get(name, last) for name, _ in model.named_parameters()}


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
    if scales and (train.LAYER_DECAY is not None or train.HEAD_LR != 1):
        why = [f"layer decay {train.LAYER_DECAY:g}"] if train.LAYER_DECAY is not None else []
        why += [f"classifier x {train.HEAD_LR:g}"] if train.HEAD_LR != 1 else []
        least, most = f"{rate * min(scales):.3g}", f"{rate * max(scales):.3g}"
        rates = f"learning rate {most}" if least == most else f"learning rates from {least} to {most}"
        parts.append(f"{rates} ({', '.join(why)})")
    return "; ".join(parts)
