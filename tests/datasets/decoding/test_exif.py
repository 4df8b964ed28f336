"""EXIF_ROTATE: all decoders use the same orientation."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.datasets.pictures import encoded, picture, square
from utils.config.data import DataConfig

Settings = Callable[..., DataConfig]
XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>"""


def turned(settings: Settings, file: bytes, decoder: str) -> bool:
    """Whether EXIF_ROTATE changes the pixels of the model."""
    plain, turns = (settings(IMAGE_SIZE=16, CROP="none", FLIP=0.0, EXIF_ROTATE=rotate) for rotate in (False, True))
    return not torch.equal(square(plain, True, file, 0, decoder), square(turns, True, file, 0, decoder))


def exif(orientation: int | None) -> Image.Exif:
    made = Image.Exif()
    made[0x010F] = "A maker"
    if orientation:
        made[0x0112] = orientation
    return made


def with_xmp(kind: str, made: Image.Exif | None) -> bytes:
    image, how = picture(40, 30), {} if made is None else {"exif": made}
    if kind == "PNG":
        text = PngInfo()
        text.add_itxt("XML:com.adobe.xmp", XMP)
        return encoded(image, kind, pnginfo=text, **how)
    return encoded(image, kind, xmp=XMP.encode(), **how)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("made", "wanted"), [(None, False), (exif(None), False), (exif(6), True)])
def test_exif_orientation_is_used_and_xmp_is_ignored(
    settings: Settings, kind: str, decoder: str, made: Image.Exif | None, wanted: bool
) -> None:
    """XMP can have an orientation too, but JPEG files are not searched for it."""
    assert turned(settings, with_xmp(kind, made), decoder) == wanted


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
def test_exif_data_of_imagemagick_is_read(settings: Settings, decoder: str) -> None:
    text, data = PngInfo(), exif(6).tobytes()
    text.add_text("Raw profile type exif", f"\nexif\n{len(data)}\n{data.hex()}\n")
    assert turned(settings, encoded(picture(40, 30), "PNG", pnginfo=text), decoder)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
def test_odd_exif_data_causes_no_warning(settings: Settings, decoder: str) -> None:
    cut_off = exif(6).tobytes()[:-12]
    file = encoded(picture(40, 30), exif=cut_off)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        square(settings(IMAGE_SIZE=16, EXIF_ROTATE=True), True, file, 0, decoder)
