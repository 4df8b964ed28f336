"""Changes that AMP makes to the model: half-precision copies and weights, modules in fp32, fp8 layers."""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

import copy
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
import torch._functorch.config as autograd_config
from timm import layers
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from datasets import Batch, MicroBatch
from engine.amp.op_lists import HALVES, cast_floats, operators_named
from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from models.parts import BATCH_NORM, classifiers, has_adapters, is_inside
from utils.config.schema import AmpConfig
from utils.distributed.world import World, sum_over_ranks
from utils.errors import UserError, nearest
from utils.log import log

RMS_NORMS = (nn.RMSNorm, layers.RmsNorm, layers.RmsNorm2d, layers.RmsNormFp32, layers.RmsNorm2dFp32)
SIMPLE_NORMS = (layers.SimpleNorm, layers.SimpleNorm2d, layers.SimpleNormFp32, layers.SimpleNorm2dFp32)
# Batch norm is always in fp32: its running statistics are, and its kernels take no weights of another dtype.
NORMS = (nn.LayerNorm, nn.GroupNorm, *RMS_NORMS, *SIMPLE_NORMS, *BATCH_NORM)
Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""(master, half-precision copy) of each trained weight."""


class HalfCopy(Callback):
    """O2 and NAIVE: a copy in half precision computes forward and backward, in place of the fp32 master weights.

    It gives the masters its gradients, and takes up their new values. The optimiser, the EMA, checkpoints and clipping
    use the masters only.
    """

    def __init__(self, precision: Precision, world: World) -> None:
        self._precision = precision
        self._world = world

    def attach(self, to: Computing) -> None:
        """A new copy has fp32 weights only where the model computes in fp32 now."""
        self._master = to.model
        self._copy, self._pairs = half_copy_of(to.model, self._precision)
        to.forward = self._copy

    @torch.no_grad()
    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """Add the copy's gradients to the masters' in fp32, where sums of many micro-batches lose no small terms."""
        pairs = [(master, half.grad) for master, half in self._pairs if half.grad is not None]
        first = [(master, gradient) for master, gradient in pairs if master.grad is None]
        later = [(master.grad, gradient) for master, gradient in pairs if master.grad is not None]
        if later:
            torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])
        if first:  # copied, not added to zeros: of mixed dtypes, only copies are fused into few kernels on a GPU
            for master, _ in first:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([m.grad for m, _ in first if m.grad is not None], [gradient for _, gradient in first])
        for _, half in self._pairs:
            half.grad = None

    @torch.no_grad()
    def before_step(self, update: int) -> None:
        """All-reduce the masters' gradients in fp32, in one message; once per update."""
        if self._world.size == 1:
            return
        gradients: list[Tensor] = [p.grad for p in self._master.parameters() if p.grad is not None]
        sums = sum_over_ranks(_flatten_dense_tensors(gradients), self._world)
        torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(sums, gradients)))

    @torch.no_grad()
    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Copy the masters' new values into the half-precision weights."""
        if self._pairs:
            masters, halves = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(halves), list(masters))


def half_copy_of(master: nn.Module, precision: Precision) -> tuple[nn.Module, Pairs]:
    """The copy of `master` that AMP.LEVEL O2 or NAIVE computes with, and its trained weights with their masters.

    Norms (NAIVE: only batch norms) and forced modules share the master's fp32 weights. All modules share its buffers,
    except in NAIVE floating ones of 16-bit modules: without autocast, a mask in fp32 makes the activations fp32.
    """
    model = copy.deepcopy(master)
    in_fp32 = forced_modules(master)
    norms_in_fp32 = precision.level == "O2"
    if not norms_in_fp32:
        cast_inputs_to_half(model)
    halves: dict[nn.Parameter, nn.Parameter] = {}
    for (name, ours), theirs in zip(model.named_modules(), master.modules(), strict=True):
        shared = is_inside(name, in_fp32) or isinstance(ours, NORMS if norms_in_fp32 else BATCH_NORM)
        for own, parameter in theirs.named_parameters(recurse=False, remove_duplicate=False):
            if shared or not parameter.is_floating_point():
                ours._parameters[own] = parameter
                continue
            if parameter not in halves:  # tied weights have one copy, whose gradient is that of all their uses
                half = parameter.detach().to(precision.choice.dtype)
                halves[parameter] = nn.Parameter(half, requires_grad=parameter.requires_grad)
            ours._parameters[own] = halves[parameter]
        for own, buffer in theirs.named_buffers(recurse=False):
            half = buffer.is_floating_point() and not (shared or norms_in_fp32)
            ours._buffers[own] = buffer.to(precision.choice.dtype) if half else buffer
    return model, [(weight, half) for weight, half in halves.items() if weight.requires_grad]


def cast_inputs_to_half(model: nn.Module) -> None:
    """Cast the images to the dtype of the first weights, which autocast would do if it were on."""

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].to(next(module.parameters()).dtype), *args[1:])

    model.register_forward_pre_hook(cast)


TENSOR_CORE_TILE = 8


def prepare_model(model: nn.Module, amp: AmpConfig, precision: Precision) -> None:
    """Apply AMP.FP32_MODULES, fp8 and O3 (half-precision weights without fp32 masters) to `model`, in place."""
    if amp.FP32_MODULES:
        forced = force_fp32(model, amp.FP32_MODULES, precision.device.type)
        log.info("AMP.FP32_MODULES: modules in fp32: %s", ", ".join(forced) or "none")
    if precision.fp8:
        left_out = convert_to_fp8(model, precision.device)
        log.info(
            "fp8: linear layers left in bf16 (the classifier, adapters, or sizes not multiples of 16): %s",
            ", ".join(left_out) or "none",
        )
    if precision.level == "O3":
        model.to(precision.choice.dtype)
        cast_inputs_to_half(model)
        log.warning(
            "AMP.LEVEL O3 keeps no fp32 master weights: updates smaller than a weight's last bit are lost, and weights "
            "near 1, such as those of norms, may never change. O2 avoids this but takes more memory."
        )


def tile_size_hint(model: nn.Module, batch: int) -> str | None:
    """Advice where sizes are not multiples of a tensor core's tile, which leaves part of each tile unused.

    The number of classes is left out: users cannot choose it, and the classifier takes hardly any time.
    """
    sizes = {"DATA.BATCH_SIZE": batch, "MODEL.EMBED_DIM": getattr(model, "embed_dim", None)}
    odd = ", ".join(f"{key} {size}" for key, size in sizes.items() if isinstance(size, int) and size % TENSOR_CORE_TILE)
    return (
        f"Mixed precision is fastest with sizes that are multiples of {TENSOR_CORE_TILE}, unlike {odd}" if odd else None
    )


# AMP.FP32_MODULES: modules that compute in fp32 while the rest of the model runs under autocast.

# Models and activation checkpointing call the members of these one by one, never the container itself.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def force_fp32(model: nn.Module, patterns: Iterable[str], device_type: str) -> list[str]:
    """Make modules that match `patterns` compute in fp32, forward and backward. Returns the names newly forced.

    A pattern is a glob over module names (`blocks.11.*`, `head`) or class names (`*Norm*`). Modules inside a forced one
    compute in fp32 with it. Works in the middle of training too; parameters, their names and dtypes do not change.
    """
    patterns = tuple(patterns)
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        if not any(_matches(name, module, pattern) for name, module in modules.items()):
            classes = {type(module).__name__ for module in modules.values()}
            raise UserError(
                f"AMP.FP32_MODULES: no module's name or class matches {pattern!r}."
                f"{nearest(pattern, list(modules) + list(classes))} Top-level modules: "
                f"{', '.join(name for name in modules if '.' not in name)}. Classes: {', '.join(sorted(classes))}."
            )
    newly_forced: list[str] = []
    outermost = ""
    containers = set[str]()  # what matches a container is done to its members
    for name, module in modules.items():
        if outermost and name.startswith(outermost + "."):
            continue
        if not is_forced(module):
            inherits = name.rpartition(".")[0] in containers
            if not inherits and not any(_matches(name, module, pattern) for pattern in patterns):
                continue
            if type(module) in CONTAINERS:
                containers.add(name)
                continue
            _force(module, device_type)
            newly_forced.append(name)
        outermost = name
    if newly_forced:
        # Unlike an eager backward pass, a compiled one runs under the autocast around its forward call. That would
        # compute these modules' gradients in low precision.
        autograd_config.backward_pass_autocast = "off"
    return newly_forced


def _force(module: nn.Module, device_type: str) -> None:
    # Instance attributes: the state dict's keys do not change, and a deep copy's method is bound to it.
    module.fp32_on = device_type  # pyright: ignore[reportArgumentType]
    # The user may have given this module a forward of its own, in place of its class's.
    module.own_forward = vars(module).get("forward")  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_forward_in_fp32, module)


def forced_modules(model: nn.Module) -> list[str]:
    """Names of the modules that compute in fp32."""
    return [name for name, module in model.named_modules() if is_forced(module)]


def is_forced(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is _forward_in_fp32


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _forward_in_fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a forced module, with inputs cast to fp32. Under autocast it returns fp32, as autocast's fp32
    operators do.
    """
    device_type: str = self.fp32_on  # pyright: ignore[reportAssignmentType]
    under_autocast = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False):
        fp32_args = cast_floats(args, torch.float32, device_type)
        fp32_kwargs = cast_floats(kwargs, torch.float32, device_type)
        own: Callable[..., Any] | None = self.own_forward  # pyright: ignore[reportAssignmentType]
        if own:
            outputs = own(*fp32_args, **fp32_kwargs)
        else:
            outputs = type(self).forward(self, *fp32_args, **fp32_kwargs)
    if under_autocast:
        return outputs
    # Without autocast the next module's weights are in half precision, and it takes no other dtype.
    inputs = [value for value in args + tuple(kwargs.values()) if isinstance(value, torch.Tensor)]
    if inputs and inputs[0].dtype in HALVES:
        return cast_floats(outputs, inputs[0].dtype, device_type)
    return outputs


# fp8 by torchao: linear layers of suitable size compute in 8 bits, everything else under bf16 autocast.

MULTIPLE = 16  # tensor cores need both sizes of an fp8 matrix to be multiples of it
FIRST_CAPABILITY = (8, 9)


def hardware_has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def convert_to_fp8(model: nn.Module, device: torch.device) -> list[str]:
    """Convert linear layers of suitable size to fp8, one scale per tensor, in place. Returns the names of the others.

    Modules that compute in fp32 are left alone, with everything inside them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = not hardware_has_fp8(device)
    if emulated:
        log.warning(
            "fp8 is EMULATED on this device: the results are those of fp8, but training is slower than in fp32. "
            "Real fp8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell)."
        )
    left_out: list[str] = []
    in_fp32 = forced_modules(model)
    heads = classifiers(model)

    def is_convertible(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or is_inside(name, in_fp32):
            return False
        suits = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        suits = suits and not is_inside(name, heads) and not has_adapters(module)  # which conversion would remove
        if not suits:
            left_out.append(name)
        return suits

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    object.__setattr__(config, "emulate", emulated)
    # A weight's gradient is summed over the tokens of a batch, whose number must be a multiple of 16 as well.
    object.__setattr__(config, "pad_inner_dim", True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_convertible)
    return left_out


OPERATORS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("linear",),
    nn.Conv1d: ("conv1d",),
    nn.Conv2d: ("conv2d",),
    nn.Conv3d: ("conv3d",),
}
"""Layers, and the only operators that use their weights. Subclasses may use them otherwise: to standardise them, say.

A class of our own says so in its attribute `autocast_operators`.
"""


def cast_weights(model: nn.Module, black_list: Iterable[str]) -> list[nn.Parameter]:
    """The weights of `model` that autocast always casts. `black_list`: AMP.CUSTOM_BLACK_LIST."""
    forced = forced_modules(model)
    in_fp32 = set(operators_named(black_list))
    cast: list[nn.Parameter] = []
    used_otherwise: set[int] = set()
    for name, module in model.named_modules():
        operators = getattr(module, "autocast_operators", OPERATORS_OF.get(type(module)))
        casts = operators and in_fp32.isdisjoint(operators) and not is_inside(name, forced)
        for own, weight in module.named_parameters(recurse=False):
            if casts and own in ("weight", "bias"):  # weight_norm and its like compute the weight from others
                cast.append(weight)
            else:
                used_otherwise.add(id(weight))
    return [weight for weight in cast if id(weight) not in used_otherwise]
