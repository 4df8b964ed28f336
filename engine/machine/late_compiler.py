"""torch's compiler, imported once something is compiled, and not before.

Importing `torch._dynamo` and what it brings along takes about as long as importing torch itself. An ordinary run needs
none of it, but meets it three times: torchvision imports it for one question that only its detection models ask,
optimisers tell it that their step is not to be traced, and timm marks functions that it shall leave alone. What stands
in for it here answers those three; for any other name, or a submodule, it makes way for the real one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
HELPERS = "torch._dynamo.utils"


def import_compiler_late() -> None:
    """From here on. Without effect where torch's compiler is imported already."""
    if COMPILER in sys.modules:
        return
    sys.modules[COMPILER] = _StandIn(COMPILER, graph_break=_nothing, disable=_disable)
    sys.modules[HELPERS] = _StandIn(HELPERS, is_compile_supported=_is_compile_supported)


def compiler_is_imported() -> bool:
    return COMPILER in sys.modules and not isinstance(sys.modules[COMPILER], _StandIn)


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, what was compiled runs as it is written."""
    import torch  # not above: it is torch that is to find the stand-in

    return torch.compiler.set_stance("force_eager") if compiler_is_imported() else nullcontext()


class _StandIn(ModuleType):
    def __init__(self, name: str, **known: Callable[..., Any]) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules that there are asks for __file__ and the like: they are not to wake it.
        # __path__ is asked for when a submodule is imported; the module of helpers has none.
        special = name.startswith("__") and name.endswith("__")
        if special and (name != "__path__" or self.__name__ != COMPILER):
            raise AttributeError(name)
        _import_compiler()
        return getattr(importlib.import_module(self.__name__), name)


def _import_compiler() -> ModuleType:
    for name in (COMPILER, HELPERS):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    return importlib.import_module(COMPILER)


def _nothing(*_: object) -> None:
    """A graph break where nothing is traced."""


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """The function as it is, for as long as there is no compiler that it should be hidden from."""
    if not isinstance(function, FunctionType):
        return _import_compiler().disable(function, recursive, **options)
    hidden: list[Any] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not compiler_is_imported():
            return function(*args, **kwargs)
        if not hidden:
            hidden.append(_import_compiler().disable(function, recursive, **options))
        return hidden[0](*args, **kwargs)

    return called


def _is_compile_supported(device_type: str) -> bool:
    _import_compiler()
    return importlib.import_module(HELPERS).is_compile_supported(device_type)
