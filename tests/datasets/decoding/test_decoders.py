"""Decoding: only the rows of a JPEG that the crop needs, and one orientation by all decoders (EXIF_ROTATE)."""

import random
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from datasets import check_dataset
from datasets.base import Box
from datasets.decoding import JpegStored, decoder_of_jpeg, header_of
from datasets.transforms.pixels import Pixels
from tests.datasets.opened import settings
from tests.datasets.pictures import encoded, picture, square


def jpeg(subsampling: str, width: int, height: int) -> bytes:
    return simplejpeg.encode_jpeg(np.asarray(picture(width, height)), 90, "RGB", subsampling)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
@pytest.mark.parametrize("size", [(97, 131), (160, 128)])
def test_partial_jpeg_decoding_equals_full_decoding(subsampling: str, size: tuple[int, int]) -> None:
    file = jpeg(subsampling, *size)
    stored = JpegStored(file, 3)
    width, height = stored.width, stored.height
    complete = stored.cut(Box(0, 0, width, height))
    assert complete.shape == (height, width, 3)
    for bottom in range(1, height + 1):
        rows = stored._rows(bottom)
        assert bottom <= len(rows) <= height
        assert np.array_equal(rows[:bottom], complete[:bottom])
    assert len(stored._rows(1)) <= 32


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}])
def test_part_of_a_jpeg_is_decoded_once(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Progressive files and those with restarts are decoded in full, the others down to the last row needed."""
    calls: list[int] = []
    stored = JpegStored(encoded(picture(97, 131), **how), 3)
    decode = stored.decode

    def counted(*args: Any, **kwargs: Any) -> np.ndarray:
        calls.append(1)
        return decode(*args, **kwargs)

    monkeypatch.setattr(stored, "decode", counted)
    found = stored.cut(Box(5, 3, 20, 9))
    assert len(calls) == 1
    assert np.array_equal(found, stored.cut(Box(0, 0, 97, 131))[3:12, 5:25])


def test_pil_decodes_where_simplejpeg_is_missing(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file = settings(DATASET="synthetic"), encoded(picture(60, 50))
    check_dataset(data, 10)
    assert (decoder_of_jpeg(), said.text) == ("simplejpeg", "")
    expected = square(data, True, file, 0, "pil")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    check_dataset(data, 10)
    assert decoder_of_jpeg() == "pil"
    assert "pip install simplejpeg" in said.text
    random.seed(0)
    out = torch.empty_like(expected)
    Pixels(data, True)(file, out)
    assert torch.equal(out, expected)


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>"""


def turned(file: bytes, decoder: str) -> bool:
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


def test_headers_of_png_files_need_no_pixels() -> None:
    """But for EXIF data behind them."""
    whole = encoded(picture(40, 30), "PNG", exif=exif(6))
    begin = whole.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(whole[begin : begin + 4], "big")
    chunk = whole[begin:end]
    behind = whole[:begin] + whole[end:-12] + chunk + whole[-12:]
    for file in (whole, behind):
        header = header_of(file, settings())
        assert header.turned
        assert header.camera["camera"] == "A maker"
    cut_off = encoded(picture(40, 30), "PNG")[:200]
    assert header_of(cut_off, settings()).size == (40, 30)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("made", "wanted"), [(None, False), (exif(None), False), (exif(6), True)])
def test_exif_orientation_is_used_and_xmp_is_ignored(
    kind: str, decoder: str, made: Image.Exif | None, wanted: bool
) -> None:
    """XMP can have an orientation too, but JPEG files are not searched for it."""
    assert turned(with_xmp(kind, made), decoder) == wanted


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
def test_exif_data_of_imagemagick_is_read(decoder: str) -> None:
    text, data = PngInfo(), exif(6).tobytes()
    text.add_text("Raw profile type exif", f"\nexif\n{len(data)}\n{data.hex()}\n")
    assert turned(encoded(picture(40, 30), "PNG", pnginfo=text), decoder)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
def test_odd_exif_data_causes_no_warning(decoder: str) -> None:
    cut_off = exif(6).tobytes()[:-12]
    file = encoded(picture(40, 30), exif=cut_off)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        square(settings(IMAGE_SIZE=16, EXIF_ROTATE=True), True, file, 0, decoder)
