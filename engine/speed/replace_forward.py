"""Another forward for modules that a model already has.

Class, weights, names in the state dict and settings by class name stay as they are, and whatever else is put around the
module later (fp32 for it alone, FSDP, a compiled call) finds the new forward where it looks for one: in the class.
"""

from __future__ import annotations

from functools import cache

from torch import nn


def mix_in(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let `kind`, whose methods may call `super()`, stand before the module's own class."""
    if not isinstance(module, kind):
        module.__class__ = _mixed(kind, type(module))


@cache
def _mixed(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": kind.__doc__})
