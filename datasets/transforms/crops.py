"""Crops as numbers: the region of an image that becomes the model's input. No pixels are touched here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from datasets.decoding.stored import Box
from utils.config.data import DataConfig

TRIES = 10
"""Random shapes to try before falling back to a centre crop, as in torchvision and timm."""
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
