"""AMP.FP32_MODULES: modules that compute in fp32 while the rest of the model runs under autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
import torch._functorch.config as autograd_config
from torch import nn

from utils.errors import UserError, nearest

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
# Models and activation checkpointing call the members of these one by one, never the container itself.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def force_fp32(model: nn.Module, patterns: Iterable[str], device_type: str) -> list[str]:
    """Make modules that match `patterns` compute in fp32, forward and backward. Returns the names newly forced.

    A pattern is a glob over module names (`blocks.11.*`, `head`) or class names (`*Norm*`). Modules inside a forced one
    compute in fp32 with it. Works in the middle of training too; parameters, their names and dtypes do not change.
    """
    patterns = tuple(patterns)
    modules = dict(_named(model))
    for pattern in patterns:
        if not any(_matches(name, module, pattern) for name, module in modules.items()):
            raise _no_match(pattern, modules)
    newly_forced: list[str] = []
    outermost = ""
    for name, module in modules.items():
        if outermost and name.startswith(outermost + "."):
            continue
        if is_forced(module):
            outermost = name
        elif any(_matches(name, module, pattern) for pattern in patterns):
            outermost = name
            newly_forced += [part for part, inner in _callable_parts(name, module) if _force(inner, device_type)]
    if newly_forced:
        # Unlike an eager backward pass, a compiled one runs under the autocast around its forward call. That would
        # compute these modules' gradients in low precision.
        autograd_config.backward_pass_autocast = "off"
    return newly_forced


def forced_modules(model: nn.Module) -> list[str]:
    """Names of the modules that compute in fp32."""
    return [name for name, module in _named(model) if is_forced(module)]


def is_forced(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is _forward_in_fp32


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside the model, with the names they have before compiling."""
    for name, module in model.named_modules():
        own = ".".join(part for part in name.split(".") if part != "_orig_mod")
        if own and not name.endswith("_orig_mod"):
            yield own, getattr(module, "_orig_mod", module)


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _callable_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module) not in CONTAINERS:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _callable_parts(f"{name}.{child_name}", child)


def _force(module: nn.Module, device_type: str) -> bool:
    if is_forced(module):
        return False
    # Instance attributes: the state dict's keys do not change, and a deep copy's method is bound to the copy.
    module.fp32_on = device_type  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_forward_in_fp32, module)
    return True


def _forward_in_fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a forced module, with inputs cast to fp32. Under autocast it returns fp32, as autocast's fp32
    operators do.
    """
    device_type: str = self.fp32_on  # pyright: ignore[reportAssignmentType]
    under_autocast = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False):
        fp32_args, fp32_kwargs = (cast_floats(values, torch.float32, device_type) for values in (args, kwargs))
        outputs = type(self).forward(self, *fp32_args, **fp32_kwargs)
    given = next((x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), torch.float32)
    # Without autocast the next module's weights are in half precision, and it takes no other dtype.
    return outputs if under_autocast or given not in HALVES else cast_floats(outputs, given, device_type)


def _no_match(pattern: str, modules: dict[str, nn.Module]) -> UserError:
    classes = {type(module).__name__ for module in modules.values()}
    tops = [name for name in modules if "." not in name]
    return UserError(
        f"AMP.FP32_MODULES: no module's name or class matches {pattern!r}.{nearest(pattern, [*modules, *classes])} "
        f"Top-level modules: {', '.join(tops)}. Classes: {', '.join(sorted(classes))}."
    )


def cast_floats(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Cast the device's floating tensors inside tuples, lists and dicts; fp64 is left alone, as autocast does."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in FLOATS and value.device.type == device_type else value
    if isinstance(value, list | tuple):
        return type(value)(cast_floats(item, dtype, device_type) for item in value)
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype, device_type) for key, item in value.items()}
    return value
