"""Photographs that lie on their side: the camera says so in their EXIF data, and DATA.EXIF_ROTATE turns them."""

from __future__ import annotations

import numpy as np
from PIL import Image

from datasets.decoding.stored import Box, PilStored, Stored

ORIENTATION = 0x0112
TURNS = {
    2: (True, False, False),
    3: (True, True, False),
    4: (False, True, False),
    5: (False, False, True),
    6: (False, True, True),
    7: (True, True, True),
    8: (True, False, True),
}
"""EXIF's number -> what makes the image upright: mirror left and right, then up and down, then swap the axes."""
EXIF = ("exif", "Raw profile type exif")
"""Where Pillow keeps what it found in a file, the second in PNG files of ImageMagick"""
MARK = b"Exif\0\0"
SEARCHED = 2**16
"""Bytes at the beginning of a JPEG file where the mark would stand; the block it opens is no longer than that."""


class Turned(Stored):
    """An image seen upright. Boxes are given as one sees it, and cut from it as it is stored."""

    def __init__(self, stored: Stored, orientation: int) -> None:
        self.stored = stored
        self.mirrored, self.upside_down, self.swapped = TURNS[orientation]
        self._measure()

    def _measure(self) -> None:
        size = self.stored.width, self.stored.height
        self.width, self.height = size[::-1] if self.swapped else size

    def shrink(self, factor: int) -> int:
        factor = self.stored.shrink(factor)
        self._measure()
        return factor

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        if self.swapped:
            left, top, width, height = top, left, height, width
        if self.mirrored:
            left = self.stored.width - left - width
        if self.upside_down:
            top = self.stored.height - top - height
        pixels = self.stored.cut(Box(left, top, width, height))
        pixels = pixels[:: -1 if self.upside_down else 1, :: -1 if self.mirrored else 1]
        return np.ascontiguousarray(pixels.swapaxes(0, 1) if self.swapped else pixels)


def upright(stored: Stored, data: bytes) -> Stored:
    """`stored` as it is meant to be seen."""
    if not isinstance(stored, PilStored):
        if data.find(MARK, 0, SEARCHED) < 0:
            return stored
        by_pil = PilStored(data, 3)
    else:
        by_pil = stored
    if by_pil.image.format == "TIFF":
        return stored  # PIL turns these by itself, asked or not
    orientation = _orientation(by_pil.image)
    return Turned(stored, orientation) if isinstance(orientation, int) and orientation in TURNS else stored


def _orientation(image: Image.Image) -> object:
    """What EXIF says. Pillow would take XMP's word too, for which nothing else here looks."""
    if image.format == "PNG" and EXIF[0] not in image.info:
        image.load()  # it may stand behind the pixels
    without_xmp = Image.new("1", (1, 1))
    without_xmp.info = {key: image.info[key] for key in EXIF if key in image.info}
    return without_xmp.getexif().get(ORIENTATION)
