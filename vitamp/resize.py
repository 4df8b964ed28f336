"""Resizes decoded images to the model's size, for `vitamp.load` and for images that training keeps in memory."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from vitamp.sizes import ImageSize, sides


def resized_size(mode: str, size: ImageSize, crop_pct: float, width: int, height: int) -> tuple[int, int]:
    """Return the width and height to which an image is resized before its centre is cropped, as in timm.

    mode: the sides that become `size` / `crop_pct`: center (the short side), squash (both) or border (the long side);
        with none, both sides become `size`
    size: size of the model's input
    width, height: size of the image
    """
    target_height, target_width = sides(size)
    if mode == "none":
        return target_width, target_height
    target_height = math.floor(target_height / crop_pct)
    target_width = math.floor(target_width / crop_pct)
    if mode == "squash":
        return target_width, target_height
    # For a square, timm uses torchvision's resize, which rounds the longer side down.
    if mode == "center" and target_height == target_width:
        side = target_width
        if width <= height:
            return side, int(side * height / width)
        return int(side * width / height), side
    # With border, the whole image fits into the target, so that the larger of the two ratios counts. With center, it
    # covers the target.
    choose = max if mode == "border" else min
    ratio = choose(width / target_width, height / target_height)
    return max(1, round(width / ratio)), max(1, round(height / ratio))


@dataclass(frozen=True)
class Resized:
    """Resizes pixels to the model's size: C x H x W, uint8 of photographs, or float32 of other images."""

    size: ImageSize
    mode: str
    """Sides that become `size` / `crop_pct` before the centre is cropped, as in timm: center (the short side), squash
    (both) or border (the long side). With `none`, both sides become `size`, and nothing is cropped."""
    crop_pct: float
    interpolation: str
    border: tuple[float, ...]
    """With mode border, the colour around an image that is smaller than `size`; with others it is black, as in timm."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Resize pixels, and crop the centre to the model's size.

        With mode border, an image that is smaller than this size is padded with `border` first. With other modes, the
        crop itself pads it with black.
        """
        width, height = resized_size(self.mode, self.size, self.crop_pct, pixels.shape[-1], pixels.shape[-2])
        pixels = functional.resize(pixels, [height, width], InterpolationMode(self.interpolation), antialias=True)
        target_height, target_width = sides(self.size)
        missing_width = max(0, target_width - width)
        missing_height = max(0, target_height - height)
        if self.mode == "border" and (missing_width > 0 or missing_height > 0):
            left = missing_width // 2
            top = missing_height // 2
            edges = [left, top, missing_width - left, missing_height - top]
            pixels = functional.pad(pixels, edges, fill=list(self.border))
        return functional.center_crop(pixels, [target_height, target_width])

    def undone(self, maps: Tensor, width: int, height: int) -> Tensor:
        """Fit maps of the model's size (K x H x W) to an image of `width` x `height`; what was cropped away is 0."""
        resized_width, resized_height = resized_size(self.mode, self.size, self.crop_pct, width, height)
        # center_crop adds zeros where its result is larger, so it also undoes itself.
        uncropped = functional.center_crop(maps, [resized_height, resized_width])
        return functional.resize(uncropped, [height, width], antialias=True)
