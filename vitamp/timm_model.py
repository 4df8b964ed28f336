"""`vitamp.load`: the model of a run, as timm builds it, and the transform of its images, of torchvision's parts.

Only JSON and tensors are read, and nothing is executed.
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
    """`model.vitamp`: which weights a model has, and what is recorded of them."""

    path: Path
    """The checkpoint's folder, or the file of weights"""
    weights: str
    """`model`, or `ema`"""
    why: str
    """Why these weights, in words"""
    classes: list[str] | None
    """Names in the order of the outputs; None if the training data had none"""
    temperature: float
    """Of `evaluate -calibrate`: divide the logits by it for calibrated probabilities; 1 without a calibration"""
    thresholds: list[float] | None
    """With several labels per image: the probability (sigmoid) from which on each class is predicted"""


def load_model(path: Path, weights: str) -> Loaded:
    """See `vitamp.load`. ValueError, or FileNotFoundError, if there is no such model, or timm cannot build it."""
    if weights not in CHOICES:
        raise ValueError(f"weights={weights!r}: takes 'auto', 'model' or 'ema'")
    try:
        path = located(path.expanduser())
    except UserError as error:
        raise FileNotFoundError(str(error)) from None
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder. Name a run, a checkpoint, or a file of weights.")
    try:
        chosen = chosen_at(path, weights)
        model = _build(chosen.meta, path)
        model.load_state_dict(read_weights(chosen))
        most = chosen.meta["settings"].get("DATA.MAX_IMAGE_BYTES", MOST_BYTES)
        transform = transform_of(chosen.meta["input"], most)
        temperature = chosen.calibration.temperature if chosen.calibration else 1.0
    except UserError as error:
        raise ValueError(str(error)) from None
    except (KeyError, OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}).") from None
    except RuntimeError as error:  # names or shapes of tensors differ
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(f"{path}: the weights do not fit timm's plain model ({reason}). {_export(path)}") from None
    vars(model)["vitamp"] = Origin(
        path=chosen.place.absolute(),
        weights=chosen.which.name,
        why=chosen.words,
        classes=chosen.classes,
        temperature=temperature,
        thresholds=chosen.thresholds,
    )
    return Loaded((model.eval(), transform))


def _build(about: Mapping[str, Any], path: Path) -> nn.Module:
    """timm's model, without pretrained weights. The caller's random numbers stay as they are."""
    call = about.get("timm")
    if about["settings"].get("MODEL.MAE_PRETRAIN"):
        raise ValueError(
            f"{path}: this model learned without labels and has no classes. Fine-tune it first: {TRAIN} -cfg "
            f"RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {path}"
        )
    if call is None or not timm.is_model(call["name"]):
        if about.get("own_code"):
            raise ValueError(
                f"{path}: this model is code of its run's own, which is not executed here. Export it, with your "
                f"consent, to a program that torch alone runs: {EXPORT} {path} -trust -to torch -out model.pt2"
            )
        raise ValueError(f"{path}: an earlier version wrote it, without the arguments of timm's model. {_export(path)}")
    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(call["name"], **call["arguments"])
        pool = about["settings"].get("MODEL.POOL")
        if pool:
            pool_by(model, pool)
        return model


def _export(path: Path) -> str:
    return f"Export it, and load the file: {EXPORT} {path} -to safetensors -out model.safetensors"


def transform_of(about: Mapping[str, Any], most: int = MOST_BYTES) -> v2.Compose:
    """One of Pillow's images, or of bands a file or an array -> C x S x S, normalised. `about`: the weights' input.

    `most`: bytes of an image (DATA.MAX_IMAGE_BYTES).
    """
    channels = about["channels"]
    bits = about.get("bits")
    background = about.get("background")
    mode = "none" if about.get("crop") == "none" else about.get("crop_mode", "center")
    low, high = about.get("range", (0, 255))
    border = [low + (high - low) * value for value in about["mean"]]
    steps: list[Callable[[Any], Any]] = []
    if bits:
        steps.append(partial(planes_of, channels=channels, bits=bits, most=most))
    else:
        behind = tuple(background) if background else None
        steps.append(Upright(channels, bool(about.get("exif_rotate")), behind, most))
        steps.append(v2.PILToTensor())
        border = [min(255, max(0, round(shade))) for shade in border]
    steps.append(Resized(about["image_size"], mode, about["crop_pct"], about["interpolation"], tuple(border)))
    steps.append(Normalised(tuple(about["mean"]), tuple(about["std"]), low, high))
    return v2.Compose(steps)


@dataclass(frozen=True)
class Upright:
    """An image as RGB, or as grey for one channel: upright, with 8 bits, and on a colour where it is transparent."""

    channels: int
    rotate: bool
    """As its EXIF data says"""
    background: tuple[int, ...] | None
    """None: transparency is dropped"""
    most: int = MOST_BYTES

    def __call__(self, image: Image.Image) -> Image.Image:
        refuse_large(BYTES_PER_PIXEL * image.width * image.height, self.most)
        if self.rotate:
            image = ImageOps.exif_transpose(image)
        return as_rgb_or_grey(image, self.channels, self.background)[0]


@dataclass(frozen=True)
class Normalised:
    """(pixel / 255 - mean) / std, computed as in validation: one multiplication and one addition."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: float = 0
    high: float = 255
    """Values that become 0 and 1"""

    def __call__(self, pixels: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, dtype=torch.float64).reshape(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).reshape(-1, 1, 1)
        span = self.high - self.low
        offset = (-self.low / span - mean) / std
        factor = 1 / (span * std)
        return torch.addcmul(offset.float(), pixels.float(), factor.float())
