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
    """Settings of the model's sizes, such as NUM_CLASSES; None for one that the tensors do not tell"""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the model's tensors, by key"""
    classifiers: tuple[str, ...] = CLASSIFIERS
    """Prefixes of the tensors that the file may lack"""

    def count_differing(self, converted: Converted) -> int:
        """Count the tensors that do not match this model; a classifier that the file lacks is no difference."""
        file_shapes = _shapes_of(converted.tensors)
        lacking = [key for key in self.shapes if key not in file_shapes and not key.startswith(self.classifiers)]
        return len(lacking) + len(file_shapes.items() - self.shapes.items())


def _shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def import_weights(file: Path, out: Path, name: str | None) -> int:
    """Convert PaddleViT's weights in `file` to safetensors `out`, log every tensor, and return the exit code.

    `name`: the timm model that -name gives; None to find it. If tensors other than the classifier's do not match the
    model, nothing is written, and the exit code is 1.
    """
    arrays = read_pdparams(file)
    converted = convert(arrays, file)
    target = target_of(file, arrays, converted, name)
    sizes = ", ".join(f"{key} {one_line(value)}" for key, value in target.sizes.items() if value is not None)
    model = f"timm's {target.name}" if target.name else f"a {converted.family} that has no name in timm"
    log.info("%s: %s (%s)", file, model, sizes)
    unmatched = _log_tensors(arrays, converted, target)
    if unmatched:
        count = f"{len(unmatched)} of {len(arrays)} tensors do not match this model ({some_of(unmatched)})"
        log.error("%s: nothing was written. Choose another model with -name NAME.", count)
        return EXIT_FAILED
    lacks_classifier = target.shapes.keys() - converted.tensors.keys()  # nothing else may be missing
    if lacks_classifier:
        log.warning("The file has no classifier: -pretrained will initialise one.")
    tensors = {key: value.contiguous() for key, value in converted.tensors.items() if key in target.shapes}
    write_weights(out, tensors, _header(converted, target, file))
    arguments = [str(out)] + _settings(converted, target)
    log.info("%s: %d tensors. To use it: -pretrained %s", out, len(tensors), shlex.join(arguments))
    return EXIT_DONE


def _settings(converted: Converted, target: Target) -> list[str]:
    """Return the settings KEY=VALUE that a command needs beside -pretrained; N stands for a number to choose.

    Without a timm name, they include all sizes, and any name does, except that only the name of a model says that it
    has a distillation token.
    """
    sizes = target.sizes
    name = target.name
    if name is None:
        name = DISTILLED if "dist_token" in converted.tensors else "mine"
    settings = [f"MODEL.TYPE={converted.family}", f"MODEL.NAME={name}"]
    settings += [f"DATA.{key}={sizes[key]}" for key in IMAGE_KEYS]
    classes = sizes["NUM_CLASSES"] or "N"
    settings.append(f"MODEL.NUM_CLASSES={classes}")
    if target.name is None:
        for key, value in sizes.items():
            if key not in IMAGE_KEYS and key != "NUM_CLASSES":
                text = "N" if value is None else one_line(value)
                settings.append(f"MODEL.{key}={text}")
    return settings


def _log_tensors(arrays: dict[str, np.ndarray], converted: Converted, target: Target) -> list[str]:
    """Log what becomes of each tensor, and return the names of those that do not match the model `target`.

    Such tensors are left over in the file, missing in it, or of another size. A classifier that is missing is no
    mismatch, nor one that is left over in a family whose rules name all tensors: the model may get another one.
    """
    # Tensors of the file that the model has, with their names in PaddleViT and in timm, and those that it lacks.
    shapes = _shapes_of(converted.tensors)
    used_lines = []
    unused = list(converted.unused)
    for paddle_name, timm_key in converted.used.items():
        if timm_key not in target.shapes:
            unused.append(paddle_name)
            continue
        line = f"{paddle_name} -> {timm_key}  {_format_shape(shapes[timm_key])}"
        if is_transposed(paddle_name, arrays[paddle_name]):
            line += ", transposed"
        used_lines.append(line)

    # Tensors of the model that the file does not have, or has in another size.
    missing = [key for key in target.shapes if key not in shapes]
    resized = {
        key: f"{key}  {_format_shape(shape)} in the file, {_format_shape(target.shapes[key])} in the model"
        for key, shape in shapes.items()
        if key in target.shapes and target.shapes[key] != shape
    }

    for title, lines in (
        ("used", used_lines),
        ("skipped, since timm computes them", converted.computed),
        ("added to the batch norm behind them", converted.folded),
        ("unused", unused),
        ("missing", missing),
        ("of another size", list(resized.values())),
    ):
        if lines or title in ("unused", "missing"):
            log.info("\n  ".join([f"{title} ({len(lines)}):"] + lines))
    has_rule_for_each_tensor = converted.closed
    if has_rule_for_each_tensor:
        unused = [paddle_name for paddle_name in unused if not paddle_name.startswith(OF_A_CLASSIFIER)]
    lacking = [key for key in missing if not key.startswith(target.classifiers)]
    return unused + lacking + list(resized)


def _header(converted: Converted, target: Target, file: Path) -> dict[str, str]:
    """Make the header of the written file, from which predict.py and evaluate.py build the model.

    It has the fields that scripts/checkpoint.py strip writes. If the model has no name in timm, or the file no
    classifier, these tools cannot build it: then the header has only the name of `file` and the number of classes.
    """
    classes = target.sizes["NUM_CLASSES"]
    header: dict[str, Any] = {"converted_from": file.name, "num_classes": classes}
    if not target.name or not classes:
        return {"format": "pt", **encoded(header)}

    # Settings of the model and of its image preparation, which is timm's for the same model. Loading them as a config
    # adds the defaults of the others.
    preprocessing = timm_preprocessing(target.name, f"timm's {target.name}")
    assert preprocessing is not None, "the name is one of timm's"
    values: dict[str, Any] = {
        **preprocessing.values,
        "MODEL.TYPE": converted.family,
        "MODEL.NAME": target.name,
        "MODEL.NUM_CLASSES": classes,
        **{f"DATA.{key}": target.sizes[key] for key in IMAGE_KEYS},
    }
    config = load_config(None, {key: (value, "the file") for key, value in values.items()}, {}).config
    settings = values_to_keep(config).items()
    name, arguments = timm_call(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    header |= {
        "timm": {"name": name, "arguments": arguments},
        "model": target.name,
        "made_by": "vitamp",
        "weights": "the model's weights",
        "input": input_of(config.DATA),
        "settings": {key: value for key, value in settings if key.startswith(("MODEL.", "DATA."))},
        "classes": None,
        "choices": {},
        "fp32_modules": [],
    }
    return {"format": "pt", **encoded(header)}


def _format_shape(shape: Any) -> str:
    """Write a shape as text, such as 768x768."""
    return "x".join(map(str, shape))


def target_of(file: Path, arrays: dict[str, np.ndarray], converted: Converted, name: str | None) -> Target:
    """Find timm's model for the weights; UserError if they are of no family that can be converted.

    Candidates, of which the first one is taken: the model that -name gives (`name`); the model of the file's name, if
    the tensors fit it; a model that timm has with the sizes of the tensors; a model with these sizes that has no name
    in timm. A family whose sizes do not follow from its tensors has published models only, see `_published_model`.
    """
    if name is not None and not is_timm_name(name):
        raise UserError(
            f"-name {name}: timm has no model of that name; main_single_gpu.py -list_models lists all models."
        )
    has_rule_for_each_tensor = converted.closed
    if not has_rule_for_each_tensor:  # then no rule says which tensor has which size
        return _published_model(file, converted, name)
    try:
        sizes = sizes_of_weights(converted)
    except (KeyError, ValueError, IndexError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else f"no model has such tensors ({error})"
        examples = some_of(converted.unused or list(arrays))
        raise UserError(
            f"{file}: no weights of a family of PaddleViT that can be converted: {len(converted.unused)} of "
            f"{len(arrays)} tensors match no rule ({examples}), and {why}."
        ) from None

    # The file's name may be wrong, so the tensors must fit the model. The last guess needs no such comparison: -name
    # decides, or the sizes of this model are those of the tensors.
    guesses = [name] if name else [file.name.partition(".")[0], timm_name(converted, sizes)]
    *_, last_guess = guesses
    file_shapes = _shapes_of(converted.tensors)
    for guess in guesses:
        if not guess or not is_timm_name(guess):
            continue
        model_shapes = _model_shapes(converted, {"NAME": guess}, sizes)
        if guess == last_guess or file_shapes.items() <= model_shapes.items():
            return Target(guess, sizes, model_shapes)
    return _unnamed_model(converted, sizes)


def _unnamed_model(converted: Converted, sizes: dict[str, Any]) -> Target:
    """Return the target for weights of these sizes for which timm has no name: a model of the family, resized."""
    base = DISTILLED if "dist_token" in converted.tensors else converted.family
    model_sizes = {key: value for key, value in sizes.items() if key not in IMAGE_KEYS and value is not None}
    heads = {"NUM_HEADS": sizes["NUM_HEADS"] or 1}  # no tensor's shape of a ViT depends on it
    return Target(None, sizes, _model_shapes(converted, {"NAME": base, **model_sizes, **heads}, sizes))


def _published_model(file: Path, converted: Converted, name: str | None) -> Target:
    """Return the published model of the family whose tensors differ least from the file's.

    Of several that differ equally, the model of the file's name is taken, else the first. `name`: the model of -name,
    which is taken in any case; None without.
    """
    family = families()[converted.family]
    model_of_file_name = family.timm_name(file.name.partition(".")[0])  # None if it is the name of no model
    names = [name] if name else dict.fromkeys([model_of_file_name] + list(family.models))
    candidates = [_target_of_name(converted, candidate) for candidate in names if candidate]
    best = min(candidates, key=lambda target: target.count_differing(converted))
    if not name and best.name != model_of_file_name and best.count_differing(converted) == 0:
        log.info("%s: its name is that of no %s; timm's %s has its tensors.", file, family.title, best.name)
    return best


def _target_of_name(converted: Converted, name: str) -> Target:
    """Return timm's model `name` with the image size of its published weights and the number of classes of the file."""
    pretrained = timm_weights(name)
    assert pretrained is not None, "the name is one of timm's"
    timm_classifier: Any = pretrained.classifier  # a name, several, or None
    classifiers = (timm_classifier,) if isinstance(timm_classifier, str) else tuple(timm_classifier or ())
    weights = [converted.tensors.get(f"{classifier}.weight") for classifier in classifiers]
    class_counts = [weight.shape[0] for weight in weights if weight is not None]
    sizes = {
        "IMAGE_SIZE": pretrained.input_size[-1],
        "IMAGE_CHANNELS": pretrained.input_size[0],
        "NUM_CLASSES": class_counts[0] if class_counts else None,
    }
    shapes = _model_shapes(converted, {"NAME": name}, sizes)
    return Target(name, sizes, shapes, tuple(f"{classifier}." for classifier in classifiers))


def _model_shapes(converted: Converted, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model of the weights' family, without allocating its weights.

    `settings`: those of the section MODEL, without its type (the family) and number of classes. `sizes`: number of
    classes (None: the default), size and channels of images.
    """
    classes = {"NUM_CLASSES": sizes["NUM_CLASSES"]} if sizes["NUM_CLASSES"] else {}
    config = ModelConfig.model_validate({"TYPE": converted.family, **settings, **classes})
    return _shapes_of(build_without_weights(config, sizes["IMAGE_SIZE"], sizes["IMAGE_CHANNELS"]).state_dict())
