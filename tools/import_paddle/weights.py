"""scripts/import_paddle.py: which model the weights are of, what became of each tensor, and the file they go to."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

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
from tools.common.weights import write_weights
from utils.config import load_config
from utils.config.keys import values_to_keep
from utils.config.model import ModelConfig
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log

OF_THE_IMAGE = ("IMAGE_SIZE", "IMAGE_CHANNELS")
DISTILLED = "deit_tiny_distilled_patch16_224"
"""Of any sizes, where they are given."""


@dataclass(frozen=True)
class Model:
    """What the weights are to be of."""

    name: str | None
    """timm's, where it has one."""
    sizes: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Of its tensors."""


def import_weights(file: Path, out: Path, name: str | None) -> int:
    arrays = read_pdparams(file)
    found = convert(arrays)
    try:
        sizes = sizes_of_weights(found)
    except (KeyError, ValueError, IndexError) as error:
        some = ", ".join(list(arrays)[:5])
        raise UserError(
            f"{file}: not weights of PaddleViT's ViT, DeiT or Swin ({error} is not there); it has {some}."
        ) from None
    model = _model(file, found, sizes, name)
    differing = [
        f"{key}  {_shape(value.shape)} in the file, {_shape(model.shapes[key])} in the model"
        for key, value in found.tensors.items()
        if key in model.shapes and tuple(value.shape) != model.shapes[key]
    ]
    missing = [key for key in model.shapes if key not in found.tensors]
    unused = [*found.unused, *(there for there, key in found.used.items() if key not in model.shapes)]
    used = [
        f"{there} -> {key}  {_shape(found.tensors[key].shape)}"
        + (", transposed" if is_transposed(there, arrays[there]) else "")
        for there, key in found.used.items()
        if key in model.shapes
    ]
    log.info("%s: %s", file, _words(found, model))
    for title, lines in (
        ("used", used),
        ("not taken, since it follows from the sizes", found.computed),
        ("unused", unused),
        ("missing", missing),
        ("of another size", differing),
    ):
        if lines or title in ("unused", "missing"):
            log.info("\n".join([f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)]))
    amiss = [key for key in missing if not key.startswith(CLASSIFIERS)]
    if amiss or differing or any(not there.startswith(OF_A_CLASSIFIER) for there in unused):
        log.error("This is not the whole of that model: nothing was written. -name NAME names another.")
        return EXIT_FAILED
    if missing:
        log.warning("There is no classifier in it: -pretrained will begin with a fresh one.")
    kept = {key: value.contiguous() for key, value in found.tensors.items() if key in model.shapes}
    write_weights(out, kept, _header(found, model, file))
    log.info("%s: %d tensors. Use it by -pretrained %s", out, len(kept), shlex.join([str(out), *_how(found, model)]))
    return EXIT_DONE


def _model(file: Path, found: Converted, sizes: dict[str, Any], name: str | None) -> Model:
    """Named by the user, by the file, or by its sizes; else of these sizes and without a name."""
    if name is not None and not is_timm_name(name):
        raise UserError(f"-name {name}: timm has no model of that name; main_single_gpu.py -list_models shows them.")
    guesses = [name] if name else [file.name.partition(".")[0], timm_name(found, sizes)]
    shapes = {key: tuple(value.shape) for key, value in found.tensors.items()}
    for guess in guesses:
        if not guess or not is_timm_name(guess):
            continue
        there = _shapes(found, {"NAME": guess}, sizes)
        fits = all(there.get(key) == shape for key, shape in shapes.items())
        if fits or guess == guesses[-1]:
            return Model(guess, sizes, there)
    base = DISTILLED if "dist_token" in shapes else found.family
    parts = {key: value for key, value in sizes.items() if key not in OF_THE_IMAGE and value is not None}
    heads = {"NUM_HEADS": sizes["NUM_HEADS"] or 1}  # no tensor of a ViT's depends on them
    return Model(None, sizes, _shapes(found, {"NAME": base, **parts, **heads}, sizes))


def _shapes(found: Converted, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    classes = {"NUM_CLASSES": sizes["NUM_CLASSES"]} if sizes["NUM_CLASSES"] else {}
    config = ModelConfig.model_validate({"TYPE": found.family, **settings, **classes})
    model = build_without_weights(config, sizes["IMAGE_SIZE"], sizes["IMAGE_CHANNELS"])
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _words(found: Converted, model: Model) -> str:
    sizes = ", ".join(f"{key} {_text(value)}" for key, value in model.sizes.items() if value is not None)
    named = f"timm's {model.name}" if model.name else f"a {found.family} of sizes that timm has no name for"
    return f"{named} ({sizes})"


def _how(found: Converted, model: Model) -> list[str]:
    """The settings it goes with."""
    sizes = model.sizes
    # By its name alone a model is known to have a token for a teacher.
    unnamed = DISTILLED if "dist_token" in found.tensors else "mine"
    words = [
        f"MODEL.TYPE={found.family}",
        f"MODEL.NAME={model.name or unnamed}",
        *(f"DATA.{key}={sizes[key]}" for key in OF_THE_IMAGE),
        f"MODEL.NUM_CLASSES={sizes['NUM_CLASSES'] or 'N'}",
    ]
    if model.name:
        return words
    rest = {key: value for key, value in sizes.items() if key not in (*OF_THE_IMAGE, "NUM_CLASSES")}
    return [*words, *(f"MODEL.{key}={'N' if value is None else _text(value)}" for key, value in rest.items())]


def _header(found: Converted, model: Model, file: Path) -> dict[str, str]:
    """As scripts/checkpoint.py strip writes it, so that the tools that use a model know this one too."""
    about: dict[str, Any] = {"converted_from": file.name, "num_classes": model.sizes["NUM_CLASSES"]}
    if model.name and model.sizes["NUM_CLASSES"]:
        about |= {"model": model.name, "made_by": "vitamp", "weights": "the model's weights"}
        settings = _settings(found, model)
        data = {key.removeprefix("DATA."): value for key, value in settings.items() if key.startswith("DATA.")}
        about["input"] = {
            "image_size": data["IMAGE_SIZE"],
            "channels": data["IMAGE_CHANNELS"],
            "crop_pct": data["CROP_PCT"],
            "interpolation": data["INTERPOLATION"],
            "mean": data["IMAGENET_MEAN"],
            "std": data["IMAGENET_STD"],
        }
        about |= {"settings": settings, "classes": None, "choices": {}, "fp32_modules": []}
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    return {"format": "pt", **plain}


def _settings(found: Converted, model: Model) -> dict[str, Any]:
    """The model's, and how its images are prepared: as timm does for the same model."""
    known = timm.get_pretrained_cfg(model.name or "")
    assert known is not None  # is_timm_name
    values: dict[str, Any] = {
        "MODEL.TYPE": found.family,
        "MODEL.NAME": model.name,
        "MODEL.NUM_CLASSES": model.sizes["NUM_CLASSES"],
        **{f"DATA.{key}": model.sizes[key] for key in OF_THE_IMAGE},
        "DATA.CROP_PCT": known.crop_pct,
        "DATA.IMAGENET_MEAN": list(known.mean),
        "DATA.IMAGENET_STD": list(known.std),
    }
    config = load_config(None, {key: (value, "the file") for key, value in values.items()}, {}).config
    return {key: value for key, value in values_to_keep(config).items() if key.startswith(("MODEL.", "DATA."))}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape))
