"""Conversion of PaddleViT weights: choose timm's model, report on every tensor, and write a safetensors file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import timm
from tqdm import tqdm

from models.weights.paddle_file import read_pdparams
from models.weights.paddle_names import OF_A_CLASSIFIER, Converted, convert, is_transposed
from tools.common.progress import progress_bar
from tools.common.weights import write_weights
from tools.export.paddle_model import DISTILLED, IMAGE_KEYS, Target, some_of, target_of
from utils.config import load_config
from utils.config.keys import values_to_keep
from utils.errors import EXIT_DONE, EXIT_FAILED
from utils.log import log


def import_weights(file: Path, out: Path, name: str | None) -> int:
    """Convert `file` and write `out`. Exit code 1, and no file, if tensors other than the classifier's do not match."""
    with progress_bar(4, "steps", "reading") as bar:
        arrays = read_pdparams(file)
        _next_step(bar, "converting")
        converted = convert(arrays, file)
        _next_step(bar, "comparing")
        target = target_of(file, arrays, converted, name)
        log.info("%s: %s", file, _summary(converted, target))
        missing = [key for key in target.shapes if key not in converted.tensors]
        if unmatched := _report_tensors(arrays, converted, target, missing):
            log.error(
                "%d of %d tensors do not match this model (%s): nothing was written. Choose another model with -name "
                "NAME.",
                len(unmatched),
                len(arrays),
                some_of(unmatched),
            )
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


def _report_tensors(
    arrays: dict[str, np.ndarray], converted: Converted, target: Target, missing: list[str]
) -> list[str]:
    """Log what becomes of each tensor. Returns those that do not match the model, but for a classifier's."""
    used = [
        f"{paddle} -> {key}  {_shape(converted.tensors[key].shape)}"
        + (", transposed" if is_transposed(paddle, arrays[paddle]) else "")
        for paddle, key in converted.used.items()
        if key in target.shapes
    ]
    unused = [*converted.unused, *(paddle for paddle, key in converted.used.items() if key not in target.shapes)]
    resized = {
        key: f"{key}  {_shape(value.shape)} in the file, {_shape(target.shapes[key])} in the model"
        for key, value in converted.tensors.items()
        if key in target.shapes and tuple(value.shape) != target.shapes[key]
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
            log.info("\n".join([f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)]))
    left_out = () if converted.by_rules else OF_A_CLASSIFIER
    lacking = [key for key in missing if not key.startswith(target.classifiers)]
    return [*(paddle for paddle in unused if not paddle.startswith(left_out)), *lacking, *resized]


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
