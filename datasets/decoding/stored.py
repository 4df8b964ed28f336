"""Images as they are stored, opened by their header: what is taken of one is decided before anything is decoded."""

from __future__ import annotations

import functools
import io
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""What PIL may open. It knows more, but one of the others starts a program, and none is a format for photographs."""
ENDINGS = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2"),
)
"""How the names of such files end: the one list for class folders, tar files and the tools."""
MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**27)
"""PIL opens nothing larger, for fear of a small file that fills the memory; neither do the other decoders."""


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    left: int
    top: int
    width: int
    height: int


class Stored(ABC):
    """An image whose header was read."""

    width: int
    height: int

    def shrink(self, factor: int) -> int:  # noqa: ARG002 - most kinds of images cannot
        """Be decoded at 1/factor (2, 4 or 8) of the size; `width` and `height` follow. Gives the factor it will be."""
        return 1

    @abstractmethod
    def cut(self, box: Box) -> np.ndarray:
        """The pixels of `box`, height x width x channels. One channel may stand for three equal ones."""


class ArrayStored(Stored):
    """Pixels that need no decoding."""

    def __init__(self, pixels: np.ndarray, channels: int) -> None:
        self.pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        self.height, self.width = pixels.shape[:2]
        self.channels = channels

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        return in_channels(self.pixels[top : top + height, left : left + width], self.channels)


class PilStored(Stored):
    """Whatever PIL reads."""

    def __init__(self, data: bytes, channels: int) -> None:
        self.image = Image.open(io.BytesIO(data), formats=_formats())
        self.channels = channels
        self.width, self.height = self.image.size

    def shrink(self, factor: int) -> int:
        if not self.image.draft(self.image.mode, (self.width // factor, self.height // factor)):
            return 1
        self.width, self.height = self.image.size
        return factor

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        part = self.image
        if box != (0, 0, *part.size):
            part = part.crop((left, top, left + width, top + height))
        pixels = np.asarray(as_wanted(part, self.channels))
        return pixels if pixels.ndim == 3 else pixels[:, :, None]


def in_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Colours made grey as PIL does it where one channel is wanted. Grey is left for the end to be repeated."""
    if channels == 1 and pixels.shape[2] != 1:
        return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels


def as_wanted(image: Image.Image, channels: int) -> Image.Image:
    """An image of any mode as RGB, or as grey for one channel. ValueError where nothing tells what is white."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, and nothing tells which is white; store 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts off at 255, which leaves most 16-bit images white. "I" has room for 32 bits;
        # Pillow opens 16-bit files of some formats as that, PGM among them, and scales these up to 65535.
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("L" if channels == 1 else "RGB")


@functools.cache
def _formats() -> list[str]:
    """Those that this PIL was made with."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]
