"""Preprocessing of images: all ways of decoding and resizing agree with PIL."""

import io
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from datasets.base import Unreadable
from datasets.transforms.pixels import Pixels
from tests.datasets.opened import settings
from tests.datasets.pictures import apart, decoded_by, deep, encoded, picture, square
from tests.refused import refusal

Kind = Callable[[Image.Image], bytes | np.ndarray]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, as in loading processes; more threads slow such small work down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clear(image: Image.Image) -> Image.Image:
    """An image with a varying alpha channel."""
    image = image.convert("RGBA")
    image.putalpha(image.getchannel("G"))
    return image


KINDS: dict[str, Kind] = {
    "4:2:0": lambda image: encoded(image, subsampling="4:2:0"),
    "4:2:2": lambda image: encoded(image, subsampling="4:2:2"),
    "4:4:4": lambda image: encoded(image, subsampling="4:4:4"),
    "rgb inside": lambda image: encoded(image, keep_rgb=True),
    "progressive": lambda image: encoded(image, progressive=True),
    "with restarts": lambda image: encoded(image, restart_marker_rows=1),
    "grey": lambda image: encoded(image.convert("L")),
    "cmyk": lambda image: encoded(image.convert("CMYK")),
    "png": lambda image: encoded(image, "PNG"),
    "grey png": lambda image: encoded(image.convert("L"), "PNG"),
    "two colours": lambda image: encoded(image.convert("1", dither=Image.Dither.NONE), "PNG"),
    "palette": lambda image: encoded(image.quantize(64, Image.Quantize.FASTOCTREE), "PNG"),
    "clear palette": lambda image: encoded(image.quantize(64, Image.Quantize.FASTOCTREE), "PNG", transparency=3),
    "alpha": lambda image: encoded(clear(image), "PNG"),
    "grey and alpha": lambda image: encoded(clear(image).convert("LA"), "PNG"),
    "16 bits": lambda image: encoded(deep(image), "PNG"),
    "webp": lambda image: encoded(image, "WEBP"),
    "gif": lambda image: encoded(image.quantize(64, Image.Quantize.FASTOCTREE), "GIF"),
    "tiff": lambda image: encoded(image, "TIFF"),
    "pixels": np.asarray,
    "grey pixels": lambda image: np.asarray(image.convert("L"))[:, :, None],
}
LYING = [(331, 250), (257, 257)]
"""PIL resizes wide images row by row first, as torch always does; the order affects the last bit."""


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [True, False])
def test_every_kind_of_file_agrees_with_pil(kind: str, train: bool, channels: int) -> None:
    data = settings(IMAGE_SIZE=112, IMAGE_CHANNELS=channels, CROP_SCALE=(0.3, 1), CROP_RATIO=(1, 1.5))
    for seed, size in enumerate(LYING):
        image = KINDS[kind](picture(*size, seed))
        mean, most = apart(square(data, train, image, seed), square(data, train, image, seed, "pil"))
        assert mean <= 0.05
        assert most <= 2


@pytest.mark.parametrize(("size", "side"), [(8, 8), (16, 17), (224, 253)])
def test_resize_with_an_unchanged_side_agrees_with_pil(size: int, side: int) -> None:
    """These sides keep their length, but are resized: as many pixels are needed up to the edge of the centre crop."""
    data = settings(IMAGE_SIZE=size)
    image = encoded(picture(side, side, 1), "png")
    assert apart(square(data, False, image), square(data, False, image, decoder="pil"))[0] <= 0.05


SHADES = np.repeat(np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16), 4, axis=0)
OVER = np.array([[-5, 0x4000, 0x8000, 100_000]] * 4, dtype=np.int32)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(encoded(Image.fromarray(SHADES), "PNG"), id="png"),
        pytest.param(b"P5 4 4 65535\n" + SHADES.astype(">u2").tobytes(), id="pgm"),
        pytest.param(encoded(Image.fromarray(SHADES), "TIFF"), id="tiff"),
        pytest.param(encoded(Image.fromarray(OVER), "TIFF"), id="tiff of 32 bits, and beyond 16"),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_keep_their_shades(file: bytes, channels: int) -> None:
    """Pillow's own conversion clips at 255, which makes most of them white."""
    data = settings(IMAGE_SIZE=4, IMAGE_CHANNELS=channels, CROP="none", FLIP=0.0)
    assert [plane[0].tolist() for plane in square(data, True, file)] == [[0, 64, 128, 255]] * channels


def test_floating_point_pixels_are_refused() -> None:
    """Their range is unknown: 0 to 1, 0 to 255, degrees or metres."""
    file = encoded(Image.fromarray(SHADES.astype(np.float32) / 65535), "TIFF")
    assert "floating-point" in reason(file)


UNDO = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
"""EXIF orientation -> transposition that gives an upright image this orientation"""


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
def test_exif_rotates_only_if_set(kind: str, orientation: int, decoder: str) -> None:
    """Rotated as by Pillow's exif_transpose if set, else not rotated, as in timm. Crops are made upright.

    TIFF files are upright in either case: Pillow rotates them when it reads them.
    """
    drawn = picture(60, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(drawn.transpose(Image.Transpose(UNDO[orientation])) if orientation > 1 else drawn, kind, exif=exif)
    with Image.open(io.BytesIO(file)) as opened:
        as_it_lies, upright = (np.asarray(image.convert("RGB")) for image in (opened, ImageOps.exif_transpose(opened)))
    assert upright.shape == (40, 60, 3)
    for values in ({"CROP": "none", "FLIP": 0.0}, {"CROP_SCALE": (0.3, 0.5)}):
        plain = settings(IMAGE_SIZE=16, **values)
        turns = settings(IMAGE_SIZE=16, EXIF_ROTATE=True, **values)
        assert torch.equal(square(turns, True, file, 0, decoder), square(plain, True, upright, 0, decoder))
        assert torch.equal(square(plain, True, file, 0, decoder), square(plain, True, as_it_lies, 0, decoder))


def reason(image: bytes, decoder: str = "simplejpeg", **values: Any) -> str:
    return refusal(square, settings(**values), True, image, 0, decoder, by=Unreadable)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "png", "webp"])
def test_broken_images_give_a_reason(kind: str, decoder: str) -> None:
    """Files cut off anywhere, even below the crop."""
    whole = KINDS[kind](picture(160, 120))
    assert isinstance(whole, bytes)
    lengths = [len(whole) * 9 // 10, len(whole) // 2, 300, 20]
    for length in lengths if kind == "png" else [len(whole) - 2, *lengths]:  # PIL accepts a PNG without its end marker
        for crop in ("random", "none"):
            said = reason(whole[:length], decoder, CROP=crop, CROP_SCALE=(0.02, 0.03))
            assert said
            assert "0x" not in said
    assert "is empty" in reason(b"", decoder)
    assert "not an image" in reason(b"These are my holiday photographs.\n" * 50, decoder)
    assert "not an image" in reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", decoder)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF"])
def test_decompression_bomb_is_refused(decoder: str, kind: str) -> None:
    """A small file whose header claims 60,000 x 60,000 pixels, 10 GB."""
    bomb = bytearray(encoded(Image.new("RGB", (16, 16)), kind))
    if kind == "JPEG":
        place = bomb.index(b"\xff\xc0") + 5
        bomb[place : place + 4] = (60_000).to_bytes(2, "big") * 2
    elif kind == "GIF":
        bomb[6:10] = (60_000).to_bytes(2, "little") * 2
    else:
        bomb[16:24] = (60_000).to_bytes(4, "big") * 2
        bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    said = reason(bytes(bomb), decoder)
    assert "it decodes to 28,800,000,000 bytes or more; DATA.MAX_IMAGE_BYTES allows 1,073,741,824" in said


def test_large_images_cause_no_warning() -> None:
    """PIL would warn of each image with more than 89 million pixels."""
    large = encoded(Image.new("1", (10_000, 9_000)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert square(settings(CROP_SCALE=(0.001, 0.001)), True, large).max() == 0


def test_damaged_jpegs_are_judged_like_pil() -> None:
    """Also for damage below the crop, which is not decoded: whether a file is readable does not depend on the crop."""
    files = [KINDS[kind](picture(96, 80)) for kind in ("4:2:0", "4:4:4", "with restarts", "grey", "progressive")]
    generator = np.random.default_rng(0)
    both = []
    for decoder in ("simplejpeg", "pil"):
        with decoded_by(decoder):
            both.append(Pixels(settings(IMAGE_SIZE=32), True))
    verdicts = []
    for number in range(250):
        whole = files[number % len(files)]
        assert isinstance(whole, bytes)
        damaged = bytearray(whole)
        at = int(generator.integers(200, len(damaged) - 2))
        if number % 2:
            damaged[at : at + 2] = bytes([255, int(generator.integers(256))])
        else:
            damaged[at] = int(generator.integers(256))
        found = [readable(pixels, bytes(damaged), number) for pixels in both]
        assert found[0] == found[1], number
        verdicts.append(found[0])
    assert 30 < sum(verdicts) < 220


def readable(pixels: Pixels, image: bytes, seed: int) -> bool:
    random.seed(seed)
    try:
        pixels(image, torch.empty(3, 32, 32, dtype=torch.uint8))
    except Unreadable:
        return False
    return True
