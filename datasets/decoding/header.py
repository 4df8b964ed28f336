"""What an image's header says, without decoding its pixels."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image

from datasets.decoding.exif import TURNS, orientation_of

TRANSPARENT, GREY = "transparent", "grey"


class Header(NamedTuple):
    mode: str
    """How the colours are stored; '' where the model takes them so, or where it is unknown"""
    size: tuple[int, int]
    """Width and height; (0, 0) where unknown"""
    turned: bool = False
    """Whether its EXIF data says that it is to be turned"""


def header_of(encoded: bytes, channels: int) -> Header:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return Header(_unusual_mode(image, channels), image.size, orientation_of(image) in TURNS)
    except Exception:  # only another decoder than Pillow can read it, or a damaged header, which can raise anything
        return Header("", (0, 0))


def _unusual_mode(image: Image.Image, channels: int) -> str:
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        return TRANSPARENT
    if image.mode.startswith("I") or image.mode == "F":
        return "16 bits and more"
    if image.mode in ("L", "1"):
        return "" if channels == 1 else GREY
    names = {"RGB": "" if channels == 3 else "coloured", "P": "palette"}
    return names.get(image.mode, image.mode)
