"""Which means reads an image: the decoder that DATA.DECODER names for JPEG files, PIL for all others."""

from __future__ import annotations

import importlib
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError

from datasets.base import Encoded
from datasets.decoding.exif import upright
from datasets.decoding.jpeg import JpegStored
from datasets.decoding.stored import MOST_PIXELS, ArrayStored, PilStored, Stored
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

JPEG_BEGINS = b"\xff\xd8\xff"


class Unreadable(Exception):
    """Bytes that are no image, or a broken one. The text says why."""


class Reader:
    """Opens images. Whatever is wrong with one may raise anything; `reason` puts it into words."""

    def __init__(self, data: DataConfig) -> None:
        self.channels, self.turns = data.IMAGE_CHANNELS, data.EXIF_ROTATE
        self.by_simplejpeg = decoder_of(data) == "simplejpeg"

    def open(self, encoded: Encoded) -> Stored:
        if isinstance(encoded, np.ndarray):
            return ArrayStored(encoded, self.channels)
        stored = self._open(encoded)
        if not self.turns:
            return stored
        with warnings.catch_warnings(action="ignore"):
            return upright(stored, encoded)

    def _open(self, data: bytes) -> Stored:
        if self.by_simplejpeg and data.startswith(JPEG_BEGINS):
            try:
                return JpegStored(data, self.channels)
            except ValueError:
                pass  # PIL reads more kinds, and says better what is wrong
        # Of what it can read after all, PIL has much to say: odd EXIF data, large sizes. None of it helps training.
        with warnings.catch_warnings(action="ignore"):
            return PilStored(data, self.channels)


def reason(error: Exception, encoded: Encoded) -> str:
    """Why an image could not be read, in words for the one who has the file."""
    if len(encoded) == 0:
        return "it is empty: 0 bytes"
    if isinstance(error, UnidentifiedImageError):
        return "it is no image of a kind that is known"
    if isinstance(error, Image.DecompressionBombError):
        return f"it claims to have more than {MOST_PIXELS:,} pixels, which would fill the memory"
    return str(error) or type(error).__name__


def decoder_of(data: DataConfig) -> str:
    """DATA.DECODER, with `auto` settled: what reads JPEG files."""
    if data.DECODER != "auto":
        return data.DECODER
    return "pil" if _missing_simplejpeg() else "simplejpeg"


def check_decoder(data: DataConfig) -> None:
    """Raise UserError where what DATA.DECODER asks for is not installed."""
    if data.DECODER == "pil" or not (why := _missing_simplejpeg()):
        return
    if data.DECODER == "simplejpeg":
        raise UserError(
            f"DATA.DECODER is simplejpeg, but simplejpeg cannot be loaded ({why}). "
            "Run: pip install simplejpeg   or set DATA.DECODER to auto or pil."
        )
    log.warning("JPEG files are read by PIL, at half the speed: %s. Run: pip install simplejpeg", why)


def _missing_simplejpeg() -> str | None:
    """Why it cannot be imported; None where it can."""
    try:
        importlib.import_module("simplejpeg")
    except ImportError as error:
        return str(error)
    return None
