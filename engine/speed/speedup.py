"""Defines what a speed-up (SPEED) is: it changes how a model's layers compute, and results in the last bits only.

Speed-ups change the model itself, for training, evaluation and tools. tuning.py lists them all, in their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
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
        return frozenset(self.config.AMP.CUSTOM_WHITE_LIST).union(self.config.AMP.CUSTOM_BLACK_LIST)

    @property
    def left_out(self) -> list[str]:
        """torch's own kernels of attention that SPEED leaves out."""
        return [kind for kind in (FLASH, EFFICIENT, CUDNN) if f"-{kind}" in self.config.SPEED]

    @property
    def sharded(self) -> bool:
        return self.config.DIST.STRATEGY == "fsdp"


class Choice(NamedTuple):
    """The value that a speed-up has chosen for a model, and the reason for the banner."""

    value: Any
    """False: the layers compute as they are built."""
    why: str = ""


class Speedup(ABC):
    """A way to compute some layers faster, which is chosen for a model and then applied to it."""

    key = ""
    """Key of its value in a run's choices; empty where the settings alone decide."""
    title = ""
    """Its words in the banner, unless they depend on the choice"""

    @abstractmethod
    def choose(self, built: BuiltModel) -> Choice:
        """Choose a value for this model. UserError if the model or device does not support what SPEED asks for.

        Called on every rank; the choice of rank 0 counts.
        """

    @abstractmethod
    def apply(self, built: BuiltModel, value: Any) -> None:
        """Change the model as the chosen value says. Not called for False."""

    def words(self, choice: Choice) -> str:
        """Return the words for the banner; '' for none. Not called for False."""
        return self.title


def mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Change the module's class, in place, to a subclass of `mixin` and of its present class.

    So the methods of `mixin` replace the module's own, which they may call by `super()`. Weights, names in the state
    dict and the class name do not change. Whatever wraps the module later (AMP.FP32_MODULES, FSDP, a compiled call)
    finds the new forward where it looks for it: in the class.
    """
    if not isinstance(module, mixin):
        module.__class__ = _mixed_class(mixin, type(module))


@cache
def _mixed_class(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of class `base` with `mixin`, under the name of `base`; always the same one."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": mixin.__doc__})


# The kinds of kernels for attention, and what they can compute.

FUSED = "fused"
PLAIN = "plain"
FLASH = "flash"
EFFICIENT = "efficient"
CUDNN = "cudnn"
PACKED = "packed"
OWN = "the model's own"
KINDS = {"cuda": (FUSED, PLAIN, FLASH, EFFICIENT, CUDNN, PACKED)}
KINDS_ELSEWHERE = (FUSED, PLAIN)
FUSED_OPERATOR = frozenset({"scaled_dot_product_attention", "fused_attention", "flash_attn"})
"""Names of torch's fused operator on AMP's lists, which have no effect on `packed`."""


def attention_layers(model: nn.Module) -> list[Any]:
    """List timm's attention layers, whose kernel can be chosen."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]


def packed_is_possible(listed: frozenset[str]) -> bool:
    """Return whether packed attention may work: triton is installed, and AMP's lists do not name torch's operator."""
    return not FUSED_OPERATOR & listed and find_spec("triton") is not None


def backends_of(kind: str, strictly: bool = False, left_out: Sequence[str] = ()) -> list[Any]:
    """Return torch's backends for a kind of attention, in order of preference; [] to let torch choose among all.

    `strictly`: only the backend of this kind. Else others follow as fallbacks: flash and cuDNN do not support fp32, in
    which a run may validate. `left_out`: kinds that torch's own choice (FUSED) must not take.
    """
    has_own_backend = kind in (FLASH, EFFICIENT, CUDNN)
    limits_torchs_choice = kind == FUSED and len(left_out) > 0
    if not has_own_backend and not limits_torchs_choice:
        return []
    from torch.nn.attention import SDPBackend

    backend_of_kind = {
        FLASH: SDPBackend.FLASH_ATTENTION,
        EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
        CUDNN: SDPBackend.CUDNN_ATTENTION,
    }
    if kind == FUSED:
        backends = [backend for name, backend in backend_of_kind.items() if name not in left_out]
        return backends + [SDPBackend.MATH]
    backends = [backend_of_kind[kind]]
    if not strictly:
        if kind != EFFICIENT:
            backends.append(backend_of_kind[EFFICIENT])
        backends.append(SDPBackend.MATH)
    return backends
