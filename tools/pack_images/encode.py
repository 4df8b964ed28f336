"""Encoding of one image for a packed data set."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from PIL import Image

from datasets.base import Encoded
from datasets.decoding.background import take_transparent
from datasets.decoding.exif import Turned
from datasets.decoding.reader import Reader, decoding_errors
from datasets.decoding.stored import Box
from datasets.shards.parquet import kind_of
from datasets.shards.tar import IMAGE_KINDS
from utils.config.data import DataConfig


class Packed(NamedTuple):
    kind: str
    """File ending"""
    content: bytes
    small: bool
    """Not larger than the short side, so kept unchanged"""
    transparent: bool = False
    """Has transparent pixels"""


class Encoder:
    """Resizes and encodes an image, or keeps it; raises Unreadable if training could not read it either."""

    def __init__(self, data: DataConfig, settings: dict[str, int | str | bool]) -> None:
        self.reader = Reader(data)
        self.kind = settings["kind"]
        self.short_side, self.quality = int(settings.get("short_side", 0)), int(settings.get("quality", 0))

    def __call__(self, encoded: Encoded, name: str) -> Packed:
        pixels, turned, transparent = self._pixels(encoded)
        small = bool(self.short_side) and min(pixels.shape[:2]) <= self.short_side
        if self.kind == "raw" or isinstance(encoded, np.ndarray):
            content = as_npy(pixels if small or self.kind == "keep" else self._resized(pixels))
            return Packed("npy", content, small, transparent)
        # A file that is kept would follow the settings of training, not those of the other packed images.
        if self.kind == "keep" or (small and not turned and not transparent):
            return Packed(_kind(name, encoded), encoded, small, transparent)
        return Packed("jpg", self._jpeg(pixels if small else self._resized(pixels)), False, transparent)

    def _pixels(self, encoded: Encoded) -> tuple[np.ndarray, bool, bool]:
        """All pixels, whether EXIF rotated them, and whether some of them are transparent."""
        take_transparent()
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        return pixels, isinstance(stored, Turned), bool(take_transparent())

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        """Resized down to the short side. Pillow's filter averages over all pixels, so there is no aliasing."""
        height, width, channels = pixels.shape
        scale = self.short_side / min(height, width)
        size = max(self.short_side, round(width * scale)), max(self.short_side, round(height * scale))
        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC)).reshape(size[1], size[0], channels)

    def _jpeg(self, pixels: np.ndarray) -> bytes:
        """Baseline JPEG with 4:2:0 subsampling, which decodes fastest."""
        image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        file = io.BytesIO()
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return file.getvalue()


def as_npy(pixels: np.ndarray) -> bytes:
    """Pixels as a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _kind(name: str, content: bytes) -> str:
    kind = name.rpartition(".")[2].lower()
    return kind if kind in IMAGE_KINDS and kind != "npy" else kind_of(content)
