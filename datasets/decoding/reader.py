"""Opening images: JPEG files with DATA.DECODER, all others with PIL."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError

from datasets.base import Encoded
from datasets.decoding.background import background_of
from datasets.decoding.choice import decoder_of
from datasets.decoding.exif import upright
from datasets.decoding.jpeg import JpegStored
from datasets.decoding.stored import MOST_PIXELS, ArrayStored, PilStored, Stored
from utils.config.data import DataConfig

JPEG_START = b"\xff\xd8\xff"


class Unreadable(Exception):
    """Bytes that are not an image, or a broken one. The text says why."""


class Reader:
    """Opens images. A bad image can raise any exception; `decoding_errors` turns it into Unreadable."""

    def __init__(self, data: DataConfig) -> None:
        self.channels, self.turns = data.IMAGE_CHANNELS, data.EXIF_ROTATE
        self.background = background_of(data)
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
        if self.by_simplejpeg and data.startswith(JPEG_START):
            try:
                return JpegStored(data, self.channels)
            except ValueError:
                pass  # PIL supports more kinds of JPEG, and has better error messages
        # PIL warns of odd EXIF data and large sizes in images that it can read, which is noise during training.
        with warnings.catch_warnings(action="ignore"):
            return PilStored(data, self.channels, self.background)


@contextlib.contextmanager
def decoding_errors(encoded: Encoded) -> Iterator[None]:
    """Raise Unreadable in place of whatever decoding this image raises, except when memory runs out."""
    try:
        yield
    except MemoryError:
        raise  # not the file's fault
    except Exception as error:  # the decoder of a damaged file can raise nearly anything
        raise Unreadable(_reason(error, encoded)) from None


def _reason(error: Exception, encoded: Encoded) -> str:
    """Why an image could not be decoded, for the user who has the file."""
    if len(encoded) == 0:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not an image in a known format"
    if isinstance(error, Image.DecompressionBombError):
        return f"its header claims more than {MOST_PIXELS:,} pixels, PIL's limit against decompression bombs"
    return str(error) or type(error).__name__
