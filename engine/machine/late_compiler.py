"""Delay the import of torch's compiler until something is compiled.

Importing `torch._dynamo` takes about as long as importing torch itself. A run that compiles nothing does not need it,
but three libraries import it: torchvision for a check in its detection models, torch's optimisers to exclude their step
from tracing, and timm to exclude functions. The stand-in here serves these three uses. For any other name, or a
submodule, it imports the real module and gives up its place.
"""

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
    """Install the stand-in. It has no effect if torch's compiler is imported already."""
    if COMPILER in sys.modules:
        return
    # graph_break has no effect outside tracing.
    sys.modules[COMPILER] = _StandIn(COMPILER, graph_break=lambda *_: None, disable=_disable)
    sys.modules[HELPERS] = _StandIn(HELPERS, is_compile_supported=_is_compile_supported)


def compiler_is_imported() -> bool:
    """Return whether torch's real compiler is imported, not only the stand-in."""
    return COMPILER in sys.modules and not isinstance(sys.modules[COMPILER], _StandIn)


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs in eager mode."""
    import torch  # not at the top: torch must be imported after the stand-in is installed

    return torch.compiler.set_stance("force_eager") if compiler_is_imported() else nullcontext()


class _StandIn(ModuleType):
    """Module with a few functions of its own that imports the real one when any other name is used."""

    def __init__(self, name: str, **functions: Callable[..., Any]) -> None:
        super().__init__(name)
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        """Import the real module, which replaces the stand-in, and return the attribute from it."""
        # Python reads __path__ of a package to import a submodule of it. Of the two modules that have a stand-in,
        # torch._dynamo is a package, and torch._dynamo.utils is none.
        imports_submodule = name == "__path__" and self.__name__ == COMPILER
        # Code that walks over sys.modules reads __file__ and the like, which must not trigger the import.
        is_special = name.startswith("__") and name.endswith("__")
        if is_special and not imports_submodule:
            raise AttributeError(name)
        _import_compiler()
        return getattr(importlib.import_module(self.__name__), name)


def _import_compiler() -> ModuleType:
    """Replace the stand-ins by torch's real compiler, and return it."""
    for name in (COMPILER, HELPERS):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    return importlib.import_module(COMPILER)


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Replace `torch._dynamo.disable`: call the function as it is, until the compiler is imported.

    From then on, call it as the real `disable` wraps it. Anything but a function goes to the real one at once.
    """
    if not isinstance(function, FunctionType):
        return _import_compiler().disable(function, recursive, **options)
    disabled: Any = None

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if not compiler_is_imported():
            return function(*args, **kwargs)
        if disabled is None:  # once, at the first call after the import
            disabled = _import_compiler().disable(function, recursive, **options)
        return disabled(*args, **kwargs)

    return wrapper


def _is_compile_supported(device_type: str) -> bool:
    _import_compiler()
    return importlib.import_module(HELPERS).is_compile_supported(device_type)
