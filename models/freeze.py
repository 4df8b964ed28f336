"""Freeze the weights that MODEL.FREEZE names, so that they are not trained."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from models.parts import BATCH_NORM, classifiers, is_inside
from utils.errors import UserError, nearest

# Words in MODEL.FREEZE that are no globs: all weights but the classifier's, and those of batch norms.
BACKBONE = "backbone"
NORMS = "batch_norm"


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Disable gradients of the weights that match `patterns`, and keep fully frozen modules in eval mode.

    A pattern is `backbone`, `batch_norm` (outside the classifier), or a glob over names of weights and modules
    (`pos_embed`, `blocks.[0-5].*`) or over class names (`*Norm*`). A fully frozen module stays in eval mode also in
    training: its running statistics do not change, and its dropout and stochastic depth are off.

    UserError for a glob that matches nothing, or if nothing is left to train. `batch_norm` may match nothing, because
    not every model has batch norms.
    """
    patterns = tuple(patterns)
    frozen_names: list[str] = []
    for pattern in patterns:
        frozen_names += _matching_weights(pattern, model)
    if not frozen_names:
        return
    for name in frozen_names:
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


def _matching_weights(pattern: str, model: nn.Module) -> list[str]:
    """List the names of the weights that match a pattern; UserError for a glob that matches none."""
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
    # Any other pattern is a glob. It matches a weight's name, or the name or class of a module around the weight.
    class_of = {name: type(module).__name__ for name, module in model.named_modules() if name}
    matching_modules = []
    for name, class_name in class_of.items():
        if fnmatchcase(name, pattern) or fnmatchcase(class_name, pattern):
            matching_modules.append(name)
    names = [name for name in weights if fnmatchcase(name, pattern) or is_inside(name, matching_modules)]
    if not names:
        possible = [BACKBONE, NORMS] + weights + list(class_of) + list(class_of.values())
        top_level_names = dict.fromkeys(name.partition(".")[0] for name in weights)  # each once
        raise UserError(
            f"MODEL.FREEZE: {pattern!r} matches no weight by its name, its module's name or its module's class."
            f"{nearest(pattern, possible)} Top-level names: {', '.join(top_level_names)}; or {BACKBONE}."
        )
    return names


def _frozen_parts(model: nn.Module) -> tuple[str, ...]:
    """List the outermost modules that are fully frozen.

    A module without weights, such as dropout, counts as frozen if the weights before it and those after it are frozen.
    So dropout between a frozen embedding and frozen blocks is off, but dropout before a trained classifier is on. Patch
    dropout always stays on, because its purpose is to save time.
    """
    frozen_modules: list[str] = []
    undecided: list[str] = []  # modules without weights, until the next module with weights decides about them
    weights_before_frozen = False
    for name, module in model.named_modules():
        if is_inside(name, frozen_modules):
            continue
        weights = list(module.parameters())
        if not weights:
            if not isinstance(module, PatchDropout):
                undecided.append(name)
            continue
        is_fully_frozen = not any(weight.requires_grad for weight in weights)
        # A frozen batch norm decides nothing about its neighbours: with FREEZE=batch_norm, they are trained.
        if is_fully_frozen and isinstance(module, BATCH_NORM):
            frozen_modules.append(name)
            continue
        # If some of its weights are trained, only those outside its submodules count here: the submodules follow.
        weights_here = weights if is_fully_frozen else list(module.parameters(recurse=False))
        if not weights_here:
            continue
        weights_here_frozen = not any(weight.requires_grad for weight in weights_here)
        if weights_before_frozen and weights_here_frozen:
            frozen_modules += undecided
        if is_fully_frozen:
            frozen_modules.append(name)
        undecided = []
        weights_before_frozen = weights_here_frozen
    return tuple(frozen_modules)


def _train_unfrozen(self: nn.Module, mode: bool = True) -> Any:
    """Set the model to training or evaluation, but keep its frozen parts in eval mode. It replaces `train`."""
    type(self).train(self, mode)
    parts: Any = self.frozen_parts
    for name in parts:
        self.get_submodule(name).train(False)
    return self
