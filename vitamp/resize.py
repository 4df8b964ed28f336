"""Resize decoded images to the model's size: for `vitamp.load`, and for images that training keeps in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional


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
        (high, wide), side = pixels.shape[-2:], math.floor(self.size / self.crop_pct)
        if self.mode == "none":
            high = wide = self.size
        elif self.mode == "squash":
            high = wide = side
        elif self.mode == "border":
            ratio = max(high, wide) / side
            high, wide = max(1, round(high / ratio)), max(1, round(wide / ratio))
        else:
            high, wide = (int(side * high / wide), side) if wide <= high else (side, int(side * wide / high))
        pixels = functional.resize(pixels, [high, wide], InterpolationMode(self.interpolation), antialias=True)
        left, top = max(0, self.size - wide), max(0, self.size - high)
        if left or top:
            edges = [left // 2, top // 2, (left + 1) // 2, (top + 1) // 2]
            pixels = functional.pad(pixels, edges, fill=list(self.border))
        return functional.center_crop(pixels, [self.size, self.size])
