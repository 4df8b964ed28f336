"""Resize decoded images to the model's size: for `vitamp.load`, and for images that training keeps in memory."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from vitamp.sizes import ImageSize, sides


def resized_size(mode: str, size: ImageSize, crop_pct: float, width: int, height: int) -> tuple[int, int]:
    """Width and height to which an image is resized before its centre is cropped, as in timm. `mode`: see `Resized`."""
    high, wide = (side if mode == "none" else math.floor(side / crop_pct) for side in sides(size))
    if mode in ("none", "squash"):
        return wide, high
    if mode == "center" and high == wide:  # by torchvision, which rounds down
        return (wide, int(wide * height / width)) if width <= height else (int(wide * width / height), wide)
    ratio = (max if mode == "border" else min)(width / wide, height / high)
    return max(1, round(width / ratio)), max(1, round(height / ratio))


@dataclass(frozen=True)
class Resized:
    """Pixels (C x H x W; uint8, or float32 of other images than photographs) at the model's size."""

    size: ImageSize
    mode: str
    """What is resized to `size` / `crop_pct` before the centre is cropped, as in timm: center, squash or border; or
    `none`: the whole image is squeezed"""
    crop_pct: float
    interpolation: str
    border: tuple[float, ...]
    """Colour around an image that is smaller than the model's, with mode border; else it is black, as in timm"""

    def __call__(self, pixels: Tensor) -> Tensor:
        wide, high = resized_size(self.mode, self.size, self.crop_pct, pixels.shape[-1], pixels.shape[-2])
        pixels = functional.resize(pixels, [high, wide], InterpolationMode(self.interpolation), antialias=True)
        rows, columns = sides(self.size)
        left = max(0, columns - wide)
        top = max(0, rows - high)
        if self.mode == "border" and (left or top):
            edges = [left // 2, top // 2, (left + 1) // 2, (top + 1) // 2]
            pixels = functional.pad(pixels, edges, fill=list(self.border))
        return functional.center_crop(pixels, [rows, columns])
