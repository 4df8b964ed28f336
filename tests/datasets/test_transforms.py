from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.transforms import BatchAffine, as_wanted, training_transform, validation_transform
from utils.config.schema import DataConfig

Settings = Callable[..., DataConfig]


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (300, 7), (224, 224), (500, 375)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_shape_of_image_comes_out_square(settings: Settings, size: tuple[int, int], channels: int) -> None:
    image = Image.new("L" if channels == 1 else "RGB", size)
    data = settings(IMAGE_SIZE=48, SHIFT=0.1, ROTATE=10)
    for transform in (training_transform(data), validation_transform(data)):
        pixels = transform(image)
        assert pixels.shape == (channels, 48, 48)
        assert pixels.dtype == torch.uint8


def test_validation_keeps_the_middle(settings: Settings) -> None:
    """A 256 x 512 image needs no resizing at 224 / 0.875, so the crop must be its exact middle."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 512, 3), dtype=np.uint8)
    cropped = validation_transform(settings(IMAGE_SIZE=224))(Image.fromarray(pixels))
    assert np.array_equal(cropped.permute(1, 2, 0).numpy(), pixels[16:240, 144:368])


def test_validation_rounds_the_resized_side_down(settings: Settings) -> None:
    """224 / 0.9 is 248.9: an image with a short side of 248 is taken as it is."""
    pixels = np.random.default_rng(0).integers(0, 256, (248, 248, 3), dtype=np.uint8)
    cropped = validation_transform(settings(IMAGE_SIZE=224, CROP_PCT=0.9))(Image.fromarray(pixels))
    assert np.array_equal(cropped.permute(1, 2, 0).numpy(), pixels[12:236, 12:236])


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resizing_is_pillows(settings: Settings, interpolation: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = settings(IMAGE_SIZE=24, CROP_PCT=1.0, INTERPOLATION=interpolation)
    expected = Image.fromarray(pixels).resize((24, 24), Image.Resampling[interpolation.upper()])
    got = validation_transform(data)(Image.fromarray(pixels))
    assert np.array_equal(got.permute(1, 2, 0).numpy(), np.asarray(expected))


def test_flip_and_crop_follow_the_settings(settings: Settings) -> None:
    half = Image.new("L", (16, 16))
    half.paste(255, (0, 0, 8, 16))
    whole = {"CROP_SCALE": (1.0, 1.0), "CROP_RATIO": (1.0, 1.0), "IMAGE_SIZE": 16, "IMAGE_CHANNELS": 1}
    never, always = (training_transform(settings(**whole, FLIP=flip))(half) for flip in (0.0, 1.0))
    assert np.array_equal(never[0].numpy(), np.asarray(half))
    assert torch.equal(never.flip(-1), always)
    small = training_transform(settings(IMAGE_SIZE=16, CROP_SCALE=(0.05, 0.1), FLIP=0.0))(half.convert("RGB"))
    assert small.shape == (3, 16, 16)


def test_modes_become_rgb_or_grey(tmp_path: Path) -> None:
    red = Image.new("RGB", (10, 6), (200, 10, 10))
    files = {
        "rgb.png": red,
        "grey.png": red.convert("L"),
        "bits.png": red.convert("1"),
        "palette.png": red.convert("P"),
        "alpha.png": red.convert("RGBA"),
        "grey_alpha.png": red.convert("LA"),
        "cmyk.jpg": red.convert("CMYK"),
        "clear.gif": red.convert("P"),
    }
    for name, image in files.items():
        image.info = {"transparency": bytes([0, 128]) if name == "palette.png" else 0} if image.mode == "P" else {}
        image.save(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in files:
            colour, grey = (as_wanted(Image.open(tmp_path / name), channels) for channels in (3, 1))
            assert (colour.mode, colour.size) == ("RGB", (10, 6)), name
            assert (grey.mode, grey.size) == ("L", (10, 6)), name
    for name in ("rgb.png", "alpha.png", "palette.png", "cmyk.jpg"):
        pixel = np.asarray(as_wanted(Image.open(tmp_path / name), 3))[3, 3].astype(int)
        assert np.abs(pixel - (200, 10, 10)).max() < 12, name


def test_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    shades = np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    assert np.asarray(as_wanted(Image.open(tmp_path / "deep.png"), 1)).tolist() == [[0, 64, 128, 255]]


def affine(settings: Settings, row: list[float], image: torch.Tensor, **values: float) -> torch.Tensor:
    """One image moved by one row of uniform numbers: whether it acts, shift x, shift y, zoom, angle."""
    move = BatchAffine(settings(IMAGE_SIZE=image.shape[-1], **values), torch.device("cpu"))
    return move(image[None, None], move.matrices(np.array([row])))[0, 0]


def test_batch_affine_moves_as_said(settings: Settings) -> None:
    image = torch.zeros(8, 8, dtype=torch.uint8)
    image[2, 3] = 240
    same = affine(settings, [0, 0.5, 0.5, 0.5, 0.5], image, SHIFT=0.25, ZOOM=0.5, ROTATE=90)
    assert torch.equal(same, image)
    shifted = affine(settings, [0, 1.0, 0.5, 0.5, 0.5], image, SHIFT=0.25)
    assert shifted.nonzero().tolist() == [[2, 5]]
    turned = affine(settings, [0, 0.5, 0.5, 0.5, 1.0], image, ROTATE=90)
    assert torch.equal(turned, torch.rot90(image, -1))
    untouched = affine(settings, [0.9, 1.0, 1.0, 1.0, 1.0], image, SHIFT=0.25, AFFINE_PROB=0.5)
    assert torch.equal(untouched, image)


def test_batch_affine_zooms_about_the_middle(settings: Settings) -> None:
    image = torch.zeros(16, 16, dtype=torch.uint8)
    image[6:10, 6:10] = 200
    larger = affine(settings, [0, 0.5, 0.5, 1.0, 0.5], image, ZOOM=0.5)
    smaller = affine(settings, [0, 0.5, 0.5, 0.0, 0.5], image, ZOOM=0.5)
    total = float(image.sum())
    assert float(larger.sum()) / total == pytest.approx(1.5**2, rel=0.05)
    assert float(smaller.sum()) / total == pytest.approx(0.5**2, rel=0.05)
    assert torch.equal(larger, larger.flip(0))
    assert torch.equal(larger, larger.flip(1))
