"""Rotation of photographs by their EXIF orientation (DATA.EXIF_ROTATE)."""

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
"""EXIF orientation -> steps that make the image upright: mirror horizontally, then vertically, then swap the axes."""
EXIF = ("exif", "Raw profile type exif")
"""Keys of the EXIF data in Pillow's `info`; the second is that of PNG files by ImageMagick"""
MARK = b"Exif\0\0"
SEARCHED = 2**16
"""Bytes at the start of a JPEG file to search for MARK; the block that begins with it is no longer than this."""


class Turned(Stored):
    """An upright view of an image. Boxes refer to the upright image and are cut from the stored one."""

    def __init__(self, stored: Stored, orientation: int) -> None:
        self.stored = stored
        self.mirrored, self.upside_down, self.swapped = TURNS[orientation]
        size = stored.width, stored.height
        self.width, self.height = size[::-1] if self.swapped else size

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
    """The image rotated by its EXIF orientation."""
    if not isinstance(stored, PilStored):
        if data.find(MARK, 0, SEARCHED) < 0:
            return stored
        by_pil = PilStored(data, 3)
    else:
        by_pil = stored
    if by_pil.image.format == "TIFF":
        return stored  # PIL always rotates TIFF files itself
    orientation = orientation_of(by_pil.image)
    return Turned(stored, orientation) if isinstance(orientation, int) and orientation in TURNS else stored


def orientation_of(image: Image.Image) -> object:
    """The orientation in the EXIF data alone: Pillow would also read XMP, which no other code here does."""
    if image.format == "PNG" and EXIF[0] not in image.info:
        image.load()  # the EXIF data may come after the pixels
    without_xmp = Image.new("1", (1, 1))
    without_xmp.info = {key: image.info[key] for key in EXIF if key in image.info}
    return without_xmp.getexif().get(ORIENTATION)
