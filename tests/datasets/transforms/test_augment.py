"""RandAugment, AutoAugment and others: effect, random numbers, and no errors."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.transforms.augment import image_changes
from datasets.transforms.pixels import Pixels
from tests.datasets.opened import settings
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.seeding import seed_host

POLICIES: dict[str, dict[str, Any]] = {
    "rand": {"RAND_AUGMENT": True},
    "auto": {"AUTO_AUGMENT": True},
    "trivial": {"AUGMENT": ["trivial"]},
    "three": {"AUGMENT": ["three"]},
    "jitter": {"COLOR_JITTER": 0.4},
}
UNCROPPED: dict[str, Any] = {"CROP_SCALE": (1.0, 1.0), "CROP_RATIO": (1.0, 1.0), "FLIP": 0.0}


def picture(side: int = 24, seed: int = 0) -> Image.Image:
    """An image of smooth colours, which every operation changes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)


def change(data: DataConfig, seed: int, image: Image.Image | None = None, **train: Any) -> torch.Tensor:
    """One image through the training transform, with the random numbers of sample `seed`."""
    seed_host(0, "sample", 1, seed)
    out = torch.empty(data.shape, dtype=torch.uint8)
    image = image or picture(data.shape[1]).convert("L" if data.IMAGE_CHANNELS == 1 else "RGB")
    Pixels(data, True, TrainConfig.model_validate(train))(np.asarray(image), out)
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("key", POLICIES)
def test_each_augmentation_changes_images_reproducibly(key: str, channels: int) -> None:
    data = settings(IMAGE_SIZE=24, IMAGE_CHANNELS=channels, **UNCROPPED)
    plain = change(data, 0)
    results = [change(data, seed, **POLICIES[key]) for seed in range(60)]
    assert {(tuple(image.shape), image.dtype) for image in results} == {((channels, 24, 24), torch.uint8)}
    changed = sum(not torch.equal(image, plain) for image in results)
    assert changed > 20
    assert len({image.numpy().tobytes() for image in results}) > 8 or key == "three"
    again = [change(data, seed, **POLICIES[key]) for seed in range(60)]
    assert all(torch.equal(one, two) for one, two in zip(results, again, strict=True))


def test_rand_augment_wins_over_auto_augment_and_turns_jitter_off() -> None:
    data = settings(IMAGE_SIZE=24, **UNCROPPED)
    for seed in range(8):
        rand = change(data, seed, RAND_AUGMENT=True)
        assert torch.equal(change(data, seed, RAND_AUGMENT=True, AUTO_AUGMENT=True, COLOR_JITTER=0.4), rand)
        auto = change(data, seed, AUTO_AUGMENT=True)
        assert torch.equal(change(data, seed, AUTO_AUGMENT=True, COLOR_JITTER=0.4), auto)
    three = [change(data, seed, AUGMENT=["three"]) for seed in range(8)]
    jittered = [change(data, seed, AUGMENT=["three"], COLOR_JITTER=0.4) for seed in range(8)]
    assert not any(torch.equal(one, two) for one, two in zip(three, jittered, strict=True))


def test_layers_and_magnitude_of_rand_augment_act() -> None:
    data = settings(IMAGE_SIZE=24, **UNCROPPED)
    plain = change(data, 0).float()

    def distance(**train: Any) -> float:
        changed = [change(data, seed, RAND_AUGMENT=True, **train).float() for seed in range(60)]
        return float(torch.stack([(image - plain).abs().mean() for image in changed]).mean())

    assert distance(RAND_AUGMENT_LAYERS=6) > 1.3 * distance(RAND_AUGMENT_LAYERS=1)
    assert distance(RAND_AUGMENT_MAGNITUDE=9) > 1.3 * distance(RAND_AUGMENT_MAGNITUDE=1)


@pytest.mark.parametrize("channels", [1, 3])
def test_uncovered_corners_have_the_mean_colour(channels: int) -> None:
    """Uncovered corners have the fill colour; shears and shifts alone leave two shades."""
    data = settings(IMAGE_SIZE=16, IMAGE_CHANNELS=channels, IMAGENET_MEAN=0.2, INTERPOLATION="bilinear", **UNCROPPED)
    white = Image.new("L" if channels == 1 else "RGB", (16, 16), "white")
    (augment,) = image_changes(data, TrainConfig(RAND_AUGMENT=True))
    shears = [operation for operation in augment.ops if "Translate" in operation.name]  # pyright: ignore
    for operation in shears:
        operation.prob = 1.0
        assert set(np.unique(np.asarray(operation(white)))) == {51, 255}


def test_the_strongest_posterising_leaves_two_shades() -> None:
    (augment,) = image_changes(settings(), TrainConfig(RAND_AUGMENT=True, RAND_AUGMENT_MAGNITUDE=10))
    (posterize,) = (operation for operation in augment.ops if "Posterize" in operation.name)  # pyright: ignore
    posterize.prob, posterize.magnitude_std = 1.0, 0
    assert np.unique(np.asarray(posterize(picture()))).tolist() == [0, 128]
