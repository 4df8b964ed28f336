"""Images whose header is read but whose pixels are not decoded yet: the crop is chosen first."""

from __future__ import annotations

import functools
import io
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from PIL import Image

from datasets.decoding.background import OPAQUE, Colour, on_background

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""Formats that PIL may open. It knows more, but one of them starts a program, and none is for photographs."""
ENDINGS = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2"),
)
"""File extensions of these formats: the one list for class folders, tar files and the tools."""
MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**27)
"""PIL's limit against small files that decode to more than the memory holds; it applies to all decoders."""


class Box(NamedTuple):
    """A rectangle in an image, in whole pixels."""

    left: int
    top: int
    width: int
    height: int


class Stored(ABC):
    """An image whose header has been read."""

    width: int
    height: int

    @abstractmethod
    def cut(self, box: Box) -> np.ndarray:
        """The pixels of `box`, height x width x channels. Grey images may have one channel in place of three."""


class ArrayStored(Stored):
    """Raw pixels, which need no decoding."""

    def __init__(self, pixels: np.ndarray, channels: int) -> None:
        self.pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        self.height, self.width = pixels.shape[:2]
        self.channels = channels

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        return in_channels(self.pixels[top : top + height, left : left + width], self.channels)


class PilStored(Stored):
    """An image that PIL reads."""

    def __init__(self, data: bytes, channels: int, background: Colour | None = None) -> None:
        """`background`: colour behind transparent pixels; None drops the alpha channel."""
        self.image = Image.open(io.BytesIO(data), formats=_formats())
        self.channels, self.background = channels, background
        self.width, self.height = self.image.size

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        part = self.image
        if box != (0, 0, *part.size):
            part = part.crop((left, top, left + width, top + height))
        pixels = np.asarray(as_rgb_or_grey(part, self.channels, self.background))
        return pixels if pixels.ndim == 3 else pixels[:, :, None]


def in_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert colour to grey as PIL does if `channels` is 1. Grey pixels stay: their channel is repeated at the end."""
    if channels == 1 and pixels.shape[2] != 1:
        return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels


def as_rgb_or_grey(image: Image.Image, channels: int, background: Colour | None) -> Image.Image:
    """An image of any mode as RGB, or as grey for one channel. ValueError if its value for white is unknown."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; store 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns most 16-bit images white. Mode "I" has 32 bits; Pillow uses
        # it for 16-bit files of some formats, such as PGM, and scales their values to 65535.
        stored, transparent = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray((stored.clip(0, 65535) >> 8).astype(np.uint8))
        if isinstance(transparent, int):  # a shade of 16 bits
            image.putalpha(Image.fromarray(np.where(stored == transparent, 0, OPAQUE).astype(np.uint8)))
    return on_background(image, background).convert("L" if channels == 1 else "RGB")


@functools.cache
def _formats() -> list[str]:
    """The formats of FORMATS that this build of PIL supports."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]
