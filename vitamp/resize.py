"""Resize decoded images to the model's size: for `vitamp.load`, and for images that training keeps in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional


def resized_size(mode: str, side: int, width: int, height: int) -> tuple[int, int]:
    """Width and height to which an image is resized before its centre is cropped. `mode`: see `Resized`."""
    if mode in ("none", "squash"):
        return side, side
    if mode == "border":
        ratio = max(width, height) / side
        return max(1, round(width / ratio)), max(1, round(height / ratio))
    if width <= height:
        return side, int(side * height / width)
    return int(side * width / height), side


@dataclass(frozen=True)
class Resized:
    """Pixels (C x H x W; uint8, or float32 of other images than photographs) at the model's size."""

    size: int
    mode: str
    """What is resized to `size` / `crop_pct` before the centre is cropped, as in timm: center, squash or border; or
    `none`: the whole image becomes the square"""
    crop_pct: float
    interpolation: str
    border: tuple[float, ...]
    """Colour around an image that is smaller than the model's, with mode border; else it is black, as in timm"""

    def __call__(self, pixels: Tensor) -> Tensor:
        side = self.size if self.mode == "none" else math.floor(self.size / self.crop_pct)
        wide, high = resized_size(self.mode, side, pixels.shape[-1], pixels.shape[-2])
        pixels = functional.resize(pixels, [high, wide], InterpolationMode(self.interpolation), antialias=True)
        left, top = max(0, self.size - wide), max(0, self.size - high)
        if self.mode == "border" and (left or top):
            edges = [left // 2, top // 2, (left + 1) // 2, (top + 1) // 2]
            pixels = functional.pad(pixels, edges, fill=list(self.border))
        return functional.center_crop(pixels, [self.size, self.size])
