"""DATA.BACKGROUND: what the model sees at transparent pixels, whatever the file and whoever reads it."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.base import background_of
from datasets.given import ArrayPixels
from tests.datasets.opened import settings
from tests.datasets.pictures import deep, encoded, square
from tools.pack_images.run import Encoder
from utils.config.data import DataConfig
from vitamp.timm_model import Upright

SIDE = 8
HIDDEN, SHOWN = (0, 200, 0), (200, 0, 0)
GREY_HIDDEN, GREY_SHOWN = 40, 200
BEHIND: dict[Any, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "mean": (51, 102, 153),
    (1, 2, 3): (1, 2, 3),
}


def halves(mode: str, shown: Any, hidden: Any) -> Image.Image:
    """An image with another colour in its right half."""
    image = Image.new(mode, (SIDE, SIDE), shown)
    image.paste(hidden, (SIDE // 2, 0, SIDE, SIDE))
    return image


def palette() -> Image.Image:
    image = halves("P", 0, 1)
    image.putpalette([*SHOWN, *HIDDEN, *[0] * 3 * 254])
    return image


RGBA = halves("RGBA", (*SHOWN, 255), (*HIDDEN, 0))
COLOURED = {
    "png": encoded(RGBA, "PNG"),
    "palette": encoded(palette(), "PNG", transparency=1),
    "palette with an alpha for each entry": encoded(palette(), "PNG", transparency=b"\xff\0"),
    "one transparent colour": encoded(halves("RGB", SHOWN, HIDDEN), "PNG", transparency=HIDDEN),
    "gif": encoded(palette(), "GIF", transparency=1),
    "webp": encoded(RGBA, "WEBP", lossless=True, exact=True),
    "tiff": encoded(RGBA, "TIFF"),
    "jpeg 2000": encoded(RGBA, "JPEG2000"),
}
GREY = {
    "grey png": encoded(halves("LA", (GREY_SHOWN, 255), (GREY_HIDDEN, 0)), "PNG"),
    "one transparent grey": encoded(halves("L", GREY_SHOWN, GREY_HIDDEN), "PNG", transparency=GREY_HIDDEN),
    "one transparent grey of 16 bits": encoded(
        deep(halves("L", GREY_SHOWN, GREY_HIDDEN)), "PNG", transparency=GREY_HIDDEN * 256 + 77
    ),
}


def by_training(data: DataConfig, file: bytes) -> np.ndarray:
    return square(data, True, file).permute(1, 2, 0).numpy()


def in_memory(data: DataConfig, file: bytes) -> np.ndarray:
    out = torch.empty(data.IMAGE_CHANNELS, SIDE, SIDE, dtype=torch.uint8)
    ArrayPixels(data)(file, out)
    return out.permute(1, 2, 0).numpy()


def by_packing(data: DataConfig, file: bytes) -> np.ndarray:
    return np.load(io.BytesIO(Encoder(data, {"kind": "raw", "short_side": SIDE})(file, "a.png")[1]))


def by_load(data: DataConfig, file: bytes) -> np.ndarray:
    return np.asarray(Upright(data.IMAGE_CHANNELS, False, background_of(data))(Image.open(io.BytesIO(file))))


@pytest.mark.parametrize("reader", [by_training, in_memory, by_packing, by_load])
@pytest.mark.parametrize("name", [*COLOURED, *GREY])
def test_every_file_and_reader_shows_the_background(
    name: str, reader: Callable[[DataConfig, bytes], np.ndarray]
) -> None:
    file = {**COLOURED, **GREY}[name]
    shown, hidden = (SHOWN, HIDDEN) if name in COLOURED else ([GREY_SHOWN] * 3, [GREY_HIDDEN] * 3)
    for background, behind in {**BEHIND, "drop": hidden}.items():
        values = {"BACKGROUND": background, "IMAGENET_MEAN": (0.2, 0.4, 0.6), "CROP": "none", "FLIP": 0.0}
        data = settings(IMAGE_SIZE=SIDE, **values)
        got = np.broadcast_to(reader(data, file), (SIDE, SIDE, 3))
        assert got[0, 0].tolist() == [*shown]
        assert got[0, -1].tolist() == [*behind], background


def test_grey_models_see_the_grey_of_the_background() -> None:
    for file in (COLOURED["png"], GREY["grey png"]):
        data = settings(IMAGE_SIZE=SIDE, IMAGE_CHANNELS=1, CROP="none", FLIP=0.0, BACKGROUND=(255, 0, 0))
        assert square(data, False, file)[0, 0, -1] == 76


def test_half_transparent_pixels_are_mixed_with_the_background() -> None:
    """Alpha is straight: stored colours are not multiplied by it."""
    file = encoded(Image.new("RGBA", (SIDE, SIDE), (200, 100, 0, 51)), "PNG")
    data = settings(IMAGE_SIZE=SIDE, CROP="none", BACKGROUND="white")
    assert square(data, False, file)[:, 0, 0].tolist() == [244, 224, 204]


def test_packing_keeps_no_small_file_with_transparent_pixels() -> None:
    """Else its background would be that of the training, and that of larger images the one of the packing."""
    opaque = encoded(Image.new("RGBA", (SIDE, SIDE), (200, 100, 0, 255)), "PNG")
    for background in ("white", "drop"):
        encode = Encoder(settings(BACKGROUND=background), {"kind": "jpeg", "short_side": SIDE, "quality": 90})
        files = (opaque, COLOURED["png"], opaque, COLOURED["palette"])
        assert [encode(file, "a.png")[0] for file in files] == ["png", "jpg"] * 2
