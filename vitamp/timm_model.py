"""`vitamp.load`: builds the model of a run with timm, and the transform of its images from torchvision's parts.

Only JSON and tensors are read; no code in the files is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError
from torch import Tensor, nn
from torchvision.transforms import v2

from vitamp.bands import planes_of
from vitamp.checkpoints import located
from vitamp.colours import as_rgb_or_grey
from vitamp.errors import TRAIN, UserError, started
from vitamp.files import suggested_path
from vitamp.metrics import CHOICES
from vitamp.pooling import pool_by
from vitamp.processes import Loaded
from vitamp.resize import Resized
from vitamp.sizes import BYTES_PER_PIXEL, MOST_BYTES, refuse_large
from vitamp.tensors import read_weights
from vitamp.weights import chosen_at

EXPORT = started("export")


@dataclass(frozen=True)
class Origin:
    """`model.vitamp`: the weights that a model has, and what is recorded about them."""

    path: Path
    """The checkpoint's folder, or the file of weights."""
    weights: str
    """`model` or `ema`."""
    why: str
    """The reason why these weights were chosen, in words."""
    classes: list[str] | None
    """Names in the order of the outputs; None if the training data had none."""
    temperature: float
    """Divide the logits by it for calibrated probabilities (`evaluate -calibrate`); 1 without a calibration."""
    thresholds: list[float] | None
    """With several labels per image: the lowest probability (sigmoid) at which each class is predicted."""
    several_labels: bool
    """Whether an image may have several labels, or none: probabilities are sigmoids of the logits."""


def load_model(path: Path, weights: str) -> Loaded:
    """Load a model and its transform: see `vitamp.load`.

    Raises FileNotFoundError if there is nothing at the path, and ValueError if timm cannot build a model from it.
    """
    if weights not in CHOICES:
        raise ValueError(f"weights={weights!r}: takes 'auto', 'model' or 'ema'")
    try:
        path = located(path.expanduser())
    except UserError as error:
        raise FileNotFoundError(str(error)) from None
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder{suggested_path(path)}. Name a run, a checkpoint, or a file of weights."
        )
    try:
        chosen = chosen_at(path, weights)
        model = _build(chosen.meta, path)
        model.load_state_dict(read_weights(chosen))
        most_bytes = chosen.meta["settings"].get("DATA.MAX_IMAGE_BYTES", MOST_BYTES)
        transform = transform_of(chosen.meta["input"], most_bytes)
        temperature = chosen.calibration.temperature if chosen.calibration else 1.0
    except UserError as error:
        raise ValueError(str(error)) from None
    except (KeyError, OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}).") from None
    except RuntimeError as error:
        # `load_state_dict` raises this if the names or shapes of tensors differ from those of the model.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        advice = _advice_to_export(path)
        raise ValueError(f"{path}: the weights do not fit timm's plain model ({reason}). {advice}") from None
    vars(model)["vitamp"] = Origin(
        path=chosen.place.absolute(),
        weights=chosen.which.name,
        why=chosen.words,
        classes=chosen.classes,
        temperature=temperature,
        thresholds=chosen.thresholds,
        several_labels=bool(chosen.meta["settings"].get("DATA.MULTI_LABEL")),
    )
    return Loaded((model.eval(), transform))


def _build(meta: Mapping[str, Any], path: Path) -> nn.Module:
    """Build the model with timm, without pretrained weights; the caller's random number generators do not change.

    ValueError if the model has no classes, is of the user's own code, or was saved without the arguments for timm.

    meta: fields of meta.json
    path: where they come from, for errors
    """
    timm_call = meta.get("timm")
    if meta["settings"].get("MODEL.MAE_PRETRAIN"):
        raise ValueError(
            f"{path}: this model learned without labels and has no classes. Fine-tune it first: {TRAIN} -cfg "
            f"RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {path}"
        )
    if timm_call is None or not timm.is_model(timm_call["name"]):
        if meta.get("own_code"):
            raise ValueError(
                f"{path}: this model is code of its run's own, which is not executed here. Export it, with your "
                f"consent, to a program that torch alone runs: {EXPORT} {path} -trust -to torch -out model.pt2"
            )
        advice = _advice_to_export(path)
        raise ValueError(f"{path}: an earlier version wrote it, without the arguments of timm's model. {advice}")
    with torch.random.fork_rng(devices=[]):  # Restores the CPU's generator afterwards; no GPU is used here.
        model = timm.create_model(timm_call["name"], **timm_call["arguments"])
        pool = meta["settings"].get("MODEL.POOL")
        if pool:
            pool_by(model, pool)
        return model


def _advice_to_export(path: Path) -> str:
    """Return the advice to export the model instead, with the command."""
    return f"Export it, and load the file: {EXPORT} {path} -to safetensors -out model.safetensors"


def transform_of(about: Mapping[str, Any], most: int = MOST_BYTES) -> v2.Compose:
    """Compose the transform from an image to normalised pixels, C x H x W.

    It takes an image of Pillow or, if the input has `bits`, a file or an array of any bands.

    about: the field `input` of meta.json
    most: largest number of bytes of an image's pixels (DATA.MAX_IMAGE_BYTES)
    """
    channels = about["channels"]
    bits = about.get("bits")
    background = about.get("background")
    # "crop" is none if validation resizes images without cropping. Otherwise, "crop_mode" is the mode of `Resized`.
    mode = "none" if about.get("crop") == "none" else about.get("crop_mode", "center")
    low, high = about.get("range", (0, 255))
    border = [low + (high - low) * value for value in about["mean"]]  # the mean colour, in stored values
    steps: list[Callable[[Any], Any]] = []
    if bits:
        steps.append(partial(planes_of, channels=channels, bits=bits, most=most))
    else:
        background_colour = tuple(background) if background else None
        steps.append(Upright(channels, bool(about.get("exif_rotate")), background_colour, most))
        steps.append(v2.PILToTensor())
        border = [min(255, max(0, round(shade))) for shade in border]  # Photographs have bytes.
    steps.append(Resized(about["image_size"], mode, about["crop_pct"], about["interpolation"], tuple(border)))
    steps.append(Normalised(tuple(about["mean"]), tuple(about["std"]), low, high))
    return v2.Compose(steps)


@dataclass(frozen=True)
class Upright:
    """Converts an image to 8-bit RGB, or to grey for one channel, upright and without transparency."""

    channels: int
    rotate: bool
    """Whether to rotate the image as its EXIF data says."""
    background: tuple[int, ...] | None
    """Colour behind transparent pixels; None: transparency is ignored."""
    most: int = MOST_BYTES
    """Largest number of bytes of the image's pixels; a ValueError if there are more."""

    def __call__(self, image: Image.Image) -> Image.Image:
        refuse_large(BYTES_PER_PIXEL * image.width * image.height, self.most)
        if self.rotate:
            image = ImageOps.exif_transpose(image)
        return as_rgb_or_grey(image, self.channels, self.background)[0]


@dataclass(frozen=True)
class Normalised:
    """Scales stored values to 0..1, and normalises them: ((pixel - low) / (high - low) - mean) / std.

    It is computed as in validation, by one multiplication and one addition, so that the results are equal.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: float = 0
    """Stored value that becomes 0."""
    high: float = 255
    """Stored value that becomes 1."""

    def __call__(self, pixels: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, dtype=torch.float64).reshape(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).reshape(-1, 1, 1)
        span = self.high - self.low
        offset = (-self.low / span - mean) / std
        factor = 1 / (span * std)
        return torch.addcmul(offset.float(), pixels.float(), factor.float())
