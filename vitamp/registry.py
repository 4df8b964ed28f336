"""Registers losses, models, augmentations, data sets and metrics in the user's own files (-use), by name."""

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
    """A kind of function or class that can be registered, such as losses, and the arguments that the program passes."""

    setting: str
    """The setting that chooses one by its name."""
    first: tuple[str, ...] = ()
    """Arguments that the program passes by position to a function; for a class, to its object when that is called."""
    named: tuple[str, ...] = ()
    """Arguments that the program passes by name if the function has them. Its other arguments are its own settings."""
    needed: tuple[str, ...] = ()
    """The arguments in `named` that the function must have."""


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
    """The given values of its own settings, after a check."""

    def made(self) -> Callable[..., Any]:
        """Return the function, or an object of the class, with its own settings filled in."""
        if inspect.isclass(self.call):
            instance: Any = self.call(**self.values)
            return instance
        function = self.call
        own_settings = self.values
        return lambda *arguments, **named_arguments: function(*arguments, **named_arguments, **own_settings)

    def takes(self, argument: str) -> bool:
        """Whether the argument may be passed by name: it is a parameter, or a model's `**kwargs` pass it on."""
        passed_on = self.kind == "model" and argument in KINDS["model"].named and _passes_on(self.call)
        return passed_on or argument in inspect.signature(self.call).parameters


def _passes_on(call: Callable[..., Any]) -> bool:
    """Whether `num_classes` is no parameter, so that it can only be passed in `**kwargs`, as to timm's functions."""
    parameters = inspect.signature(call).parameters
    has_kwargs = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return "num_classes" not in parameters and has_kwargs


registered: dict[str, Own] = {}
"""All registered functions and classes by their names."""


def own_named(kind: str, name: str) -> Own | None:
    """The function or class of this kind that is registered under this name; None without one."""
    own = registered.get(name.strip())
    if own is None or own.kind != kind:
        return None
    return own


def names_of(kind: str) -> list[str]:
    """The names of all registered functions and classes of a kind, sorted."""
    return sorted(own.name for own in registered.values() if own.kind == kind)


def _decorator(kind: str) -> Callable[[Call], Call]:
    """Make the decorator that registers functions and classes of a kind."""

    def register(call: Call) -> Call:
        """Register a function or class under its own name, and return it unchanged.

        The program, when it executes the file, adds file and line to a UserError. If another program imports the file,
        such as a test of the user's, nothing is registered.
        """
        is_in_our_program = "utils.own_code" in sys.modules  # the module that executes such files
        if not is_in_our_program:
            return call
        if not callable(call):
            raise UserError(f"@{kind} stands above a function or a class, without parentheses")
        name: str = getattr(call, "__name__", "")
        earlier = registered.get(name)
        if earlier is not None:
            raise UserError(f"the name {name!r} is taken: {earlier.file} has registered a {earlier.kind} of this name")
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
    """Make a pydantic model of the arguments that the program does not pass: the settings of a function or class.

    Raises UserError if arguments that the program passes are missing, or if others cannot be settings.

    kind: a key of KINDS, which has three sets of arguments that the program passes: the first ones by position, those
        by name, and, of these, those that are needed
    name: name of the function or class
    call: the function or class
    """
    from pydantic import ConfigDict, PydanticUserError, create_model

    passed = KINDS[kind]
    try:
        parameters = list(inspect.signature(call).parameters.values())
        hints = typing.get_type_hints(call.__init__ if inspect.isclass(call) else call)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"the arguments of {kind} {name!r} cannot be read: {error}") from None
    # A class gets the first arguments later, when its object is called.
    first = () if inspect.isclass(call) else passed.first
    if len(parameters) < len(first):
        raise UserError(f"{kind} {name!r} must take the arguments ({', '.join(first)}, ...)")
    needed = () if kind == "model" and _passes_on(call) else passed.needed
    names = [parameter.name for parameter in parameters]
    missing = [argument for argument in needed if argument not in names]
    if missing:
        raise UserError(f"{kind} {name!r} must have the argument {' and '.join(missing)}")

    fields: dict[str, Any] = {}
    for parameter in parameters[len(first) :]:
        if parameter.name in passed.named or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        # Without an annotation, the default decides the type. An integer default may mean any number.
        default = parameter.default
        type_by_default = {bool: bool, int: int | float, float: float}.get(type(default), Any)
        setting_type = hints.get(parameter.name, type_by_default)
        # For pydantic, ... means that a value must be given.
        fields[parameter.name] = (setting_type, ... if default is parameter.empty else default)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    try:
        return create_model(name, __config__=config, **fields)
    except (PydanticUserError, NameError) as error:
        raise UserError(f"the arguments of {kind} {name!r} cannot be settings: {error}") from None
