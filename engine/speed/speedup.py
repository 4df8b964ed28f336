"""How a built model's layers compute (SPEED): the mathematics is the same; results change in the last bits only.

Speed-ups change the model itself, for training, evaluation and tools. tuning.py names them all, in their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from utils.config import Config
from utils.distributed.world import World


@dataclass(frozen=True)
class BuiltModel:
    """A model on its device, and all that a choice may depend on."""

    config: Config
    model: nn.Module
    inputs: Inputs
    precision: Precision
    world: World
    before: Mapping[str, Any]
    """Choices of the run that is resumed; empty if it computed on another kind of device or in another precision."""

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def listed(self) -> frozenset[str]:
        """Operators on AMP's lists, which have no effect on an operator within another."""
        return frozenset((*self.config.AMP.CUSTOM_WHITE_LIST, *self.config.AMP.CUSTOM_BLACK_LIST))

    @property
    def sharded(self) -> bool:
        return self.config.DIST.STRATEGY == "fsdp"


class Choice(NamedTuple):
    value: Any
    """False: the layers compute as they are built."""
    why: str = ""


class Speedup(ABC):
    key = ""
    """Of its value in a run's choices; empty where the settings alone decide."""

    @abstractmethod
    def choose(self, built: BuiltModel) -> Choice:
        """Called on every rank; the choice of rank 0 counts. Raises UserError if it cannot be as the setting says."""

    @abstractmethod
    def apply(self, built: BuiltModel, value: Any) -> None:
        """Change the model. Not called for False."""

    @abstractmethod
    def words(self, choice: Choice) -> str:
        """For the banner, which shows no empty words. Not called for False."""


def mix_in(module: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` before the module's own class; its methods may call `super()`.

    Weights, names in the state dict and the class name do not change. Whatever wraps the module later
    (AMP.FP32_MODULES, FSDP, a compiled call) finds the new forward where it looks for it: in the class.
    """
    if not isinstance(module, kind):
        module.__class__ = _mixed(kind, type(module))


@cache
def _mixed(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": kind.__doc__})
