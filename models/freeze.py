"""Parts of a model by their names: its blocks, its classifiers, and what MODEL.FREEZE does not train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from torch import Tensor, nn

from utils.errors import UserError, nearest
from vitamp.checkpoints import ADAPTER

BACKBONE = "backbone"
FROZEN_FOR_NOW = "frozen_for_now"
"""Attribute of a model with the names of the weights that `unfreeze` will train."""
BASE = "base_names"
"""Attribute of a model with adapters (MODEL.LORA): the names of its frozen weights."""


def freeze(model: nn.Module, patterns: Iterable[str], for_now: bool = False) -> None:
    """Disable gradients of the weights that match `patterns`, and keep fully frozen modules in eval mode.

    A pattern is `backbone` or a glob over names of weights and modules (`pos_embed`, `blocks.[0-5].*`) or over class
    names (`*Norm*`). A fully frozen module stays in eval mode also when the model is set to training: its running
    statistics do not change, and its dropout and stochastic depth are off.

    `for_now`: `unfreeze` will be called.
    """
    patterns = tuple(patterns)
    if not patterns:
        return
    matching = {name for pattern in patterns for name in _matching(pattern, model)}
    # A weight that the model itself never trains, such as a fixed position embedding, stays as it is.
    found = {name: weight for name, weight in model.named_parameters() if name in matching and weight.requires_grad}
    for weight in found.values():
        weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"MODEL.FREEZE: {', '.join(patterns)} leaves no weights of {type(model).__name__} to train.")
    keep_in_eval(model, _frozen_parts(model))
    vars(model)[FROZEN_FOR_NOW] = tuple(found) if for_now else ()


def keep_in_eval(model: nn.Module, parts: Iterable[str]) -> None:
    """Keep modules in eval mode also when the model is set to training."""
    # Plain attributes with names, not modules: they survive copying the model and replacing its modules.
    model.frozen_parts = tuple(parts)  # pyright: ignore[reportArgumentType]
    model.train = MethodType(_train_unfrozen, model)
    model.train(model.training)


def unfreeze(model: nn.Module) -> list[str]:
    """Train what `freeze` froze for now. Returns the names of these weights; there are none the second time."""
    names = vars(model).pop(FROZEN_FOR_NOW, ())
    if not names:
        return []
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    del model.frozen_parts, model.train  # the class's own `train` is visible again
    model.train(model.training)
    return list(names)


def weights_to_train(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that are trained now, or will be from MODEL.UNFREEZE_EPOCH on."""
    later = vars(model).get(FROZEN_FOR_NOW, ())
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad or name in later}


def frozen_weights(model: nn.Module) -> list[str]:
    """Names of the weights that are not trained."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights of a model with adapters, which its checkpoints leave out; empty for any other model."""
    return {name: model.get_parameter(name).detach() for name in vars(model).get(BASE, ())}


def has_adapters(module: nn.Module) -> bool:
    """Whether a layer has adapters of its own (models/lora.py)."""
    return any(name.startswith(ADAPTER) for name, _ in module.named_parameters(recurse=False))


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the classifier modules, as timm's models report them: one, or two in a distilled model."""
    get = getattr(model, "get_classifier", None)
    heads = get() if get is not None else None
    names = {id(module): name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    known = tuple(names[id(head)] for head in (heads if isinstance(heads, tuple) else (heads,)) if id(head) in names)
    return known or tuple(name for name in names_in_cfg(model, "classifier") if name in names.values())


def pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """timm's settings of a model's weights; empty for models that are not timm's."""
    return vars(model).get("pretrained_cfg") or {}


def names_in_cfg(model: nn.Module, key: str) -> tuple[str, ...]:
    """Names of the modules under `classifier` or `first_conv` in timm's settings."""
    names = pretrained_cfg(model).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight or module is one of these modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _matching(pattern: str, model: nn.Module) -> list[str]:
    """Names of the weights that match a pattern; UserError for none."""
    weights = [name for name, _ in model.named_parameters()]
    if pattern == BACKBONE:
        heads = classifiers(model)
        if not heads:
            raise UserError(
                f"MODEL.FREEZE {BACKBONE}: the classifier of {type(model).__name__} is unknown; use globs instead."
            )
        return [name for name in weights if not is_inside(name, heads)]
    modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
    matches = [name for name, kind in modules.items() if fnmatchcase(name, pattern) or fnmatchcase(kind, pattern)]
    names = [name for name in weights if fnmatchcase(name, pattern) or is_inside(name, matches)]
    if not names:
        raise _no_match(pattern, weights, modules)
    return names


def _no_match(pattern: str, weights: list[str], modules: dict[str, str]) -> UserError:
    known = [BACKBONE, *weights, *modules, *modules.values()]
    tops = dict.fromkeys(name.partition(".")[0] for name in weights)
    return UserError(
        f"MODEL.FREEZE: {pattern!r} matches no weight by its name, its module's name or its module's class."
        f"{nearest(pattern, known)} Top-level names: {', '.join(tops)}; or {BACKBONE}."
    )


def _frozen_parts(model: nn.Module) -> tuple[str, ...]:
    """Outermost modules that are fully frozen.

    A module without weights is frozen if the weights before and after it are: dropout between a frozen embedding and
    frozen blocks, but not before the classifier. Patch dropout stays on, because its purpose is to save time.
    """
    parts: list[str] = []
    between: list[str] = []
    frozen_before = False
    for name, module in model.named_modules():
        if is_inside(name, parts):
            continue
        inside = list(module.parameters())
        if not inside:
            between += [] if isinstance(module, PatchDropout) else [name]
            continue
        whole = not any(weight.requires_grad for weight in inside)
        own = inside if whole else list(module.parameters(recurse=False))
        if not own:  # its submodules follow
            continue
        frozen = not any(weight.requires_grad for weight in own)
        parts += between if frozen and frozen_before else []
        between, frozen_before = [], frozen
        parts += [name] if whole else []
    return tuple(parts)


def _train_unfrozen(self: nn.Module, mode: bool = True) -> Any:
    """Replacement of a model's `train` that keeps frozen parts in eval mode."""
    type(self).train(self, mode)
    parts: Any = self.frozen_parts
    for name in parts:
        self.get_submodule(name).train(False)
    return self


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each block with its name, the unit of sharding and compiling.

    In a model without `blocks`, the modules of every sequence of one type count as blocks.
    """
    modules = dict(model.named_modules())
    named = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    sequences = {
        name: module
        for name, module in (named or modules).items()
        if isinstance(module, nn.Sequential | nn.ModuleList) and _is_uniform(module)
    }
    yielded: list[str] = []
    for name, sequence in sequences.items():
        if is_inside(name, yielded):
            continue
        for number, block in sequence.named_children():
            if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
                yielded.append(f"{name}.{number}" if name else number)
                yield yielded[-1], block


def _is_uniform(sequence: nn.Module) -> bool:
    """Whether all children have parameters and are of one type."""
    types = [type(child) for child in sequence.children() if any(True for _ in child.parameters())]
    return bool(types) and len(set(types)) == 1 and len(types) == len(list(sequence.children()))
