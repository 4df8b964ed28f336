"""MODEL.FREEZE: parts of a model that stay as they are while the rest is trained."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from utils.errors import UserError, nearest

BACKBONE = "backbone"


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Take the gradients of all weights that `patterns` name, and let what is made of them alone not train either.

    A pattern is `backbone` or a glob over names of weights and modules (`pos_embed`, `blocks.[0-5].*`) or over class
    names (`*Norm*`). A part that is frozen as a whole stays in the state of evaluation, also when the model is put back
    to training: running statistics stand still, dropout and stochastic depth are off.
    """
    patterns = tuple(patterns)
    if not patterns:
        return
    named = {name for pattern in patterns for name in _named_by(pattern, model)}
    for name, weight in model.named_parameters():
        if name in named:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"MODEL.FREEZE: {', '.join(patterns)} leaves nothing of {type(model).__name__} to be trained.")
    # Plain attributes of the instance, by names: they go along with copies, and with modules exchanged for others.
    model.frozen_parts = _frozen_parts(model)  # pyright: ignore[reportArgumentType]
    model.train = MethodType(_train_the_rest, model)
    model.train(model.training)


def frozen_weights(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that tell classes apart: one, or two in a distilled model. timm's models know them."""
    get = getattr(model, "get_classifier", None)
    found = get() if get is not None else None
    wanted = found if isinstance(found, tuple) else (found,)
    names = {id(module): name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    known = tuple(names[id(module)] for module in wanted if id(module) in names)
    if known:
        return known
    told = (vars(model).get("pretrained_cfg") or {}).get("classifier") or ()
    return tuple(name for name in ((told,) if isinstance(told, str) else told) if name in names.values())


def lies_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight or module is one of these modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _named_by(pattern: str, model: nn.Module) -> list[str]:
    weights = [name for name, _ in model.named_parameters()]
    if pattern == BACKBONE:
        heads = classifiers(model)
        if not heads:
            raise UserError(
                f"MODEL.FREEZE {BACKBONE}: {type(model).__name__} does not tell which part is its classifier; name "
                "what is to be frozen by globs."
            )
        return [name for name in weights if not lies_in(name, heads)]
    modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
    taken = [name for name, kind in modules.items() if fnmatchcase(name, pattern) or fnmatchcase(kind, pattern)]
    found = [name for name in weights if fnmatchcase(name, pattern) or lies_in(name, taken)]
    if not found:
        raise _no_match(pattern, weights, modules)
    return found


def _no_match(pattern: str, weights: list[str], modules: dict[str, str]) -> UserError:
    known = [BACKBONE, *weights, *modules, *modules.values()]
    tops = dict.fromkeys(name.partition(".")[0] for name in weights)
    return UserError(
        f"MODEL.FREEZE: {pattern!r} names no weight, by its own name, its module's or its module's class."
        f"{nearest(pattern, known)} Outermost names: {', '.join(tops)}; or {BACKBONE}."
    )


def _frozen_parts(model: nn.Module) -> tuple[str, ...]:
    """The outermost modules that are frozen as a whole.

    One without weights is, where the weights before and after it are: dropout on the way from a frozen embedding to
    frozen blocks, but not before the classifier. Leaving out patches is asked for to save time, and goes on.
    """
    parts: list[str] = []
    between: list[str] = []
    frozen_before = False
    for name, module in model.named_modules():
        if lies_in(name, parts):
            continue
        inside = list(module.parameters())
        if not inside:
            between += [] if isinstance(module, PatchDropout) else [name]
            continue
        whole = not any(weight.requires_grad for weight in inside)
        own = inside if whole else list(module.parameters(recurse=False))
        if not own:  # its parts are still to come
            continue
        frozen = not any(weight.requires_grad for weight in own)
        parts += between if frozen and frozen_before else []
        between, frozen_before = [], frozen
        parts += [name] if whole else []
    return tuple(parts)


def _train_the_rest(self: nn.Module, mode: bool = True) -> Any:
    """Stands in for a model's `train`."""
    type(self).train(self, mode)
    parts: Any = self.frozen_parts
    for name in parts:
        self.get_submodule(name).train(False)
    return self
