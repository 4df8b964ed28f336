"""Paths from a stored image to uint8 pixels: ours, timm's and torchvision's, on the same samples."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode

from datasets.base import Encoded, Samples
from datasets.images import Images
from datasets.transforms.augment import image_changes
from tools.benchmark_data.rates import BOUND, OURS, TIMM, TORCHVISION, TORCHVISION_FLOAT, Contender
from utils.config.data import DataConfig
from utils.config.train import TrainConfig

Transform = Callable[[Image.Image], Any]


class PerSample(Dataset[tuple[Any, int]]):
    """The usual data set of timm and torchvision: PIL opens the image, a transform does the rest."""

    def __init__(self, samples: Samples, transform: Transform, order: np.ndarray | None = None) -> None:
        self.samples, self.transform = samples, transform
        self.order = np.arange(len(samples)) if order is None else order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        index = int(self.order[place])
        return self.transform(opened(self.samples.read(index))), int(self.samples.labels[index])


def opened(encoded: Encoded) -> Image.Image:
    if isinstance(encoded, np.ndarray):
        return Image.fromarray(encoded.squeeze()).convert("RGB")
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


def timm_transform(data: DataConfig, train: bool, changes: TrainConfig) -> Transform:
    """create_transform as in timm's training: it ends with uint8, which the device normalises."""
    transform: Any = create_transform(
        data.IMAGE_SIZE,
        is_training=train,
        scale=data.CROP_SCALE,
        ratio=data.CROP_RATIO,
        hflip=data.FLIP,
        color_jitter=0.0,
        interpolation=data.INTERPOLATION,
        crop_pct=data.CROP_PCT,
        crop_mode=data.CROP_MODE,
        mean=data.IMAGENET_MEAN,
        use_prefetcher=True,
    )
    if train:
        # The same operations for all: timm's would stop at an image that Pillow 13 refuses to posterise.
        transform.transforms[-1:-1] = image_changes(data, changes)
    return transform


def torchvision_transform(data: DataConfig, train: bool, changes: TrainConfig, normalised: bool) -> Transform:
    """The steps of torchvision's reference training, up to uint8 or including normalisation."""
    mode = InterpolationMode(data.INTERPOLATION)
    if train:
        crop = v1.RandomResizedCrop(data.IMAGE_SIZE, data.CROP_SCALE, data.CROP_RATIO, mode, antialias=True)
        steps: list[Any] = [crop, v1.RandomHorizontalFlip(data.FLIP), *image_changes(data, changes)]
    else:
        short_side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
        steps = [v1.Resize(short_side, mode, antialias=True), v1.CenterCrop(data.IMAGE_SIZE)]
    steps.append(v1.PILToTensor())
    if normalised:
        steps += [v1.ConvertImageDtype(torch.float), v1.Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)]
    return v1.Compose(steps)


def ours(name: str, images: Images, order: np.ndarray, batch: int) -> Contender:
    def work(nth: int, samples: list[int]) -> None:
        for begin in range(0, len(samples), batch):
            images.__getitems__([(nth, index) for index in samples[begin : begin + batch]])

    return Contender(name, order, work)


def theirs(name: str, samples: Samples, order: np.ndarray, transform: Transform) -> Contender:
    dataset = PerSample(samples, transform)

    def work(_: int, chosen: list[int]) -> None:
        for index in chosen:
            dataset[index]

    return Contender(name, order, work)


def paths(images: Images, order: np.ndarray, train: bool, changes: TrainConfig, batch: int) -> list[Contender]:
    """Everything that is compared per core, on one split."""
    data, samples = images.data, images.samples
    return [
        ours(OURS, images, order, batch),
        theirs(TIMM, samples, order, timm_transform(data, train, changes)),
        theirs(TORCHVISION, samples, order, torchvision_transform(data, train, changes, False)),
        theirs(TORCHVISION_FLOAT, samples, order, torchvision_transform(data, train, changes, True)),
    ]


def is_jpeg(encoded: Encoded) -> bool:
    return isinstance(encoded, bytes) and encoded[:2] == b"\xff\xd8"


class InMemory:
    """The samples of a round, read before its time starts."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.encoded: dict[int, Encoded] = {}

    def hold(self, indices: list[int]) -> None:
        self.encoded = {index: self.samples.read(index) for index in indices}

    def __getitem__(self, index: int) -> Encoded:
        return self.encoded[index]


def bound(samples: Samples, order: np.ndarray) -> Contender:
    """Only decode whole JPEG files from memory: no path that looks at every pixel can be faster."""
    from simplejpeg import decode_jpeg

    held = InMemory(samples)

    def work(_: int, indices: list[int]) -> None:
        for index in indices:
            encoded = held[index]
            decode_jpeg(encoded, "RGB") if is_jpeg(encoded) else opened(encoded)

    return Contender(BOUND, order, work, held.hold)
