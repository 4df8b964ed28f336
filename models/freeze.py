"""MODEL.FREEZE: weights that are not trained."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from models.parts import BATCH_NORM, classifiers, is_inside
from utils.errors import UserError, nearest

BACKBONE = "backbone"
NORMS = "batch_norm"


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Disable gradients of the weights that match `patterns`, and keep fully frozen modules in eval mode.

    A pattern is `backbone`, `batch_norm` (outside the classifier; a model may have none), or a glob over names of
    weights and modules (`pos_embed`, `blocks.[0-5].*`) or over class names (`*Norm*`). A fully frozen module stays in
    eval mode also in training: its running statistics do not change, and its dropout and stochastic depth are off.
    """
    patterns = tuple(patterns)
    found: list[str] = []
    for pattern in patterns:
        found += _matching(pattern, model)
    if not found:
        return
    for name in found:
        model.get_parameter(name).requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"MODEL.FREEZE: {', '.join(patterns)} leaves no weights of {type(model).__name__} to train.")
    keep_in_eval(model, _frozen_parts(model))


def keep_in_eval(model: nn.Module, parts: Iterable[str]) -> None:
    """Keep modules in eval mode also when the model is set to training."""
    # Plain attributes with names, not modules: they survive copying the model and replacing its modules.
    model.frozen_parts = tuple(parts)  # pyright: ignore[reportArgumentType]
    model.train = MethodType(_train_unfrozen, model)
    model.train(model.training)


def _matching(pattern: str, model: nn.Module) -> list[str]:
    """Names of the weights that match a pattern; UserError for none."""
    weights = [name for name, _ in model.named_parameters()]
    heads = classifiers(model)
    if pattern == BACKBONE:
        if not heads:
            raise UserError(
                f"MODEL.FREEZE {BACKBONE}: the classifier of {type(model).__name__} is unknown; use globs instead."
            )
        return [name for name in weights if not is_inside(name, heads)]
    if pattern == NORMS:
        norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORM)]
        return [name for name in weights if is_inside(name, norms) and not is_inside(name, heads)]
    modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
    matches = [name for name, kind in modules.items() if fnmatchcase(name, pattern) or fnmatchcase(kind, pattern)]
    names = [name for name in weights if fnmatchcase(name, pattern) or is_inside(name, matches)]
    if not names:
        known = [BACKBONE, NORMS] + weights + list(modules) + list(modules.values())
        tops = dict.fromkeys(name.partition(".")[0] for name in weights)
        raise UserError(
            f"MODEL.FREEZE: {pattern!r} matches no weight by its name, its module's name or its module's class."
            f"{nearest(pattern, known)} Top-level names: {', '.join(tops)}; or {BACKBONE}."
        )
    return names


def _frozen_parts(model: nn.Module) -> tuple[str, ...]:
    """Outermost modules that are fully frozen.

    A module without weights is frozen if the weights before and after it are: dropout between a frozen embedding and
    frozen blocks, but not before the classifier. Patch dropout stays on, because its purpose is to save time.
    """
    parts: list[str] = []
    between: list[str] = []  # modules without weights, since the last weights
    frozen_before = False
    for name, module in model.named_modules():
        if is_inside(name, parts):
            continue
        inside = list(module.parameters())
        if not inside:
            if not isinstance(module, PatchDropout):
                between.append(name)
            continue
        is_whole = not any(weight.requires_grad for weight in inside)
        if is_whole and isinstance(module, BATCH_NORM):  # with FREEZE=batch_norm, its neighbours are trained
            parts.append(name)
            continue
        own = inside if is_whole else list(module.parameters(recurse=False))
        if not own:  # its submodules follow
            continue
        is_frozen = not any(weight.requires_grad for weight in own)
        if is_frozen and frozen_before:
            parts += between
        if is_whole:
            parts.append(name)
        between = []
        frozen_before = is_frozen
    return tuple(parts)


def _train_unfrozen(self: nn.Module, mode: bool = True) -> Any:
    """Replacement of a model's `train` that keeps frozen parts in eval mode."""
    type(self).train(self, mode)
    parts: Any = self.frozen_parts
    for name in parts:
        self.get_submodule(name).train(False)
    return self
