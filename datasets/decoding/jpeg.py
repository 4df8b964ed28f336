"""Decoding of JPEG files with simplejpeg (libjpeg-turbo): the same bits as PIL, but faster."""

from __future__ import annotations

import re

import numpy as np

from datasets.decoding.stored import MOST_PIXELS, Box, PilStored, Stored, in_channels

COLOURS = {"YCbCr": ("RGB", 3), "RGB": ("RGB", 3), "Gray": ("GRAY", 1)}
"""Colour space of a file -> colour space and channels to decode to. PIL reads the rest: CMYK needs inverting first."""
BLOCK = 16
"""Greatest height of a row of blocks (MCUs), in pixels, in usual files."""
BLEED = 2
"""Rows below a crop that affect it: colour is stored at half resolution and smoothed when it is decoded."""
SEQUENTIAL = (0xC0, 0xC1)
"""Frame markers of files stored from top to bottom; progressive files have others. The height follows the marker."""
RESTARTS, SCAN = 0xDD, 0xDA
"""Markers of the restart interval and of the start of the pixel data"""
ONLY_CUT_OFF = re.compile(r"extraneous bytes before marker 0xd9$")
"""The decoder's only complaint about an intact file that is decoded with a smaller height: data before its end."""
OF_DAMAGE = ("Corrupt JPEG data", "Premature end")
"""Beginnings of the decoder's warnings of damaged data. Its errors, which begin otherwise, can mean a rare format."""


class JpegStored(Stored):
    """A JPEG file, decoded by simplejpeg. Raises ValueError for a file that PIL should read."""

    def __init__(self, data: bytes, channels: int) -> None:
        import simplejpeg

        self.decode = simplejpeg.decode_jpeg
        self.data, self.channels = data, channels
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        self.height, self.width = int(height), int(width)
        if colours not in COLOURS or self.width * self.height > MOST_PIXELS:
            raise ValueError("PIL must read or refuse this file")
        self.colours, self.depth = COLOURS[colours]

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        try:
            pixels = self._rows(top + height)
        except ValueError:  # PIL tolerates some damage, and reports the rest
            return PilStored(self.data, self.channels).cut(box)
        return in_channels(pixels[top : top + height, left : left + width], self.channels)

    def _rows(self, bottom: int) -> np.ndarray:
        """Decode the image from the top to at least row `bottom`. Decoding dominates, so the rest is left out.

        The library has no function for this. But with a smaller height in the header, the same bytes are a complete
        image followed by surplus data, about which the decoder complains only after it has decoded the image.
        """
        rows = -(-(bottom + BLEED) // BLOCK) * BLOCK
        if rows < self.height and (offset := _height_offset(self.data)):
            shortened = bytearray(self.data)
            shortened[offset : offset + 2] = rows.to_bytes(2, "big")
            pixels = np.empty((rows, self.width, self.depth), dtype=np.uint8)
            try:
                self.decode(shortened, self.colours, buffer=pixels)
                return pixels
            except ValueError as error:
                if ONLY_CUT_OFF.search(str(error)):
                    return pixels
        return self.decode(self.data, self.colours, buffer=None)


def damage_of(data: bytes) -> str:
    """The decoder's warning of a damaged JPEG file, also if PIL reads it without a word; '' if there is none."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "GRAY")  # reads all the data, at less cost than in colour
    except ValueError as error:
        return str(error) if str(error).startswith(OF_DAMAGE) else ""
    return ""


def _height_offset(data: bytes) -> int | None:
    """Offset of the two height bytes in a sequential JPEG file; None for other kinds.

    None also with restart markers: the decoder would complain about each of them, so that the whole file would have to
    be decoded after the part.
    """
    offset, end, height = 2, len(data) - 9, None
    while offset < end and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == SCAN:
            return height
        if marker in SEQUENTIAL:
            height = offset + 5
        elif marker == RESTARTS or (0xC0 <= marker <= 0xCF and marker != 0xC4):
            return None
        offset += 2 + (data[offset + 2] << 8 | data[offset + 3])
    return None
