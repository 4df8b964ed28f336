"""Conversion of PaddleViT weights: choose timm's model, report on every tensor, and write a safetensors file."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
from tqdm import tqdm

from models import build_without_weights
from models.names import is_timm_name
from models.weights.paddle_file import read_pdparams
from models.weights.paddle_names import (
    CLASSIFIERS,
    OF_A_CLASSIFIER,
    Converted,
    convert,
    is_transposed,
    sizes_of_weights,
    timm_name,
)
from tools.common.progress import progress_bar
from tools.common.weights import write_weights
from utils.config import load_config
from utils.config.keys import values_to_keep
from utils.config.model import ModelConfig
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log

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


def import_weights(file: Path, out: Path, name: str | None) -> int:
    """Convert `file` and write `out`. Exit code 1, and no file, if tensors other than the classifier's do not match."""
    with progress_bar(4, "steps", "reading") as bar:
        arrays = read_pdparams(file)
        _next_step(bar, "converting")
        converted = convert(arrays)
        try:
            sizes = sizes_of_weights(converted)
        except (KeyError, ValueError, IndexError) as error:
            some = ", ".join(list(arrays)[:5])
            why = f"{error} is missing" if isinstance(error, KeyError) else f"no model has such tensors ({error})"
            raise UserError(
                f"{file}: not weights of PaddleViT's ViT, DeiT or Swin: {why}. The file has {some}."
            ) from None
        _next_step(bar, "comparing")
        target = _target(file, converted, sizes, name)
        log.info("%s: %s", file, _summary(converted, target))
        missing = [key for key in target.shapes if key not in converted.tensors]
        if not _report_tensors(arrays, converted, target, missing):
            log.error("The tensors do not match this model: nothing was written. Choose another model with -name NAME.")
            return EXIT_FAILED
        if missing:
            log.warning("The file has no classifier: -pretrained will initialise one.")
        _next_step(bar, "writing")
        tensors = {key: value.contiguous() for key, value in converted.tensors.items() if key in target.shapes}
        write_weights(out, tensors, _header(converted, target, file))
    flags = shlex.join([str(out), *_flags(converted, target)])
    log.info("%s: %d tensors. To use it: -pretrained %s", out, len(tensors), flags)
    return EXIT_DONE


def _next_step(bar: tqdm, what: str) -> None:
    bar.update()
    bar.set_description(what)


def _report_tensors(arrays: dict[str, np.ndarray], converted: Converted, target: Target, missing: list[str]) -> bool:
    """Log what becomes of each tensor. True if all that is not the classifier's matches the model."""
    used = [
        f"{paddle} -> {key}  {_shape(converted.tensors[key].shape)}"
        + (", transposed" if is_transposed(paddle, arrays[paddle]) else "")
        for paddle, key in converted.used.items()
        if key in target.shapes
    ]
    unused = [*converted.unused, *(paddle for paddle, key in converted.used.items() if key not in target.shapes)]
    resized = [
        f"{key}  {_shape(value.shape)} in the file, {_shape(target.shapes[key])} in the model"
        for key, value in converted.tensors.items()
        if key in target.shapes and tuple(value.shape) != target.shapes[key]
    ]
    for title, lines in (
        ("used", used),
        ("skipped, since timm computes them", converted.computed),
        ("unused", unused),
        ("missing", missing),
        ("of another size", resized),
    ):
        if lines or title in ("unused", "missing"):
            log.info("\n".join([f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)]))
    matches = all(key.startswith(CLASSIFIERS) for key in missing)
    return matches and not resized and all(paddle.startswith(OF_A_CLASSIFIER) for paddle in unused)


def _target(file: Path, converted: Converted, sizes: dict[str, Any], name: str | None) -> Target:
    """Model named by -name, by the file's name, or by its sizes; else a model of these sizes without a name."""
    if name is not None and not is_timm_name(name):
        raise UserError(
            f"-name {name}: timm has no model of that name; main_single_gpu.py -list_models lists all models."
        )
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


def _summary(converted: Converted, target: Target) -> str:
    sizes = ", ".join(f"{key} {_text(value)}" for key, value in target.sizes.items() if value is not None)
    named = f"timm's {target.name}" if target.name else f"a {converted.family} that has no name in timm"
    return f"{named} ({sizes})"


def _flags(converted: Converted, target: Target) -> list[str]:
    """Settings to give beside -pretrained."""
    sizes = target.sizes
    # Only the name of a model says that it has a distillation token.
    unnamed = DISTILLED if "dist_token" in converted.tensors else "mine"
    words = [
        f"MODEL.TYPE={converted.family}",
        f"MODEL.NAME={target.name or unnamed}",
        *(f"DATA.{key}={sizes[key]}" for key in IMAGE_KEYS),
        f"MODEL.NUM_CLASSES={sizes['NUM_CLASSES'] or 'N'}",
    ]
    if target.name:
        return words
    rest = {key: value for key, value in sizes.items() if key not in (*IMAGE_KEYS, "NUM_CLASSES")}
    return [*words, *(f"MODEL.{key}={'N' if value is None else _text(value)}" for key, value in rest.items())]


def _header(converted: Converted, target: Target, file: Path) -> dict[str, str]:
    """Header of the file, like that of scripts/checkpoint.py strip, so that predict.py and evaluate.py take it."""
    about: dict[str, Any] = {"converted_from": file.name, "num_classes": target.sizes["NUM_CLASSES"]}
    if target.name and target.sizes["NUM_CLASSES"]:
        about |= {"model": target.name, "made_by": "vitamp", "weights": "the model's weights"}
        settings = _settings(converted, target)
        data = {key.removeprefix("DATA."): value for key, value in settings.items() if key.startswith("DATA.")}
        about["input"] = {
            "image_size": data["IMAGE_SIZE"],
            "channels": data["IMAGE_CHANNELS"],
            "crop_pct": data["CROP_PCT"],
            "crop_mode": data["CROP_MODE"],
            "interpolation": data["INTERPOLATION"],
            "mean": data["IMAGENET_MEAN"],
            "std": data["IMAGENET_STD"],
        }
        about |= {"settings": settings, "classes": None, "choices": {}, "fp32_modules": []}
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    return {"format": "pt", **plain}


def _settings(converted: Converted, target: Target) -> dict[str, Any]:
    """Settings of the model and of its image preparation, which is timm's for the same model."""
    pretrained = timm.get_pretrained_cfg(target.name or "")
    assert pretrained is not None  # is_timm_name
    values: dict[str, Any] = {
        "MODEL.TYPE": converted.family,
        "MODEL.NAME": target.name,
        "MODEL.NUM_CLASSES": target.sizes["NUM_CLASSES"],
        **{f"DATA.{key}": target.sizes[key] for key in IMAGE_KEYS},
        "DATA.CROP_PCT": pretrained.crop_pct,
        "DATA.CROP_MODE": pretrained.crop_mode,
        "DATA.IMAGENET_MEAN": list(pretrained.mean),
        "DATA.IMAGENET_STD": list(pretrained.std),
    }
    config = load_config(None, {key: (value, "the file") for key, value in values.items()}, {}).config
    return {key: value for key, value in values_to_keep(config).items() if key.startswith(("MODEL.", "DATA."))}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape))
