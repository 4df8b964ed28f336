"""The transform of an image for a trained model: what validation does, of torchvision's parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional


def transform_of(about: Mapping[str, Any]) -> v2.Compose:
    """One of Pillow's images -> C x S x S, normalised. `about`: the input that the weights are described with."""
    channels, background = about["channels"], about.get("background")
    upright = Upright(channels, bool(about.get("exif_rotate")), tuple(background) if background else None)
    mode = "none" if about.get("crop") == "none" else about.get("crop_mode", "center")
    border = [min(255, max(0, round(255 * value))) for value in about["mean"]]
    resized = Resized(about["image_size"], mode, about["crop_pct"], about["interpolation"], tuple(border))
    return v2.Compose([upright, v2.PILToTensor(), resized, Normalised(tuple(about["mean"]), tuple(about["std"]))])


@dataclass(frozen=True)
class Upright:
    """An image as RGB, or as grey for one channel: upright, with 8 bits, and on a colour where it is transparent."""

    channels: int
    rotate: bool
    """As its EXIF data says"""
    background: tuple[int, ...] | None
    """None: transparency is dropped"""

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.rotate:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits, of which the upper 8 are kept
            image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            if self.background is not None:
                image = Image.alpha_composite(Image.new("RGBA", image.size, (*self.background, 255)), image)
        return image.convert("L" if self.channels == 1 else "RGB")


@dataclass(frozen=True)
class Resized:
    """Pixels (C x H x W, uint8) at the model's size."""

    size: int
    mode: str
    """What is resized to `size` / `crop_pct` before the centre is cropped, as in timm: center, squash or border; or
    `none`: the whole image becomes the square"""
    crop_pct: float
    interpolation: str
    border: tuple[int, ...]
    """Colour around an image that is smaller than the model's"""

    def __call__(self, pixels: Tensor) -> Tensor:
        high, wide = self._before_crop(*pixels.shape[-2:])
        pixels = functional.resize(pixels, [high, wide], InterpolationMode(self.interpolation), antialias=True)
        left, top = max(0, self.size - wide), max(0, self.size - high)
        if left or top:
            edges = [left // 2, top // 2, (left + 1) // 2, (top + 1) // 2]
            pixels = functional.pad(pixels, edges, fill=list(self.border))
        return functional.center_crop(pixels, [self.size, self.size])

    def _before_crop(self, high: int, wide: int) -> tuple[int, int]:
        side = math.floor(self.size / self.crop_pct)
        if self.mode == "none":
            return self.size, self.size
        if self.mode == "squash":
            return side, side
        if self.mode == "border":
            ratio = max(high, wide) / side
            return max(1, round(high / ratio)), max(1, round(wide / ratio))
        return (int(side * high / wide), side) if wide <= high else (side, int(side * wide / high))


@dataclass(frozen=True)
class Normalised:
    """(pixel / 255 - mean) / std, computed as in validation: one multiplication and one addition."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return torch.addcmul((-mean / std).float(), pixels.float(), (1 / (255 * std)).float())
