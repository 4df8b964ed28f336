"""Changes the model for AMP: half-precision copies and weights, modules in fp32, fp8 layers."""

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
    """Computes forward and backward by a copy of the model in half precision (O2 and NAIVE).

    The model keeps the fp32 master weights. After each backward pass they get the copy's gradients, and after each
    update the copy gets their new values. The optimiser, the EMA, checkpoints and clipping use the masters only.
    """

    def __init__(self, precision: Precision, world: World) -> None:
        self._precision = precision
        self._world = world

    def attach(self, to: Computing) -> None:
        """Make the copy, and let it compute. Called again when modules move to fp32: the new copy follows them."""
        self._master = to.model
        self._copy, self._pairs = half_copy_of(to.model, self._precision)
        to.forward = self._copy

    @torch.no_grad()
    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """Add the gradients of the half-precision copy to those of the fp32 masters, and clear the copy's.

        In half precision, a sum over many micro-batches would lose small terms.
        """
        pairs = [(master, half.grad) for master, half in self._pairs if half.grad is not None]
        without_sum = [(master, gradient) for master, gradient in pairs if master.grad is None]
        with_sum = [(master.grad, gradient) for master, gradient in pairs if master.grad is not None]
        if with_sum:
            torch._foreach_add_([total for total, _ in with_sum], [gradient for _, gradient in with_sum])
        if without_sum:
            # Copied, not added to zeros: a GPU fuses copies between two dtypes into few kernels, but not additions.
            for master, _ in without_sum:
                master.grad = torch.empty_like(master)
            sums = [master.grad for master, _ in without_sum if master.grad is not None]
            torch._foreach_copy_(sums, [gradient for _, gradient in without_sum])
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
    """Make the copy of `master` that AMP.LEVEL O2 or NAIVE computes with.

    Norms (NAIVE: only batch norms) and modules that are forced to fp32 share the master's fp32 weights. All modules
    share its buffers, with one exception: NAIVE copies floating buffers of 16-bit modules to half precision. It has no
    autocast, so a mask in fp32 would make the activations fp32.

    Returns the copy, and the pairs (master weight, half-precision copy) of all trained weights that have such a copy.
    """
    half_model = copy.deepcopy(master)
    forced_names = forced_modules(master)
    is_naive = precision.level == "NAIVE"
    fp32_norms = BATCH_NORM if is_naive else NORMS
    dtype = precision.choice.dtype
    if is_naive:  # O2 has autocast, which casts inputs
        cast_inputs_to_half(half_model)
    half_weights: dict[nn.Parameter, nn.Parameter] = {}
    for (name, module), master_module in zip(half_model.named_modules(), master.modules(), strict=True):
        is_fp32 = is_inside(name, forced_names) or isinstance(module, fp32_norms)
        for key, weight in master_module.named_parameters(recurse=False, remove_duplicate=False):
            if is_fp32 or not weight.is_floating_point():
                module._parameters[key] = weight
                continue
            if weight not in half_weights:  # tied weights have one copy, whose gradient is that of all their uses
                half = weight.detach().to(dtype)
                half_weights[weight] = nn.Parameter(half, requires_grad=weight.requires_grad)
            module._parameters[key] = half_weights[weight]
        for key, buffer in master_module.named_buffers(recurse=False):
            in_half = is_naive and not is_fp32 and buffer.is_floating_point()
            module._buffers[key] = buffer.to(dtype) if in_half else buffer
    return half_model, [(weight, half) for weight, half in half_weights.items() if weight.requires_grad]


def cast_inputs_to_half(model: nn.Module) -> None:
    """Make the model cast its images to the dtype of its first weights, as autocast would if it were on."""

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].to(next(module.parameters()).dtype), *args[1:])

    model.register_forward_pre_hook(cast)


TENSOR_CORE_TILE = 8


def prepare_model(model: nn.Module, amp: AmpConfig, precision: Precision) -> None:
    """Apply AMP.FP32_MODULES, fp8 and O3 (half-precision weights without fp32 masters) to `model`, in place."""
    if amp.FP32_MODULES:
        forced_names = force_fp32(model, amp.FP32_MODULES, precision.device.type)
        log.info("AMP.FP32_MODULES: modules in fp32: %s", ", ".join(forced_names) or "none")
    if precision.fp8:
        names_in_bf16 = convert_to_fp8(model, precision.device)
        log.info(
            "fp8: linear layers left in bf16 (the classifier, adapters, or sizes not multiples of 16): %s",
            ", ".join(names_in_bf16) or "none",
        )
    if precision.level == "O3":
        model.to(precision.choice.dtype)
        cast_inputs_to_half(model)
        log.warning(
            "AMP.LEVEL O3 keeps no fp32 master weights: updates smaller than a weight's last bit are lost, and weights "
            "near 1, such as those of norms, may never change. O2 avoids this but takes more memory."
        )


def tile_size_hint(model: nn.Module, batch: int) -> str | None:
    """Advise against sizes that are not multiples of a tensor core's tile, as they leave part of each tile unused.

    None if all sizes are. The number of classes is left out: users cannot choose it, and the classifier takes hardly
    any time.
    """
    sizes = {"DATA.BATCH_SIZE": batch, "MODEL.EMBED_DIM": getattr(model, "embed_dim", None)}
    unsuitable = [f"{key} {size}" for key, size in sizes.items() if isinstance(size, int) and size % TENSOR_CORE_TILE]
    if not unsuitable:
        return None
    listed = ", ".join(unsuitable)
    return f"Mixed precision is fastest with sizes that are multiples of {TENSOR_CORE_TILE}, unlike {listed}"


# AMP.FP32_MODULES: modules that compute in fp32 while the rest of the model runs under autocast.

# Models and activation checkpointing call the members of these one by one, never the container itself.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def force_fp32(model: nn.Module, patterns: Iterable[str], device_type: str) -> list[str]:
    """Make modules that match `patterns` compute in fp32, forward and backward.

    Returns the names of the modules that this call has forced. Modules inside a forced one compute in fp32 with it, and
    are not listed. A pattern is a glob over module names (`blocks.11.*`, `head`) or class names (`*Norm*`); UserError
    if one matches nothing. Works in the middle of training too; parameters, their names and dtypes do not change.
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
    # The forward of a container is never called, so all its members are forced in its place. A container in a
    # container is a member, too: it is added here, and its members follow in the loop.
    containers_to_force = set[str]()
    # Modules come in depth-first order: those inside a module follow it at once.
    last_forced = ""
    for name, module in modules.items():
        if last_forced and name.startswith(last_forced + "."):
            continue  # it computes in fp32 with the forced module around it
        if not is_forced(module):
            container = name.rpartition(".")[0]
            is_wanted = container in containers_to_force or any(_matches(name, module, p) for p in patterns)
            if not is_wanted:
                continue
            if type(module) in CONTAINERS:
                containers_to_force.add(name)
                continue
            _force(module, device_type)
            newly_forced.append(name)
        last_forced = name  # forced now or by an earlier call
    if newly_forced:
        # Unlike an eager backward pass, a compiled one runs under the autocast around its forward call. That would
        # compute these modules' gradients in low precision.
        autograd_config.backward_pass_autocast = "off"
    return newly_forced


def _force(module: nn.Module, device_type: str) -> None:
    """Replace the module's forward method by `_forward_in_fp32`."""
    # Instance attributes: the state dict's keys do not change, and a deep copy's method is bound to it.
    module.fp32_on = device_type  # pyright: ignore[reportArgumentType]
    # The user may have given this module a forward of its own, in place of its class's.
    module.own_forward = vars(module).get("forward")  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_forward_in_fp32, module)


def forced_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that `force_fp32` made compute in fp32."""
    return [name for name, module in model.named_modules() if is_forced(module)]


def is_forced(module: nn.Module) -> bool:
    """Return whether `force_fp32` made this module itself compute in fp32, not only one around it."""
    return getattr(module.forward, "__func__", None) is _forward_in_fp32


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _forward_in_fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of a forced module in fp32; `_force` sets it as the module's `forward`.

    Inputs are cast to fp32. Under autocast it returns fp32, as autocast's fp32 operators do; without, the dtype of its
    first input. The attributes are set by `_force`: `fp32_on` is the type of device, and `own_forward` the module's
    own replacement of its class's forward, or None.
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
    """Convert linear layers of suitable size to fp8, one scale per tensor, in place.

    Returns the names of the linear layers that were not converted. Modules that compute in fp32 are left alone, with
    everything inside them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = not hardware_has_fp8(device)
    if emulated:
        log.warning(
            "fp8 is EMULATED on this device: the results are those of fp8, but training is slower than in fp32. "
            "Real fp8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell)."
        )
    not_converted: list[str] = []
    forced_names = forced_modules(model)
    heads = classifiers(model)

    def is_convertible(module: nn.Module, name: str) -> bool:
        """Return whether torchao shall convert this module, and note the linear layers that it shall not."""
        if not isinstance(module, nn.Linear) or is_inside(name, forced_names):
            return False
        has_suitable_size = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        # Conversion would remove adapters.
        is_suitable = has_suitable_size and not is_inside(name, heads) and not has_adapters(module)
        if not is_suitable:
            not_converted.append(name)
        return is_suitable

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    # The recipe is a frozen dataclass, so its fields are set past its own __setattr__.
    object.__setattr__(config, "emulate", emulated)
    # A weight's gradient is summed over the tokens of a batch, whose number must be a multiple of 16 as well.
    object.__setattr__(config, "pad_inner_dim", True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_convertible)
    return not_converted


OPERATORS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("linear",),
    nn.Conv1d: ("conv1d",),
    nn.Conv2d: ("conv2d",),
    nn.Conv3d: ("conv3d",),
}
"""Class of a layer -> the only operators that use its weights.

It does not apply to subclasses, which may use the weights otherwise, for example to standardise them. A class of our
own names its operators in the attribute `autocast_operators`.
"""


def cast_weights(model: nn.Module, black_list: Iterable[str]) -> list[nn.Parameter]:
    """Return the weights of `model` that autocast casts at every use. `black_list`: AMP.CUSTOM_BLACK_LIST.

    A tied weight is left out if any module uses it without a cast.
    """
    forced_names = forced_modules(model)
    fp32_operators = set(operators_named(black_list))
    cast: list[nn.Parameter] = []
    ids_of_uncast: set[int] = set()
    for name, module in model.named_modules():
        operators = getattr(module, "autocast_operators", OPERATORS_OF.get(type(module)))
        casts_weights = operators and fp32_operators.isdisjoint(operators) and not is_inside(name, forced_names)
        for key, weight in module.named_parameters(recurse=False):
            # Other names are inputs of a computation: weight_norm makes the weight from `weight_g` and `weight_v`.
            if casts_weights and key in ("weight", "bias"):
                cast.append(weight)
            else:
                ids_of_uncast.add(id(weight))
    return [weight for weight in cast if id(weight) not in ids_of_uncast]
