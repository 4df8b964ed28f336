"""Examine each layer: the fraction of gradient values that underflow in a precision, and the headroom to overflow.

The gradients are those of an fp32 pass with the weights that the precision has trained, because gradients in the low
precision no longer show the values that it lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from datasets import Batch, MicroBatch
from engine.amp.low_precision import NORMS
from engine.setup import ReadyToTrain, tuned_model
from tools.common.sessions import opened
from utils.config import Config
from utils.seeding import seed_all
from vitamp.checkpoints import read_index

if TYPE_CHECKING:
    from tools.compare.runs import Run

SHORT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e5m2: "e5m2", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class Scaled:
    """A dtype and the factor by which values are scaled before they are cast to it."""

    dtype: torch.dtype
    scale: float | None
    """None: each tensor is scaled to its largest value."""


@dataclass
class Layer:
    """Statistics of a layer's gradients, with respect to its output and to its parameters."""

    name: str
    dtype: str
    """Short name of the dtype of the gradient of its output"""
    values: int = 0
    """Values that are not zero in fp32."""
    underflows: int = 0
    """Values that become zero, or subnormal with fewer significant bits."""
    headroom: float = math.inf
    """Factor by which the values could grow before the first one overflows."""

    @property
    def underflow_share(self) -> float:
        """Fraction of the values that underflow; 0 without values."""
        return self.underflows / self.values if self.values else 0.0

    def add(self, gradient: Tensor, precision: Scaled) -> None:
        """Count how many values of an fp32 gradient would underflow in this dtype, at this scale.

        Also note the factor by which the values could grow before one overflows (`headroom`).
        """
        info = torch.finfo(precision.dtype)
        gradient = gradient.detach().float()
        if precision.scale is None:  # each tensor is scaled to its largest value
            largest = gradient.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # never 0, to divide by it
            scaled = gradient * (info.max / largest)
        else:
            scaled = gradient * precision.scale
        is_nonzero = gradient != 0
        self.values += int(is_nonzero.sum())
        self.underflows += int(((scaled.abs() < info.tiny) & is_nonzero).sum())
        largest_scaled = float(scaled.abs().max())
        can_overflow = precision.scale is not None  # else the largest value is the largest of the dtype
        if largest_scaled and can_overflow:
            self.headroom = min(self.headroom, info.max / largest_scaled)


def layers_of(run: Run, scale: float) -> list[Layer]:
    """Examine the layers with the weights of the run's last checkpoint, on the first samples of the next epoch.

    `scale`: the loss scale.
    """
    root = run.folder / "checkpoints"
    last_checkpoint = read_index(root)["last"] or ""  # None without one; then no file is at this path
    weights = str(root / last_checkpoint / "model.safetensors")
    config = run.config.changed(MODEL={"PRETRAINED": weights, "NEW_CLASSIFIER": False})
    with opened(config, compiled=False) as (ready, windows):  # eager modules can be hooked, with the same numerics
        first_micro_batch = next(iter(next(windows)))
        return examine_layers(config, ready, first_micro_batch, scale)


def examine_layers(config: Config, ready: ReadyToTrain, given: tuple[MicroBatch, Batch], scale: float) -> list[Layer]:
    """Train one micro-batch in fp32 and examine the gradients of all layers that the precision runs below fp32.

    `ready`: the model set up in that precision. `given`: the micro-batch, and its images and labels. `scale`: the loss
    scale.
    """
    micro_batch, batch = given
    parts = ready.parts
    few_images = batch.images[:2]  # enough to see the dtypes
    precisions = _precisions_of_gradients(ready, few_images, scale)
    tuned = tuned_model(config.changed(AMP={"ENABLED": False, "TF32": False}), ready.precision.device)
    fp32_model = tuned.model
    fp32_model.load_state_dict(parts.model.state_dict())
    layers = {name: Layer(name, SHORT_NAMES[precision.dtype]) for name, precision in precisions.items()}
    modules = dict(_leaves(fp32_model))

    # Examine the gradient of each layer's output: a hook in the forward pass adds a hook to the output, which gets the
    # gradient in the backward pass.
    def hook_output(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: layers[name].add(gradient, precisions[name]))

    for name in precisions:
        modules[name].register_forward_hook(partial(hook_output, name))
    seed_all(config.SEED, "doctor")
    loss = parts.criterion(fp32_model(tuned.inputs(batch.images)), batch.labels) * micro_batch.weight
    loss.backward()

    # Examine the gradients of each layer's parameters. Norms that run in fp32 have these gradients in fp32, too.
    norms_in_fp32 = ready.precision.level not in ("NAIVE", "O3")
    for name, precision in precisions.items():
        if norms_in_fp32 and isinstance(modules[name], NORMS):
            continue
        is_fp8 = precision.scale is None  # fp8 layers compute weight gradients as a product in bf16
        precision_of_weights = Scaled(torch.bfloat16, scale) if is_fp8 else precision
        for parameter in modules[name].parameters():
            if parameter.grad is not None:
                layers[name].add(parameter.grad, precision_of_weights)
    return list(layers.values())


def _precisions_of_gradients(ready: ReadyToTrain, images: Tensor, scale: float) -> dict[str, Scaled]:
    """Return the dtype and scale of the gradient of each layer's output, by the layer's name.

    One forward pass shows them: the gradient has the dtype of the output. Layers in fp32 are left out.
    """
    parts = ready.parts
    precisions = dict[str, Scaled]()

    def record(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dtype in SHORT_NAMES:
            # torchao's fp8 layers have this config; they cast the gradient of their output to 8 bits, each tensor with
            # its own scale. Other layers have no config, or one without such a cast.
            layer_config = getattr(module, "config", None)
            fp8_cast = getattr(layer_config, "cast_config_grad_output", None)
            if fp8_cast is None:
                precisions[name] = Scaled(output.dtype, scale)
            else:
                precisions[name] = Scaled(fp8_cast.target_dtype, None)

    handles = [module.register_forward_hook(partial(record, name)) for name, module in _leaves(parts.forward)]
    with torch.no_grad(), parts.precision.autocast():
        parts.forward(parts.inputs(images))
    for handle in handles:
        handle.remove()
    return precisions


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each module that has parameters but no children."""
    for name, module in model.named_modules():
        has_children = next(module.children(), None) is not None
        has_parameters = next(module.parameters(), None) is not None
        if has_parameters and not has_children:
            yield name, module
