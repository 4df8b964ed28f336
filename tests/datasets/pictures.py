"""Generated pictures and their files, for the tests of decoding."""

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from datasets.transforms.pixels import Pixels
from utils.config.data import DataConfig


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shades, edges and some grain, as photographs have them."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(40, 216, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = int(generator.integers(0, width)), int(generator.integers(0, height))
        shade = tuple(generator.integers(0, 256, 3).tolist())
        draw.ellipse((x, y, x + width // 5, y + height // 7), fill=shade)
    grain = generator.integers(-6, 7, (height, width, 3), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(image, dtype=np.int16) + grain, 0, 255).astype(np.uint8))


def deep(image: Image.Image) -> Image.Image:
    """A 16-bit grey image."""
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 256 + 77)


def encoded(image: Image.Image, kind: str = "JPEG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 92} if kind == "JPEG" else {}) | how)
    return file.getvalue()


@contextlib.contextmanager
def decoded_by(decoder: str) -> Iterator[None]:
    """Decode JPEG files with simplejpeg or pil."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.decoding._import_error", lambda: "hidden" if decoder == "pil" else None)
        yield


def square(
    data: DataConfig, train: bool, image: bytes | np.ndarray, seed: int = 0, decoder: str = "simplejpeg"
) -> torch.Tensor:
    """Pixels of an image after preprocessing, with the random numbers of `seed`."""
    random.seed(seed)
    out = torch.full(data.shape, 77, dtype=torch.uint8)
    with decoded_by(decoder):
        Pixels(data, train)(image, out)
    return out


def apart(one: torch.Tensor, two: torch.Tensor) -> tuple[float, int]:
    """Mean and greatest absolute difference."""
    difference = (one.int() - two.int()).abs()
    return float(difference.float().mean()), int(difference.max())
