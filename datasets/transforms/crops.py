"""Crops as numbers, before any pixel is touched; resizing of the pixels in a crop; affine transforms of a batch."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from datasets.base import Box
from utils.config.data import DataConfig

TRIES = 10
"""Random shapes to try before falling back to a centre crop, as in torchvision and timm."""
PAD = 4
"""Width of the black border of DATA.CROP: pad, in pixels, as is usual for CIFAR"""
REACH = {"bicubic": 2, "bilinear": 1}
"""Radius of the interpolation filter, in pixels of the smaller image."""


class View(NamedTuple):
    """`columns` x `rows` pixels of the model's input, from (`left`, `top`), each of `across` x `down` image pixels.

    `box` holds all image pixels that contribute. In training these are the crop itself. In validation the surrounding
    pixels contribute at the borders, because the image is resized before it is cropped.
    """

    box: Box
    left: float
    top: float
    across: float
    down: float
    columns: int
    rows: int


Views = Callable[[int, int], View]
"""(width, height) of an image -> its view"""


def square(box: Box, size: int) -> View:
    """The whole `box`, resized to `size` x `size`."""
    return View(box, box.left, box.top, box.width / size, box.height / size, size, size)


def training_views(data: DataConfig) -> Views:
    """Views of training, by DATA.CROP. Random numbers come from python's generator."""
    return RandomViews(data) if data.CROP == "random" else SqueezedViews(data)


def validation_views(data: DataConfig) -> Views:
    """Views of validation: the centre of the resized image, or the whole image if training squeezes it too."""
    return SqueezedViews(data) if data.CROP == "none" else MiddleViews(data)


class RandomViews:
    """Random crops with the distribution of torchvision's RandomResizedCrop."""

    def __init__(self, data: DataConfig) -> None:
        self.size, self.scale, self.ratio = data.IMAGE_SIZE, data.CROP_SCALE, data.CROP_RATIO
        self.log_ratio = math.log(data.CROP_RATIO[0]), math.log(data.CROP_RATIO[1])

    def __call__(self, width: int, height: int) -> View:
        return square(self._box(width, height), self.size)

    def _box(self, width: int, height: int) -> Box:
        draw, (least, most), (narrow, wide) = random.random, self.scale, self.log_ratio
        for _ in range(TRIES):
            area = width * height * (least + (most - least) * draw())
            ratio = math.exp(narrow + (wide - narrow) * draw())
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return Box(int(draw() * (width - w + 1)), int(draw() * (height - h + 1)), w, h)
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        return Box((width - w) // 2, (height - h) // 2, w, h)


class SqueezedViews:
    """The whole image, squeezed into a square."""

    def __init__(self, data: DataConfig) -> None:
        self.size = data.IMAGE_SIZE

    def __call__(self, width: int, height: int) -> View:
        return square(Box(0, 0, width, height), self.size)


def resized_size(data: DataConfig, width: int, height: int) -> tuple[int, int]:
    """Width and height to which validation resizes an image before it takes the centre, by DATA.CROP_MODE."""
    side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
    if data.CROP_MODE == "squash":
        return side, side
    if data.CROP_MODE == "border":
        ratio = max(width, height) / side
        return max(1, round(width / ratio)), max(1, round(height / ratio))
    if width <= height:
        return side, int(side * height / width)
    return int(side * width / height), side


class MiddleViews:
    """The centre of the resized image, which can be smaller than the model's input with CROP_MODE border."""

    def __init__(self, data: DataConfig) -> None:
        self.data, self.size = data, data.IMAGE_SIZE
        self.reach = REACH[data.INTERPOLATION]

    def __call__(self, width: int, height: int) -> View:
        wide, high = resized_size(self.data, width, height)
        columns, rows = min(wide, self.size), min(high, self.size)
        across, down = width / wide, height / high
        left, top = round((wide - columns) / 2), round((high - rows) / 2)
        box = Box(0, 0, self._end(left + columns, across, width), self._end(top + rows, down, height))
        return View(box, left * across, top * down, across, down, columns, rows)

    def _end(self, end: int, scale: float, length: int) -> int:
        """End of the last image pixel that contributes to those before `end`."""
        return min(length, math.ceil((end - 0.5) * scale + self.reach * max(scale, 1.0) + 1))


Resize = Callable[[np.ndarray, View, np.ndarray | None], np.ndarray]
"""(pixels of the view's box: height x width x channels, the view, output array) -> rows x columns x channels

The result is the output array if resizing can write into it, else a new array.
"""


class TorchResize:
    """Resizes with torch, directly on uint8."""

    def __init__(self, interpolation: str) -> None:
        # torch.nn.functional.interpolate accepts no size together with a scale, and no output tensor.
        self.kernel = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out
        self.by_pil = PilResize(interpolation)
        self.interpolation = interpolation
        # Raw pixels are read-only, which is fine here. torch warns of such arrays once per process: use that up now.
        with warnings.catch_warnings(action="ignore"):
            torch.from_numpy(np.frombuffer(b"read only", dtype=np.uint8))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the kernel, which cannot be pickled: spawned loading processes look it up themselves."""
        return TorchResize, (self.interpolation,)

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        # The kernel has no offset: pixels left of and above the view are resized too, and then cut off.
        left, top = round((view.left - view.box.left) / view.across), round((view.top - view.box.top) / view.down)
        if left > view.columns or top > view.rows:
            return self.by_pil(pixels, view)  # such a long strip that most of the work would be cut off
        shape = (top + view.rows, left + view.columns, pixels.shape[2])
        scales = zip(shape, pixels.shape, (view.down, view.across), strict=False)
        if any(made == stored and scale != 1 for made, stored, scale in scales):
            return self.by_pil(pixels, view)  # the kernel ignores the scale of an axis whose length does not change
        made = place if place is not None and place.shape == shape else np.empty(shape, dtype=np.uint8)
        # Channels-last, in and out, as the kernel works; planes would cost a slow conversion.
        source, out = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, made))
        self.kernel(source, shape[:2], False, 1 / view.down, 1 / view.across, out=out)
        return made if made is place else made[top:, left:]


class PilResize:
    """Resizes with PIL: slower, and the reference for TorchResize."""

    def __init__(self, interpolation: str) -> None:
        self.filter = Image.Resampling[interpolation.upper()]

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        left, top = view.left - view.box.left, view.top - view.box.top
        right, bottom = left + view.columns * view.across, top + view.rows * view.down
        height, width, channels = pixels.shape
        within = (left, top, min(right, width), min(bottom, height))  # rounding can exceed the image by a tiny bit
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        small = image.resize((view.columns, view.rows), self.filter, box=within)
        return np.asarray(small).reshape(view.rows, view.columns, channels)


def has_affine(data: DataConfig) -> bool:
    """Whether SHIFT, ZOOM or ROTATE has any effect."""
    return data.AFFINE_PROB > 0 and (data.SHIFT > 0 or data.ZOOM > 0 or data.ROTATE > 0)


class BatchAffine:
    """Affine transform of a whole batch at once, with each sample's own random numbers."""

    COLUMNS = 5

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self.data = data
        self.size = data.IMAGE_SIZE
        centres = (torch.arange(self.size, dtype=torch.float32, device=device) * 2 + 1) / self.size - 1
        self.x, self.y = centres[None, None, :], centres[None, :, None]

    def matrices(self, uniform: np.ndarray) -> torch.Tensor:
        """Rows of five uniform numbers -> rows (a, b, c, d, e, f), which map an output pixel (x, y) to its source."""
        data = self.data
        acts = uniform[:, 0] < data.AFFINE_PROB
        shift_x, shift_y, zoom, angle = (np.where(acts, 2 * column - 1, 0.0) for column in uniform[:, 1:].T)
        shift_x, shift_y = 2 * data.SHIFT * shift_x, 2 * data.SHIFT * shift_y
        zoom, angle = 1 + data.ZOOM * zoom, np.deg2rad(data.ROTATE * angle)
        a, b = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = np.stack([a, b, -a * shift_x - b * shift_y, -b, a, b * shift_x - a * shift_y], axis=1)
        return torch.from_numpy(rows.astype(np.float32))

    def __call__(self, images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Transform images (uint8, B x C x S x S); both arguments are on the device."""
        # Elementwise products: the rounding of affine_grid's matrix product can depend on the batch size.
        a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
        grid = torch.stack([a * self.x + b * self.y + c, d * self.x + e * self.y + f], dim=-1)
        moved = torch.nn.functional.grid_sample(images.float(), grid, mode="bilinear", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)
