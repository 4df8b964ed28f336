"""Conversion of PaddleViT weights: choose timm's model, report on every tensor, and write a safetensors file."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.inputs.auto import timm_preprocessing
from engine.inputs.batches import input_of
from models.build import build_without_weights, is_timm_name, timm_call, timm_weights
from models.weights.paddle import (
    CLASSIFIERS,
    OF_A_CLASSIFIER,
    Converted,
    convert,
    is_transposed,
    read_pdparams,
    sizes_of_weights,
    timm_name,
)
from tools.common.weights import write_weights
from utils.config import load_config
from utils.config.keys import values_to_keep
from utils.config.kinds import one_line
from utils.config.model import ModelConfig
from utils.config.paddlevit import families
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log
from utils.text import some_of
from vitamp.weights import encoded

IMAGE_KEYS = ("IMAGE_SIZE", "IMAGE_CHANNELS")
DISTILLED = "deit_tiny_distilled_patch16_224"
"""Base name for every distilled model without a timm name: its sizes are overridden."""


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
        mine = _shapes_of(converted.tensors)
        lacking = [key for key in self.shapes if key not in mine and not key.startswith(self.classifiers)]
        return len(lacking) + len(mine.items() - self.shapes.items())


def _shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def import_weights(file: Path, out: Path, name: str | None) -> int:
    """Convert `file` and write `out`. Exit code 1, and no file, if tensors other than the classifier's do not match."""
    arrays = read_pdparams(file)
    converted = convert(arrays, file)
    target = target_of(file, arrays, converted, name)
    sizes = ", ".join(f"{key} {one_line(value)}" for key, value in target.sizes.items() if value is not None)
    named = f"timm's {target.name}" if target.name else f"a {converted.family} that has no name in timm"
    log.info("%s: %s (%s)", file, named, sizes)
    unmatched = _unmatched(arrays, converted, target)
    if unmatched:
        numbers = f"{len(unmatched)} of {len(arrays)} tensors do not match this model ({some_of(unmatched)})"
        log.error("%s: nothing was written. Choose another model with -name NAME.", numbers)
        return EXIT_FAILED
    if target.shapes.keys() - converted.tensors.keys():
        log.warning("The file has no classifier: -pretrained will initialise one.")
    tensors = {key: value.contiguous() for key, value in converted.tensors.items() if key in target.shapes}
    write_weights(out, tensors, _header(converted, target, file))
    words = [str(out)] + _settings(converted, target)
    log.info("%s: %d tensors. To use it: -pretrained %s", out, len(tensors), shlex.join(words))
    return EXIT_DONE


def _settings(converted: Converted, target: Target) -> list[str]:
    """To give beside -pretrained."""
    given = target.sizes
    name = target.name
    if name is None:  # only the name of a model says that it has a distillation token
        name = DISTILLED if "dist_token" in converted.tensors else "mine"
    words = [f"MODEL.TYPE={converted.family}", f"MODEL.NAME={name}"]
    words += [f"DATA.{key}={given[key]}" for key in IMAGE_KEYS]
    classes = given["NUM_CLASSES"] or "N"
    words.append(f"MODEL.NUM_CLASSES={classes}")
    if target.name is None:
        for key, value in given.items():
            if key not in IMAGE_KEYS and key != "NUM_CLASSES":
                text = "N" if value is None else one_line(value)
                words.append(f"MODEL.{key}={text}")
    return words


def _unmatched(arrays: dict[str, np.ndarray], converted: Converted, target: Target) -> list[str]:
    """Log what becomes of each tensor, and return those that do not match the model, but for a classifier's."""
    shapes = _shapes_of(converted.tensors)
    missing = [key for key in target.shapes if key not in shapes]
    used = []
    unused = list(converted.unused)
    for paddle, key in converted.used.items():
        if key not in target.shapes:
            unused.append(paddle)
            continue
        line = f"{paddle} -> {key}  {_shape(shapes[key])}"
        if is_transposed(paddle, arrays[paddle]):
            line += ", transposed"
        used.append(line)
    resized = {
        key: f"{key}  {_shape(shape)} in the file, {_shape(target.shapes[key])} in the model"
        for key, shape in shapes.items()
        if target.shapes.get(key, shape) != shape
    }
    for title, lines in (
        ("used", used),
        ("skipped, since timm computes them", converted.computed),
        ("added to the batch norm behind them", converted.folded),
        ("unused", unused),
        ("missing", missing),
        ("of another size", list(resized.values())),
    ):
        if lines or title in ("unused", "missing"):
            log.info("\n  ".join([f"{title} ({len(lines)}):"] + lines))
    if converted.closed:
        unused = [paddle for paddle in unused if not paddle.startswith(OF_A_CLASSIFIER)]
    lacking = [key for key in missing if not key.startswith(target.classifiers)]
    return unused + lacking + list(resized)


def _header(converted: Converted, target: Target, file: Path) -> dict[str, str]:
    """Header of the file, like that of scripts/checkpoint.py strip, so that predict.py and evaluate.py take it."""
    about: dict[str, Any] = {"converted_from": file.name, "num_classes": target.sizes["NUM_CLASSES"]}
    if target.name and target.sizes["NUM_CLASSES"]:
        # Settings of the model and of its image preparation, which is timm's for the same model.
        preprocessing = timm_preprocessing(target.name, f"timm's {target.name}")
        assert preprocessing is not None  # is_timm_name
        values: dict[str, Any] = {
            **preprocessing[0],
            "MODEL.TYPE": converted.family,
            "MODEL.NAME": target.name,
            "MODEL.NUM_CLASSES": target.sizes["NUM_CLASSES"],
            **{f"DATA.{key}": target.sizes[key] for key in IMAGE_KEYS},
        }
        config = load_config(None, {key: (value, "the file") for key, value in values.items()}, {}).config
        name, arguments = timm_call(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
        about |= {
            "timm": {"name": name, "arguments": arguments},
            "model": target.name,
            "made_by": "vitamp",
            "weights": "the model's weights",
            "input": input_of(config.DATA),
            "settings": {k: v for k, v in values_to_keep(config).items() if k.startswith(("MODEL.", "DATA."))},
            "classes": None,
            "choices": {},
            "fp32_modules": [],
        }
    return {"format": "pt", **encoded(about)}


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape))


def target_of(file: Path, arrays: dict[str, np.ndarray], converted: Converted, name: str | None) -> Target:
    if name is not None and not is_timm_name(name):
        raise UserError(
            f"-name {name}: timm has no model of that name; main_single_gpu.py -list_models lists all models."
        )
    if not converted.closed:
        return _of_family(file, converted, name)
    try:
        sizes = sizes_of_weights(converted)
    except (KeyError, ValueError, IndexError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else f"no model has such tensors ({error})"
        some = some_of(converted.unused or list(arrays))
        raise UserError(
            f"{file}: no weights of a family of PaddleViT that can be converted: {len(converted.unused)} of "
            f"{len(arrays)} tensors match no rule ({some}), and {why}."
        ) from None
    # The model of -name, of the file's name, or of these sizes; else a model of these sizes without a name.
    guesses = [name] if name else [file.name.partition(".")[0], timm_name(converted, sizes)]
    shapes = _shapes_of(converted.tensors)
    for guess in guesses:
        if not guess or not is_timm_name(guess):
            continue
        expected = _shapes(converted, {"NAME": guess}, sizes)
        if guess == guesses[-1] or shapes.items() <= expected.items():
            return Target(guess, sizes, expected)
    return _unnamed(converted, sizes)


def _unnamed(converted: Converted, sizes: dict[str, Any]) -> Target:
    base = DISTILLED if "dist_token" in converted.tensors else converted.family
    model_sizes = {key: value for key, value in sizes.items() if key not in IMAGE_KEYS and value is not None}
    heads = {"NUM_HEADS": sizes["NUM_HEADS"] or 1}  # no tensor's shape of a ViT depends on it
    return Target(None, sizes, _shapes(converted, {"NAME": base, **model_sizes, **heads}, sizes))


def _of_family(file: Path, converted: Converted, name: str | None) -> Target:
    """The model of -name or of the file's name, else the first of the family with such tensors."""
    family = families()[converted.family]
    named = family.timm_name(file.name.partition(".")[0])
    guesses = [name] if name else dict.fromkeys([named] + list(family.models))
    candidates = [_published(converted, guess) for guess in guesses if guess]
    best = min(candidates, key=lambda target: target.differing(converted))
    if not name and best.name != named and not best.differing(converted):
        log.info("%s: its name is that of no %s; timm's %s has its tensors.", file, family.title, best.name)
    return best


def _published(converted: Converted, name: str) -> Target:
    pretrained = timm_weights(name)
    assert pretrained is not None  # is_timm_name
    given: Any = pretrained.classifier
    classifiers = (given,) if isinstance(given, str) else tuple(given or ())
    weights = [converted.tensors.get(f"{classifier}.weight") for classifier in classifiers]
    sizes = {
        "IMAGE_SIZE": pretrained.input_size[-1],
        "IMAGE_CHANNELS": pretrained.input_size[0],
        "NUM_CLASSES": next((weight.shape[0] for weight in weights if weight is not None), None),
    }
    shapes = _shapes(converted, {"NAME": name}, sizes)
    return Target(name, sizes, shapes, tuple(f"{classifier}." for classifier in classifiers))


def _shapes(converted: Converted, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    classes = {"NUM_CLASSES": sizes["NUM_CLASSES"]} if sizes["NUM_CLASSES"] else {}
    config = ModelConfig.model_validate({"TYPE": converted.family, **settings, **classes})
    return _shapes_of(build_without_weights(config, sizes["IMAGE_SIZE"], sizes["IMAGE_CHANNELS"]).state_dict())
