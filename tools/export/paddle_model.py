"""timm's model for weights of PaddleViT: named by the user or the file, or found by the tensors' sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm

from models import build_without_weights
from models.names import is_timm_name
from models.weights.paddle_names import CLASSIFIERS, Converted, sizes_of_weights, timm_name
from utils.config.model import ModelConfig
from utils.config.paddlevit.table import families
from utils.errors import UserError
from utils.log import log

IMAGE_KEYS = ("IMAGE_SIZE", "IMAGE_CHANNELS")
DISTILLED = "deit_tiny_distilled_patch16_224"
"""Base name for every distilled model without a timm name: its sizes are overridden."""
MOST_NAMED = 5


@dataclass(frozen=True)
class Target:
    """timm's model that the weights are for."""

    name: str | None
    """timm's name; None where timm has none for these sizes"""
    sizes: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the model's tensors, by key"""
    classifiers: tuple[str, ...] = CLASSIFIERS
    """Prefixes of the tensors that the file may lack"""

    def differing(self, converted: Converted) -> int:
        """How many tensors do not match, but for a classifier that the file lacks."""
        mine = {key: tuple(value.shape) for key, value in converted.tensors.items()}
        lacking = [key for key in self.shapes if key not in mine and not key.startswith(self.classifiers)]
        return len(lacking) + sum(self.shapes.get(key) != shape for key, shape in mine.items())


def target_of(file: Path, arrays: dict[str, np.ndarray], converted: Converted, name: str | None) -> Target:
    if name is not None and not is_timm_name(name):
        raise UserError(
            f"-name {name}: timm has no model of that name; main_single_gpu.py -list_models lists all models."
        )
    if converted.by_rules:
        return _of_family(file, converted, name)
    try:
        sizes = sizes_of_weights(converted)
    except (KeyError, ValueError, IndexError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else f"no model has such tensors ({error})"
        raise UserError(
            f"{file}: no weights of a family of PaddleViT that can be converted: {len(converted.unused)} of "
            f"{len(arrays)} tensors match no rule ({some_of(converted.unused or list(arrays))}), and {why}."
        ) from None
    return _of_sizes(file, converted, sizes, name)


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _of_family(file: Path, converted: Converted, name: str | None) -> Target:
    """The model of -name or of the file's name, else the first of the family that has such tensors."""
    family = families()[converted.family]
    named = family.timm_name(file.name.partition(".")[0])
    guesses = [name] if name else [*filter(None, [named]), *family.models]
    best, fewest = None, 0
    for guess in dict.fromkeys(guesses):
        target = _published(converted, guess)
        differing = target.differing(converted)
        if best is None or differing < fewest:
            best, fewest = target, differing
        if not differing:
            break
    assert best is not None  # no family is without models
    if not name and not fewest and best.name != named:
        log.info("%s: its name is that of no %s; timm's %s has its tensors.", file, family.title, best.name)
    return best


def _published(converted: Converted, name: str) -> Target:
    pretrained = timm.get_pretrained_cfg(name)
    assert pretrained is not None  # is_timm_name
    given: Any = pretrained.classifier
    classifiers = (given,) if isinstance(given, str) else tuple(given or ())
    weights = (converted.tensors.get(f"{classifier}.weight") for classifier in classifiers)
    sizes = {
        "IMAGE_SIZE": pretrained.input_size[-1],
        "IMAGE_CHANNELS": pretrained.input_size[0],
        "NUM_CLASSES": next((weight.shape[0] for weight in weights if weight is not None), None),
    }
    shapes = _shapes(converted, {"NAME": name}, sizes)
    return Target(name, sizes, shapes, tuple(f"{classifier}." for classifier in classifiers))


def _of_sizes(file: Path, converted: Converted, sizes: dict[str, Any], name: str | None) -> Target:
    """Model named by -name, by the file's name, or by its sizes; else a model of these sizes without a name."""
    guesses = [name] if name else [file.name.partition(".")[0], timm_name(converted, sizes)]
    shapes = {key: tuple(value.shape) for key, value in converted.tensors.items()}
    for guess in guesses:
        if not guess or not is_timm_name(guess):
            continue
        expected = _shapes(converted, {"NAME": guess}, sizes)
        matches = all(expected.get(key) == shape for key, shape in shapes.items())
        if matches or guess == guesses[-1]:
            return Target(guess, sizes, expected)
    base = DISTILLED if "dist_token" in shapes else converted.family
    model_sizes = {key: value for key, value in sizes.items() if key not in IMAGE_KEYS and value is not None}
    heads = {"NUM_HEADS": sizes["NUM_HEADS"] or 1}  # no tensor's shape of a ViT depends on it
    return Target(None, sizes, _shapes(converted, {"NAME": base, **model_sizes, **heads}, sizes))


def _shapes(converted: Converted, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    classes = {"NUM_CLASSES": sizes["NUM_CLASSES"]} if sizes["NUM_CLASSES"] else {}
    config = ModelConfig.model_validate({"TYPE": converted.family, **settings, **classes})
    model = build_without_weights(config, sizes["IMAGE_SIZE"], sizes["IMAGE_CHANNELS"])
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}
