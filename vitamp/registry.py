"""What the user's own files (-use) register, by name: losses, models, augmentations, data sets, metrics."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vitamp.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """What can be registered."""

    setting: str
    """The setting that chooses it by name"""
    first: tuple[str, ...] = ()
    """The arguments that the program passes by position, to a function. A class gets them when its object is called."""
    named: tuple[str, ...] = ()
    """The arguments that the program passes by name, if they are there. All others are settings of its own."""
    needed: tuple[str, ...] = ()
    """Those of `named` that must be there"""


KINDS = {
    "loss": Kind("TRAIN.LOSS", ("logits", "targets")),
    "model": Kind("MODEL.NAME", named=("num_classes", "in_chans", "img_size"), needed=("num_classes",)),
    "augmentation": Kind("TRAIN.AUGMENT", ("image",)),
    "metric": Kind("VALIDATE_METRICS", ("probabilities", "labels")),
    "dataset": Kind("DATA.DATASET", named=("split", "data_path"), needed=("split",)),
}


@dataclass
class Own:
    """A registered function or class."""

    kind: str
    name: str
    call: Callable[..., Any]
    settings: type[BaseModel]
    file: str
    values: dict[str, Any] = field(default_factory=dict)
    """Those of its own settings that are given, checked"""

    def made(self) -> Callable[..., Any]:
        """The function, or an object of the class. Its own settings are filled in."""
        if inspect.isclass(self.call):
            made: Any = self.call(**self.values)
            return made
        call = self.call
        values = self.values
        return lambda *given, **named: call(*given, **named, **values)

    def takes(self, argument: str) -> bool:
        """Whether it names the argument, or is a model whose `**kwargs` may have it."""
        passed_on = self.kind == "model" and argument in KINDS["model"].named and _passes_on(self.call)
        return passed_on or argument in inspect.signature(self.call).parameters


def _passes_on(call: Callable[..., Any]) -> bool:
    """Whether `num_classes` is among `**kwargs`, as in timm's functions."""
    parameters = inspect.signature(call).parameters
    return "num_classes" not in parameters and any(one.kind == one.VAR_KEYWORD for one in parameters.values())


registered: dict[str, Own] = {}


def own_named(kind: str, name: str) -> Own | None:
    """What is registered under this name, if it is of this kind."""
    own = registered.get(name.strip())
    return own if own is not None and own.kind == kind else None


def names_of(kind: str) -> list[str]:
    return sorted(own.name for own in registered.values() if own.kind == kind)


def _decorator(kind: str) -> Callable[[Call], Call]:
    def register(call: Call) -> Call:
        """UserErrors here get file and line where the program executes the file. Elsewhere, nothing happens."""
        if "utils.own_code" not in sys.modules:  # as in a test of the user's
            return call
        if not callable(call):
            raise UserError(f"@{kind} stands above a function or a class, without parentheses")
        name: str = getattr(call, "__name__", "")
        other = registered.get(name)
        if other is not None:
            raise UserError(f"the name {name!r} is taken: {other.file} has registered a {other.kind} of this name")
        file = str(getattr(inspect.getmodule(call), "__file__", ""))
        registered[name] = Own(kind, name, call, _settings_of(kind, name, call), file)
        return call

    return register


loss = _decorator("loss")
"""Register a loss for TRAIN.LOSS: a function (logits, targets, ...), or a module whose object is called so."""
model = _decorator("model")
"""Register a model for MODEL.NAME: a class or function (num_classes, ...) that makes an nn.Module."""
augmentation = _decorator("augmentation")
"""Register an augmentation for TRAIN.AUGMENT: a function (image, ...) -> image, on Pillow's images."""
dataset = _decorator("dataset")
"""Register a data set for DATA.DATASET: a function (split, ...) -> images, labels, names of the classes."""
metric = _decorator("metric")
"""Register a metric for VALIDATE_METRICS: a function (probabilities, labels, ...) -> number, the higher the better.

Or a class whose object is called so, or has `update` and `compute`.
"""


def _settings_of(kind: str, name: str, call: Callable[..., Any]) -> type[BaseModel]:
    """The arguments that the program does not pass, as a schema of settings."""
    from pydantic import ConfigDict, PydanticUserError, create_model

    about = KINDS[kind]
    try:
        parameters = list(inspect.signature(call).parameters.values())
        hints = typing.get_type_hints(call.__init__ if inspect.isclass(call) else call)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"the arguments of {kind} {name!r} cannot be read: {error}") from None
    first = () if inspect.isclass(call) else about.first
    if len(parameters) < len(first):
        raise UserError(f"{kind} {name!r} must take the arguments ({', '.join(first)}, ...)")
    needed = () if kind == "model" and _passes_on(call) else about.needed
    names = [one.name for one in parameters]
    missing = [one for one in needed if one not in names]
    if missing:
        raise UserError(f"{kind} {name!r} must have the argument {' and '.join(missing)}")
    fields: dict[str, Any] = {}
    for one in parameters[len(first) :]:
        if one.name in about.named or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        of_default = {bool: bool, int: int | float, float: float}.get(type(one.default), Any)
        fields[one.name] = (hints.get(one.name, of_default), ... if one.default is one.empty else one.default)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    try:
        return create_model(name, __config__=config, **fields)
    except (PydanticUserError, NameError) as error:
        raise UserError(f"the arguments of {kind} {name!r} cannot be settings: {error}") from None
