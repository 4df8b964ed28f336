"""Images in memory: whole batches at once, with each sample's own random numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval

from datasets import registry
from datasets.base import ImageDataset, Source, sample_table
from datasets.given import ArrayPixels
from datasets.images import Images
from datasets.memory import ArraySamples, InMemory
from datasets.variants import Repeated
from tests.datasets.opened import CPU, settings
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.distributed.world import ALONE

COUNT, SIDE, MARGIN = 300, 12, 4


def samples(count: int = COUNT, side: int = SIDE, channels: int = 3) -> ArraySamples:
    generator = np.random.default_rng(7)
    pixels = generator.integers(1, 256, (count, side, side, channels), dtype=np.uint8)
    return ArraySamples(pixels, generator.integers(0, 10, count), [str(k) for k in range(10)], "noise")


def opened(train: bool = True, seed: int = 5, **values: Any) -> InMemory:
    data = settings(**{"IMAGE_SIZE": SIDE, "CROP": "pad", "FLIP": 0.5, **values})
    return InMemory(samples(), data, train, seed, CPU, cropped=True)


def images(dataset: InMemory, indices: list[int], epoch: int = 1) -> torch.Tensor:
    return dataset.__getitems__([(epoch, index) for index in indices]).images


def test_memory_crop_uses_each_samples_own_numbers() -> None:
    dataset, indices = opened(), list(range(COUNT))
    batch = dataset.__getitems__([(4, index) for index in indices])
    uniform = sample_table(5, 4, COUNT, 8)
    for index in indices:
        padded = np.pad(samples().pixels[index], ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
        top, left = (int(part * (2 * MARGIN + 1)) for part in uniform[index, 5:7])
        cut = padded[top : top + SIDE, left : left + SIDE]
        cut = cut[:, ::-1] if uniform[index, 7] < 0.5 else cut
        assert np.array_equal(batch.images[index].permute(1, 2, 0).numpy(), cut)
    assert batch.labels.tolist() == samples().labels.tolist()


def test_memory_vertical_flip_turns_images_upside_down() -> None:
    plain = {"CROP": "none", "FLIP": 0.0}
    upright, turned = (images(opened(VERTICAL_FLIP=p, **plain), list(range(COUNT))) for p in (0.0, 1.0))
    assert torch.equal(turned, upright.flip(2))
    some = images(opened(VERTICAL_FLIP=0.25, **plain), list(range(COUNT)))
    assert 0 < sum(torch.equal(one, other) for one, other in zip(some, turned, strict=True)) < COUNT / 2


@pytest.mark.parametrize("values", [{}, {"SHIFT": 0.1, "ROTATE": 10}, {"IMAGE_SIZE": 20}, {"CROP": "none"}])
def test_memory_sample_does_not_depend_on_its_batch(values: dict[str, Any]) -> None:
    dataset, other = opened(**values), opened(**values)
    together = images(dataset, list(range(64)))
    assert torch.equal(together[[9, 3, 40]], images(other, [9, 3, 40]))
    assert torch.equal(together[[9]], images(other, [9]))
    assert not torch.equal(together, images(dataset, list(range(64)), epoch=2))
    assert torch.equal(together, images(dataset, list(range(64))))
    assert not torch.equal(together, images(opened(seed=6, **values), list(range(64))))


@pytest.mark.parametrize(
    ("values", "short"),
    [
        ({"CROP": "none"}, SIDE),
        ({"CROP_PCT": 1.0}, SIDE),
        ({"CROP_PCT": 0.75}, 16),
        ({"CROP": "none", "IMAGE_SIZE": 30}, 30),
    ],
)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_memory_validation_equals_pil(values: dict[str, Any], short: int, interpolation: str) -> None:
    dataset = opened(train=False, INTERPOLATION=interpolation, **values)
    size = dataset.data.shape[1]
    cut = (short - size) // 2
    for index in (0, 11):
        image = Image.fromarray(samples().pixels[index])
        resized = image.resize((short, short), Image.Resampling[interpolation.upper()])
        expected = np.asarray(resized.crop((cut, cut, cut + size, cut + size))).astype(int)
        got = images(dataset, [index])[0].permute(1, 2, 0).numpy()
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(SIDE, SIDE + 9), (SIDE + 9, SIDE)])
@pytest.mark.parametrize("share", [0.9, 1.15])
def test_single_images_of_a_data_set_in_memory_equal_timms(mode: str, size: tuple[int, int], share: float) -> None:
    """predict.py prepares photographs of any shape as such a run does."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    how: dict[str, Any] = {"crop_pct": share, "crop_mode": mode, "interpolation": "bicubic", "mean": (0.3, 0.5, 0.8)}
    timms: Any = transforms_imagenet_eval(8, **how, use_prefetcher=True)
    expected = timms(Image.fromarray(pixels))
    data = settings(IMAGE_SIZE=8, CROP_PCT=share, CROP_MODE=mode, IMAGENET_MEAN=(0.3, 0.5, 0.8))
    out = torch.empty(3, 8, 8, dtype=torch.uint8)
    ArrayPixels(data)(pixels, out)
    assert (out.int() - expected).abs().max() <= 1


def test_memory_grey_equals_pils() -> None:
    got = images(opened(train=False, IMAGE_CHANNELS=1, CROP="none"), [3])
    assert np.array_equal(got[0, 0].numpy(), np.asarray(Image.fromarray(samples().pixels[3]).convert("L")))


def test_memory_grey_images_become_three_equal_channels() -> None:
    data = settings(IMAGE_SIZE=SIDE, CROP="none")
    got = InMemory(samples(channels=1), data, False, 0, CPU, cropped=True).__getitems__([(1, 3)]).images
    assert got.shape == (1, 3, SIDE, SIDE)
    bordered = settings(IMAGE_SIZE=8, CROP_MODE="border", CROP_PCT=1.0, IMAGENET_MEAN=(0.2, 0.4, 0.8))
    ArrayPixels(bordered)(np.full((8, 4, 1), 9, dtype=np.uint8), out := torch.empty(3, 8, 8, dtype=torch.uint8))
    assert out[:, 0, 0].tolist() == [51, 102, 204]
    assert got.is_contiguous()
    assert (got == got[:, :1]).all()


def of_arrays(data: DataConfig, train: bool) -> ImageDataset:
    return registry._open(Source(lambda *_: samples(), arrays="cropped"), data, train, 10, 0, CPU, ALONE)


def test_single_image_augmentation_uses_loading_processes() -> None:
    pad, free = settings(IMAGE_SIZE=SIDE, CROP="pad"), settings(IMAGE_SIZE=SIDE)
    plain, policy = TrainConfig(), TrainConfig.model_validate({"RAND_AUGMENT": True})
    for data, train, in_memory in (
        (pad, plain, True),
        (pad, policy, False),
        (free, plain, False),
        (free, policy, False),
    ):
        dataset = of_arrays(data, True).augment(train)
        assert (dataset.in_memory, isinstance(dataset, Images)) == (in_memory, not in_memory)
        batch = dataset.__getitems__([(1, index) for index in range(8)])
        assert batch.images.shape == (8, 3, SIDE, SIDE)
        assert batch.labels.tolist() == samples().labels[:8].tolist()
    assert of_arrays(free, False).in_memory


def test_digits_warn_of_single_image_augmentation(said: pytest.LogCaptureFixture) -> None:
    data = settings(IMAGE_SIZE=SIDE, CROP="pad", FLIP=1.0)
    dataset = InMemory(samples(), data, True, 0, CPU, cropped=False)
    assert dataset.augment(TrainConfig.model_validate({"RAND_AUGMENT": True})) is dataset
    assert "RAND_AUGMENT: no effect" in said.text
    assert np.array_equal(images(dataset, [4])[0].permute(1, 2, 0).numpy(), samples().pixels[4])


def test_repeated_augmentation_draws_each_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, drawn = opened(REPEATED_AUGMENT=3), []
    monkeypatch.setattr("datasets.memory.sample_table", lambda *given: drawn.append(given[1]) or sample_table(*given))
    repeated = Repeated(dataset, 3)
    copies = [index + copy * COUNT for index in range(20) for copy in range(3)]
    batches = [repeated.__getitems__([(2, index) for index in copies[k : k + 15]]) for k in range(0, 60, 15)]
    assert sorted(drawn) == [4, 5, 6]
    first = batches[0].images[:3]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
