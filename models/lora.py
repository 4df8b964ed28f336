"""Add LoRA (MODEL.LORA): small trained adapters beside frozen linear layers; https://arxiv.org/abs/2106.09685.

A layer computes W x + factor B A x. Only A and B are trained, whose product has at most rank MODEL.LORA.RANK. B begins
at zero, so that training begins at the pretrained model.
"""

import contextlib
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.freeze import keep_in_eval
from models.parts import BASE, BATCH_NORM, classifiers, count_parameters, is_inside
from utils.config.model import LORA_TARGETS, LoraConfig
from utils.errors import UserError, either
from utils.seeding import key
from utils.text import counted
from vitamp.tensors import adapter_name, factors, is_adapter, parts_of


class Linear(nn.Linear):
    """A linear layer with adapters. Its class has the name of torch's, by which AMP.FP32_MODULES may match it."""

    parts: tuple[str, ...]
    """Names of the matrices in it, such as q, k and v in a fused layer, with adapters or without"""
    factor: float
    """Factor of the adapters' output"""

    def forward(self, input: Tensor) -> Tensor:
        up, down = factors(self._parameters, "", self.parts, self.weight)
        return super().forward(input) + F.linear(F.linear(input, down), self.factor * up)


def add_adapters(model: nn.Module, lora: LoraConfig, seed: int) -> None:
    """Freeze all weights but the classifier's, and add adapters to the layers of MODEL.LORA.TARGETS.

    Unlike with MODEL.FREEZE, dropout and stochastic depth stay on in frozen layers, because the activations that
    they drop depend on the adapters. Batch norms keep their statistics. UserError if the classifier or a target is
    missing.
    """
    heads = classifiers(model)
    if not heads:
        raise UserError(f"MODEL.LORA: {type(model).__name__} does not name its classifier, which LoRA trains too.")
    layers = layers_to_adapt(model, lora, heads)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and is_inside(name, heads))
    for name, layer in layers.items():
        _adapt(name, layer, lora, seed)
    # A plain attribute of the model, which checkpoints read to leave the frozen weights out.
    vars(model)[BASE] = tuple(name for name, weight in model.named_parameters() if not weight.requires_grad)
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORM)]
    keep_in_eval(model, [name for name in norms if not is_inside(name, heads)])


def _adapt(name: str, layer: nn.Linear, lora: LoraConfig, seed: int) -> None:
    """Add adapters to a layer. The matrix A begins at random numbers, B at zeros, so the layer's output stays equal.

    Each matrix of a fused layer, such as q, k and v, gets adapters of its own if MODEL.LORA.TARGETS lists it.
    """
    rank = lora.RANK
    assert rank is not None
    parts = parts_of(name)  # names of the matrices in the layer
    device = layer.weight.device
    layer.__class__ = Linear  # in place: its weights keep their names
    vars(layer).update(parts=parts, factor=lora.factor)
    for part in parts:
        if part not in lora.TARGETS:
            continue
        down = torch.empty(rank, layer.in_features, device=device)
        if not down.is_meta:
            # Uniform, as in the authors' code. The numbers depend on no device, process, or other layer.
            seed_of_part = key(seed, "lora", name, part) >> 1  # 63 bits: torch takes signed integers
            generator = torch.Generator().manual_seed(seed_of_part)
            uniform = 2 * torch.rand(down.shape, generator=generator) - 1
            down.copy_(uniform / math.sqrt(layer.in_features))
        up = torch.zeros(layer.out_features // len(parts), rank, device=device)
        layer.register_parameter(adapter_name("", part, "A"), nn.Parameter(down))
        layer.register_parameter(adapter_name("", part, "B"), nn.Parameter(up))


def describe_lora(model: nn.Module, lora: LoraConfig) -> str:
    """Describe the adapters for the banner: rank, targets and trained parameters."""
    alpha = lora.RANK if lora.ALPHA is None else lora.ALPHA
    layers = sum(isinstance(module, Linear) for module in model.modules())
    in_adapters = sum(weight.numel() for name, weight in model.named_parameters() if is_adapter(name))
    total, trained = count_parameters(model)
    return (
        f"LoRA of rank {lora.RANK}, alpha {alpha:g}, on {', '.join(lora.TARGETS)} in {counted(layers, 'layer')} "
        f"({in_adapters:,} parameters) and the classifier: {trained:,} of {total:,} parameters"
    )


def layers_to_adapt(model: nn.Module, lora: LoraConfig, heads: Iterable[str]) -> dict[str, nn.Linear]:
    """Find the layers of MODEL.LORA.TARGETS, by name, outside the classifiers `heads`.

    UserError for a target without a layer, and for a rank that is too large for a layer.
    """
    layer_of = _linear_layers(model, tuple(heads))
    existing_targets: set[str] = set()
    for name in layer_of:
        existing_targets.update(parts_of(name))
    missing_targets = [target for target in lora.TARGETS if target not in existing_targets]
    if missing_targets:
        possible = [target for target in LORA_TARGETS if target in existing_targets]
        advice = f"it has {' and '.join(possible)}" if possible else "LoRA is for transformers, such as a ViT or Swin"
        model_class = type(model).__name__
        raise UserError(f"MODEL.LORA.TARGETS {missing_targets[0]}: {model_class} has no such linear layer; {advice}.")
    chosen = {name: layer for name, layer in layer_of.items() if set(parts_of(name)) & set(lora.TARGETS)}
    for name, layer in chosen.items():
        matrices_in_layer = len(parts_of(name))  # 3 for a fused layer of q, k and v
        rows = layer.out_features // matrices_in_layer
        columns = layer.in_features
        if lora.RANK is not None and min(rows, columns) <= lora.RANK:
            raise UserError(
                f"MODEL.LORA.RANK {lora.RANK}: must be below {min(rows, columns)}, because the matrices in {name} have "
                f"{rows} x {columns} weights; 4 to 16 are common."
            )
    return chosen


def _linear_layers(model: nn.Module, heads: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Find the linear layers that can have adapters, by name, outside the classifiers `heads`.

    A fused layer holds several matrices, such as qkv. It is left out unless they are below each other in its weight:
    all of q, then all of k, then all of v.
    """
    modules = dict(model.named_modules())
    layer_of: dict[str, nn.Linear] = {}
    for name, layer in modules.items():
        if type(layer) is not nn.Linear or is_inside(name, heads):
            continue
        matrices_in_layer = len(parts_of(name))
        if matrices_in_layer == 1:
            layer_of[name] = layer
            continue
        attention = modules[name.rpartition(".")[0]]
        # With `head_first` or `val_dim`, timm keeps q, k and v of each head together.
        is_by_head = getattr(attention, "head_first", False) or hasattr(attention, "val_dim")
        # In GCViT's global attention, the layer has no q: it has fewer outputs than three times the inputs of `proj`.
        # A layer without a `proj` beside it passes this check.
        width_if_all_there = layer.out_features // matrices_in_layer
        width = getattr(getattr(attention, "proj", None), "in_features", width_if_all_there)
        if layer.out_features == matrices_in_layer * width and not is_by_head:
            layer_of[name] = layer
    return layer_of


def require_calls(model: nn.Module, lora: LoraConfig, shape: tuple[int, int, int]) -> None:
    """Raise UserError unless `model`, which is on the meta device, calls all layers that have adapters.

    Some of timm's attention layers, such as BEiT's, compute with the weight of qkv themselves, so adapters would have
    no effect. `shape`: channels, height and width of an image.
    """
    adapted_layers = [name.rpartition(".")[0] for name, _ in model.named_parameters() if is_adapter(name)]
    uncalled_layers = dict.fromkeys(adapted_layers)  # each once, in order

    def remove_called(name: str, *_: Any) -> None:
        uncalled_layers.pop(name, None)

    # Run the model once. A hook before each layer's forward pass removes the layer from `uncalled_layers`.
    for name in list(uncalled_layers):
        model.get_submodule(name).register_forward_pre_hook(partial(remove_called, name))
    # If an operation depends on values, the model stops there, and the layers after it count as not called.
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        model.eval()(torch.empty(1, *shape, device="meta"))
    if uncalled_layers:
        name = next(iter(uncalled_layers))
        targets = [part for part in parts_of(name) if part in lora.TARGETS]
        raise UserError(
            f"MODEL.LORA.TARGETS {', '.join(targets)}: {type(model).__name__} does not call its layer {name}, but "
            f"computes with its weight, so adapters there would have no effect. Leave out {either(targets)}; "
            "[proj, fc1, fc2] may be possible."
        )
