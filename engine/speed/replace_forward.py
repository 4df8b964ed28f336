"""Replace the forward of modules in an existing model.

Weights, names in the state dict and the class name do not change. Whatever wraps the module later (AMP.FP32_MODULES,
FSDP, a compiled call) finds the new forward where it looks for it: in the class.
"""

from __future__ import annotations

from functools import cache

from torch import nn


def mix_in(module: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` before the module's own class; its methods may call `super()`."""
    if not isinstance(module, kind):
        module.__class__ = _mixed(kind, type(module))


@cache
def _mixed(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": kind.__doc__})
