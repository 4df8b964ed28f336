"""JPEG files by simplejpeg (libjpeg-turbo): bit for bit what PIL makes of them, without its detours."""

from __future__ import annotations

import re

import numpy as np

from datasets.decoding.stored import MOST_PIXELS, Box, PilStored, Stored, in_channels

COLOURS = {"YCbCr": ("RGB", 3), "RGB": ("RGB", 3), "Gray": ("GRAY", 1)}
"""What a file holds -> what it is decoded to. The rest is PIL's: CMYK has to be turned round first."""
BLOCK = 16
"""Rows of pixels that are stored together, at most, in files as they are usual."""
BLEED = 2
"""Rows below a crop that shine into it: colours are stored coarser than brightness, and smoothed when read."""
ROW_AFTER_ROW = (0xC0, 0xC1)
"""Markers of the height in files stored from top to bottom. Progressive ones are not."""
RESTARTS, SCAN = 0xDD, 0xDA
"""Markers of how far restarts are apart, and of the pixels' beginning"""
ONLY_CUT_OFF = re.compile(r"extraneous bytes before marker 0xd9$")
"""All that is to be said of a file whose lower part was passed over: more data came, and then its regular end."""


class JpegStored(Stored):
    """A JPEG file that simplejpeg reads; ValueError for others."""

    def __init__(self, data: bytes, channels: int) -> None:
        import simplejpeg

        self.decode = simplejpeg.decode_jpeg
        self.data, self.channels, self.factor = data, channels, 1
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        self.height, self.width = int(height), int(width)
        self.whole = self.width, self.height
        if colours not in COLOURS or self.width * self.height > MOST_PIXELS:
            raise ValueError("a file for PIL to read, or to refuse")
        self.colours, self.depth = COLOURS[colours]

    def shrink(self, factor: int) -> int:
        self.factor = factor
        self.width, self.height = (-(-side // factor) for side in self.whole)
        return factor

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        try:
            pixels = self._rows(top + height)
        except ValueError:  # PIL puts up with some faults, and says of others what is wrong
            return self._by_pil(box)
        return in_channels(pixels[top : top + height, left : left + width], self.channels)

    def _rows(self, bottom: int) -> np.ndarray:
        """The image down to `bottom` at least. Decoding is most of the work, so what lies below is not decoded.

        There is no function for this; but the same bytes with a smaller height in their header are a complete image
        that is followed by data nobody asked for. The decoder complains of these once all else has gone well.
        """
        across, down = self.whole
        rows = -(-(bottom + BLEED) * self.factor // BLOCK) * BLOCK
        if rows < down and (place := _place_of_height(self.data)):
            lower = bytearray(self.data)
            lower[place : place + 2] = rows.to_bytes(2, "big")
            pixels = np.empty((rows // self.factor, self.width, self.depth), dtype=np.uint8)
            try:
                self._decode(lower, across, rows, pixels)
                return pixels
            except ValueError as error:
                if ONLY_CUT_OFF.search(str(error)):
                    return pixels
        return self._decode(self.data, across, down, None)

    def _decode(self, data: bytes | bytearray, across: int, down: int, out: np.ndarray | None) -> np.ndarray:
        if self.factor == 1:
            return self.decode(data, self.colours, buffer=out)
        least = -(-down // self.factor), -(-across // self.factor)
        return self.decode(data, self.colours, min_height=least[0], min_width=least[1], buffer=out)

    def _by_pil(self, box: Box) -> np.ndarray:
        stored = PilStored(self.data, self.channels)
        if self.factor > 1:
            stored.shrink(self.factor)
        return stored.cut(box)


def _place_of_height(data: bytes) -> int | None:
    """Where the two bytes of the image's height begin, in a file that is stored from top to bottom.

    None for one with restart markers, too: each of them would be complained of in place of the end, so that all of the
    file had to be decoded after the part.
    """
    place, end, found = 2, len(data) - 9, None
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == SCAN:
            return found
        if marker in ROW_AFTER_ROW:
            found = place + 5
        elif marker == RESTARTS or (0xC0 <= marker <= 0xCF and marker != 0xC4):
            return None
        place += 2 + (data[place + 2] << 8 | data[place + 3])
    return None
