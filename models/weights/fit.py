"""Pretrained weights into a built model: fitted by timm's own filters, then taken whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models import adapt_input_conv, load_state_dict
from torch import Tensor, nn

from models.freeze import classifiers, lies_in
from models.weights.find import PADDLE, Source, locate, unreadable
from models.weights.paddle_file import EMA_IN, WEIGHTS_IN, read_pdparams
from models.weights.paddle_names import convert
from utils.errors import UserError
from utils.log import log

SHOWN = 5  # tensors named in an error, of each kind
FRESH = "freshly initialised"

Weights = dict[str, Tensor]


def load_pretrained(
    module: nn.Module,
    source: str,
    name: str,
    average: bool | None = False,
    new_classifier: bool = False,
    whole: bool = False,
) -> str:
    """Fill the model called `name` from `source`; returns a sentence for the log: what was used and changed.

    `average`: of a run or checkpoint, the EMA, the plain weights, or (None) the better ones. `new_classifier`: keep the
    model's own, whatever is there. `whole`: no weights are trained afterwards, so none may stay freshly initialised.
    """
    found = locate(source, average)
    what, changes = _fill(module, found, name, new_classifier)
    said = f"Pretrained weights: {'; '.join([f'{what} from {found.file}', *changes])}"
    if whole and any(FRESH in change for change in changes):
        raise UserError(
            f"{said}. Nothing is trained by -eval, so its accuracy would be that of an untrained classifier: "
            "take the MODEL.NUM_CLASSES that the weights were trained with and data of these classes, without "
            "MODEL.NEW_CLASSIFIER; or train first, without -eval."
        )
    return f"{said} ({found.words})" if found.words else said


def _fill(module: nn.Module, found: Source, name: str, new_classifier: bool) -> tuple[str, list[str]]:
    """How much was taken, and what was changed on the way."""
    fresh = classifiers(module) if new_classifier else ()
    if found.file.suffix == ".npz":
        own = {key: value.clone() for key, value in module.state_dict().items() if lies_in(key, fresh)}
        what, changes = _load_npz(module, found.file, name)
        module.load_state_dict(own, strict=False)
        return what, changes + ([f"{', '.join(fresh)} left as {FRESH}"] if own else [])
    return _load_tensors(module, _read(found.file), found.file, name, found.label_offset, fresh)


def _load_tensors(
    module: nn.Module, weights: Weights, file: Path, name: str, label_offset: int, fresh_modules: tuple[str, ...]
) -> tuple[str, list[str]]:
    before = {key: tuple(value.shape) for key, value in weights.items()}
    weights = _adapt_channels(module, _filter(module, weights, file, name))
    target = module.state_dict()
    changes = [
        f"{key} resized from {_shape(before[key])} to {_shape(tuple(value.shape))}"
        for key, value in weights.items()
        if key in before and before[key] != tuple(value.shape)
    ]
    fresh, exchanges = _exchange_classifier(module, weights, target, label_offset, fresh_modules)
    _require_fit(weights, target, fresh, file, name)
    module.load_state_dict(weights, strict=False)
    return f"{len(weights)} of {len(target)} tensors", [*changes, *exchanges]


def _read(file: Path) -> Weights:
    """The tensors of a .safetensors or torch file, without the wrappings of DDP, torch.compile and training scripts."""
    if file.suffix == PADDLE:
        found = convert(arrays := read_pdparams(file))
        # What has no place in the model is told with all else that does not fit.
        return found.tensors | {name: torch.from_numpy(arrays[name].copy()) for name in found.left_over}
    _say_if_ema(file)
    try:
        weights: Any = load_state_dict(str(file), weights_only=True)
    except RuntimeError as error:
        if "weights_only" in str(error):
            raise UserError(
                f"Pretrained weights {file}: the file holds more than tensors, and opening it could run foreign code. "
                f"Save its state_dict() alone."
            ) from None
        raise UserError(unreadable(file, error)) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(unreadable(file, error)) from None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        held = ", ".join(map(str, list(weights)[:SHOWN])) or "nothing"
        raise UserError(f"Pretrained weights {file}: no tensors under model, state_dict or model_ema; it holds {held}.")
    return weights


def _say_if_ema(file: Path) -> None:
    """Of a training's checkpoint timm takes the EMA. Nothing but names is read here; the loading reports errors."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        there = [key for key in WEIGHTS_IN if held.get(key) is not None]
        if len(there) > 1 and there[0] in EMA_IN:
            log.info("%s holds %s: the EMA is used.", file, " and ".join(there))


def _filter(module: nn.Module, weights: Weights, file: Path, name: str) -> Weights:
    """timm's own conversion for this kind of model: other layouts, position embedding and patches of another size."""
    home = importlib.import_module(type(module).__module__)
    convert = getattr(home, "checkpoint_filter_fn", None) or getattr(home, "_filter_fn", None)
    if convert is None:
        return dict(weights)
    takes = inspect.signature(convert).parameters
    # DeiT III's first files call their layer scale gamma_1; where there is none the option changes nothing.
    options = {"adapt_layer_scale": True} if "adapt_layer_scale" in takes else {}
    try:
        return dict(convert(weights, module, **options) if len(takes) > 1 else convert(weights))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"Pretrained weights {file} do not fit {name}: {error or type(error).__name__}.") from None


def _adapt_channels(module: nn.Module, weights: Weights) -> Weights:
    """Grey images for a model of colour ones or the reverse: the first convolution as timm converts it."""
    convolutions = _named(module, "first_conv")
    for key in (f"{prefix}.weight" for prefix in convolutions):
        own = module.state_dict().get(key)
        given = weights.get(key)
        if own is None or given is None or own.ndim != 4 or given.ndim != 4 or own.shape[1] == given.shape[1]:
            continue
        try:
            weights[key] = adapt_input_conv(own.shape[1], given, base_chans=given.shape[1])
        except (AssertionError, NotImplementedError):
            continue  # left as it is, it is reported among the tensors that differ
    return weights


def _exchange_classifier(
    module: nn.Module, weights: Weights, target: Weights, label_offset: int, unwanted: tuple[str, ...]
) -> tuple[set[str], list[str]]:
    """Drop a classifier that is unwanted or of another number of classes.

    Gives the tensors that stay fresh, and words for the log.
    """
    fresh = {key for key in target if lies_in(key, unwanted)}
    for key in [key for key in weights if lies_in(key, unwanted)]:
        del weights[key]
    words = [f"{prefix} left as {FRESH} (MODEL.NEW_CLASSIFIER)" for prefix in unwanted]
    for prefix in _named(module, "classifier"):
        keys = [key for key in (f"{prefix}.weight", f"{prefix}.bias") if key in target]
        if not keys or fresh.issuperset(keys):
            continue
        given, own = weights.get(keys[0]), target[keys[0]]
        if given is None:
            fresh.update(keys)
            words.append(f"no {prefix} in it, which stays {FRESH}")
            continue
        if label_offset and given.shape[0] == own.shape[0] + label_offset:
            weights.update({key: weights[key][label_offset:] for key in keys if key in weights})
        elif given.shape[0] != own.shape[0]:
            for key in keys:
                weights.pop(key, None)
            fresh.update(keys)
            words.append(f"{prefix} exchanged ({given.shape[0]} classes there, {own.shape[0]} here, {FRESH})")
    return fresh, words


def _require_fit(weights: Weights, target: Weights, fresh: set[str], file: Path, name: str) -> None:
    differing = [
        f"{key}: {_shape(tuple(weights[key].shape))} in the file, {_shape(tuple(own.shape))} in the model"
        for key, own in target.items()
        if key in weights and weights[key].shape != own.shape
    ]
    missing = [key for key in target if key not in weights and key not in fresh]
    unexpected = [key for key in weights if key not in target]
    lines = [
        line
        for title, found in (
            ("differ", differing),
            ("missing in the file", missing),
            ("unknown to the model", unexpected),
        )
        for line in _listed(title, found)
    ]
    if lines:
        raise UserError("\n".join([f"Pretrained weights {file} do not fit {name}:", *lines]))


def _listed(title: str, found: list[str]) -> list[str]:
    if not found:
        return []
    more = [f"    ... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [f"  {title} ({len(found)}):", *(f"    {line}" for line in found[:SHOWN]), *more]


def _load_npz(module: Any, file: Path, name: str) -> tuple[str, list[str]]:
    """Google's ViT weights (AugReg and its forerunners), through timm's reader for them."""
    if not hasattr(module, "load_pretrained"):
        raise UserError(f"Pretrained weights {file}: .npz files are for ViTs; {name} is a {type(module).__name__}.")
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            shapes = {key: archive[key].shape for key in names if key.endswith(("pos_embedding", "head/bias"))}
    except Exception as error:  # numpy and zlib each raise their own
        raise UserError(unreadable(file, error)) from None
    blocks = {int(found.group(1)) for key in names if (found := re.search(r"encoderblock_(\d+)/", key))}
    if blocks and len(blocks) != len(module.blocks):  # timm's reader would leave the surplus out without a word
        raise UserError(
            f"Pretrained weights {file} do not fit {name}: {len(blocks)} blocks in the file, "
            f"{len(module.blocks)} in the model (MODEL.DEPTH)."
        )
    changes = _npz_changes(module, shapes)
    try:
        module.load_pretrained(str(file))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"Pretrained weights {file} do not fit {name}: {error}.") from None
    return f"{len(names)} arrays", changes


def _npz_changes(module: Any, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    changes = []
    position = next((shape for key, shape in shapes.items() if key.endswith("pos_embedding")), None)
    own = tuple(module.pos_embed.shape) if isinstance(getattr(module, "pos_embed", None), Tensor) else None
    if position and own and position != own:
        changes.append(f"pos_embed resized from {_shape(position)} to {_shape(own)}")
    head = next((shape[-1] for key, shape in shapes.items() if key.endswith("head/bias")), None)
    if head is None:
        changes.append(f"no head in it, which stays {FRESH}")
    elif head != module.num_classes:
        changes.append(f"head exchanged ({head} classes there, {module.num_classes} here, {FRESH})")
    return changes


def _named(module: nn.Module, trait: str) -> tuple[str, ...]:
    """What timm's settings of a model call its classifier or its first convolution."""
    named = (vars(module).get("pretrained_cfg") or {}).get(trait) or ()
    return (named,) if isinstance(named, str) else tuple(named)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
