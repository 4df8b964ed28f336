"""Crops and affine transforms of training and validation."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision.transforms import v2

from datasets.memory import BatchAffine, planes, resized
from datasets.transforms.pixels import Pixels, random_view
from tests.datasets.opened import CPU, settings
from tests.datasets.pictures import decoded_by
from utils.config.data import DataConfig
from utils.seeding import seed_host


def pixels_of(data: DataConfig, train: bool, image: np.ndarray) -> np.ndarray:
    """Pixels as height x width x channels."""
    out = torch.full(data.shape, 7, dtype=torch.uint8)
    Pixels(data, train)(image, out)
    return out.permute(1, 2, 0).numpy()


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (2000, 1), (7, 300), (300, 7), (224, 224), (500, 375)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3])
def test_images_of_any_shape_become_square(size: tuple[int, int], channels: int, stored: int) -> None:
    for crop in ("random", "pad", "none"):
        data = settings(IMAGE_SIZE=48, IMAGE_CHANNELS=channels, SHIFT=0.1, ROTATE=10, CROP=crop)
        for train in (True, False):
            assert pixels_of(data, train, np.full((size[1], size[0], stored), 9, np.uint8)).max() == 9


MEAN = (0.3, 0.5, 0.8)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (100, 61), (64, 64), (40, 900), (901, 40), (2, 3)])
@pytest.mark.parametrize("decoder", ["simplejpeg", "pil"])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("share", [0.9, 1.0, 1.15])
def test_validation_equals_timms(
    interpolation: str, size: tuple[int, int], decoder: str, mode: str, share: float
) -> None:
    """timm resizes the whole image and crops it; we do not compute most of what is cropped off."""
    pixels = np.asarray(Image.fromarray(noise(size[0] // 4 + 2, size[1] // 4 + 2)).resize(size))
    how: dict[str, Any] = {"crop_pct": share, "crop_mode": mode, "interpolation": interpolation, "mean": MEAN}
    timms: Any = transforms_imagenet_eval(64, **how, use_prefetcher=True)
    expected = timms(Image.fromarray(pixels))
    values = {"CROP_PCT": share, "CROP_MODE": mode, "INTERPOLATION": interpolation, "IMAGENET_MEAN": MEAN}
    data = settings(IMAGE_SIZE=64, **values)
    with decoded_by(decoder):
        ours = pixels_of(data, False, pixels)
    difference = np.abs(ours.astype(int) - expected.permute(1, 2, 0).numpy())
    assert difference.max() <= 2
    # PIL resizes the sides of a long strip and of a part of it in different order, which rounds differently.
    assert difference.mean() < (0.05 if max(size) < 5 * min(size) else 0.3)


@pytest.mark.parametrize("size", [(96, 64), (64, 96)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("share", [0.9, 1.0, 1.15])
def test_validation_of_rectangles_equals_timms(size: tuple[int, int], mode: str, share: float) -> None:
    """Of one image by itself, and of images in memory, as vitamp.load resizes too."""
    how: dict[str, Any] = {"crop_pct": share, "crop_mode": mode, "interpolation": "bicubic", "mean": MEAN}
    timms: Any = transforms_imagenet_eval(size, **how, use_prefetcher=True)
    data = settings(IMAGE_SIZE=size, CROP_PCT=share, CROP_MODE=mode, IMAGENET_MEAN=MEAN)
    for stored in ((500, 375), (375, 500), (100, 61), (96, 64)):
        pixels = np.asarray(Image.fromarray(noise(stored[0] // 4 + 2, stored[1] // 4 + 2)).resize(stored))
        expected = timms(Image.fromarray(pixels)).permute(1, 2, 0).numpy().astype(int)
        in_memory = resized(planes(pixels[None], 3), data, squeezed=False)[0].permute(1, 2, 0).numpy()
        for ours in (pixels_of(data, False, pixels), in_memory):
            assert ours.shape == expected.shape
            assert np.abs(ours - expected).max() <= 2


def test_random_crops_have_about_the_shape_of_the_input() -> None:
    seed_host(0, "sample", 1, 0)
    data = settings(IMAGE_SIZE=(32, 96), CROP_RATIO=(0.75, 4 / 3))
    boxes = [random_view(data, 900, 600).box for _ in range(300)]
    ratios = [box.width / box.height / 3 for box in boxes]
    assert 0.73 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.37


def test_flip_follows_its_setting() -> None:
    half = np.zeros((16, 16, 1), np.uint8)
    half[:, :8] = 255
    whole: dict[str, Any] = {"CROP_SCALE": (1.0, 1.0), "CROP_RATIO": (1.0, 1.0), "IMAGE_SIZE": 16, "IMAGE_CHANNELS": 1}
    never, always = (pixels_of(settings(**whole, FLIP=flip), True, half) for flip in (0.0, 1.0))
    assert np.array_equal(never, half)
    assert np.array_equal(always, half[:, ::-1])
    mirrored = sum(pixels_of(settings(**whole, FLIP=0.25), True, half)[0, 0, 0] == 0 for _ in range(400))
    assert 60 < mirrored < 140


def test_vertical_flip_turns_images_upside_down_and_draws_nothing_if_it_is_off() -> None:
    half = np.zeros((16, 16, 1), np.uint8)
    half[:8] = 255
    whole: dict[str, Any] = {"CROP": "none", "IMAGE_SIZE": 16, "IMAGE_CHANNELS": 1}
    assert np.array_equal(pixels_of(settings(**whole, VERTICAL_FLIP=1.0), True, half), half[::-1])
    assert np.array_equal(pixels_of(settings(**whole, VERTICAL_FLIP=1.0), False, half), half)
    random.seed(3)
    pixels_of(settings(**whole), True, half)
    drawn = random.random()
    random.seed(3)
    assert drawn == [random.random() for _ in range(2)][1], "one number, that of FLIP"


def test_crop_pad_shifts_the_image_over_black() -> None:
    image = noise(10, 10) | 1
    data = settings(IMAGE_SIZE=10, CROP="pad", FLIP=0.0)
    seen = set()
    for seed in range(800):
        random.seed(seed)
        got = pixels_of(data, True, image)
        framed = np.zeros((18, 18, 3), np.uint8)
        framed[4:14, 4:14] = image
        (place,) = [(y, x) for y in range(9) for x in range(9) if np.array_equal(got, framed[y : y + 10, x : x + 10])]
        seen.add(place)
    assert len(seen) == 81
    assert np.array_equal(pixels_of(settings(IMAGE_SIZE=10, CROP="pad", CROP_PCT=1.0), False, image), image)


@pytest.mark.parametrize("train", [True, False])
def test_crop_none_squeezes_the_whole_image(train: bool) -> None:
    image = noise(30, 18)
    data = settings(IMAGE_SIZE=10, CROP="none", FLIP=0.0, INTERPOLATION="bilinear")
    expected = np.asarray(Image.fromarray(image).resize((10, 10), Image.Resampling.BILINEAR))
    assert np.abs(pixels_of(data, train, image).astype(int) - expected).max() <= 1


def boxes(data: DataConfig, width: int, height: int, count: int) -> np.ndarray:
    random.seed(0)
    views = Pixels(data, True).views
    return np.array([views(width, height).box for _ in range(count)])


def torchvisions(data: DataConfig, width: int, height: int, count: int) -> np.ndarray:
    crop = v2.RandomResizedCrop(8, scale=data.CROP_SCALE, ratio=data.CROP_RATIO)
    torch.manual_seed(0)
    drawn = [crop.make_params([torch.empty(3, height, width)]) for _ in range(count)]
    return np.array([[params[key] for key in ("left", "top", "width", "height")] for params in drawn])


@pytest.mark.parametrize("size", [(500, 375), (60, 90), (500, 100)])
@pytest.mark.parametrize("scale", [(0.05, 1.0), (0.3, 0.5)])
def test_random_crops_have_torchvisions_distribution(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """Position, size, area and shape of the boxes have the same distribution, within the noise of 3,000 draws."""
    data = settings(CROP_SCALE=scale)
    ours, theirs = (draw(data, *size, 3000) for draw in (boxes, torchvisions))
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    for of in (lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3]):
        one, two = np.sort(of(ours)), np.sort(of(theirs))
        both = np.unique(np.concatenate([one, two]))
        apart = np.abs(np.searchsorted(one, both, "right") - np.searchsorted(two, both, "right")).max() / 3000
        assert apart < 1.95 * np.sqrt(2 / 3000)  # Kolmogorov-Smirnov test at 1 in 1,000


@pytest.mark.parametrize(("size", "box"), [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13))])
def test_image_too_long_for_any_crop_is_center_cropped(size: tuple[int, int], box: tuple[int, ...]) -> None:
    drawn = boxes(settings(CROP_SCALE=(0.9, 1.0)), *size, 5)
    assert {tuple(row) for row in drawn.tolist()} == {box}


def affine(row: list[float], image: torch.Tensor, **values: float) -> torch.Tensor:
    """One image transformed by one row of uniform numbers: whether to act, shift x, shift y, zoom, angle."""
    move = BatchAffine(settings(IMAGE_SIZE=tuple(image.shape), **values), CPU)
    return move(image[None, None], move.matrices(np.array([row])))[0, 0]


def test_batch_affine_shifts_as_set() -> None:
    image = torch.zeros(8, 8, dtype=torch.uint8)
    image[2, 3] = 240
    same = affine([0, 0.5, 0.5, 0.5, 0.5], image, SHIFT=0.25, ZOOM=0.5, ROTATE=90)
    assert torch.equal(same, image)
    shifted = affine([0, 1.0, 0.5, 0.5, 0.5], image, SHIFT=0.25)
    assert shifted.nonzero().tolist() == [[2, 5]]
    turned = affine([0, 0.5, 0.5, 0.5, 1.0], image, ROTATE=90)
    assert torch.equal(turned, torch.rot90(image, -1))
    untouched = affine([0.9, 1.0, 1.0, 1.0, 1.0], image, SHIFT=0.25, AFFINE_PROB=0.5)
    assert torch.equal(untouched, image)


def test_batch_affine_turns_rectangles_by_angles_of_pixels() -> None:
    image = torch.zeros(16, 32, dtype=torch.uint8)
    image[6:10, 8:24] = 200
    assert torch.equal(affine([0, 0.5, 0.5, 0.5, 1.0], image, ROTATE=180), image)
    standing = affine([0, 0.5, 0.5, 0.5, 1.0], image, ROTATE=90)
    assert standing.nonzero().min(0).values.tolist() == [0, 14]
    assert standing.nonzero().max(0).values.tolist() == [15, 17]
    shifted = affine([0, 1.0, 0.5, 0.5, 0.5], image, SHIFT=0.25)
    assert torch.equal(shifted, image.roll(8, 1))


def test_batch_affine_zooms_about_the_middle() -> None:
    image = torch.zeros(16, 16, dtype=torch.uint8)
    image[6:10, 6:10] = 200
    larger = affine([0, 0.5, 0.5, 1.0, 0.5], image, ZOOM=0.5)
    smaller = affine([0, 0.5, 0.5, 0.0, 0.5], image, ZOOM=0.5)
    total = float(image.sum())
    assert float(larger.sum()) / total == pytest.approx(1.5**2, rel=0.05)
    assert float(smaller.sum()) / total == pytest.approx(0.5**2, rel=0.05)
    assert torch.equal(larger, larger.flip(0))
    assert torch.equal(larger, larger.flip(1))
