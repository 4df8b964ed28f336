"""Encoded images, made into batches of pixels."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import get_worker_info

from utils.config.schema import DataConfig, TrainConfig
from utils.errors import TrainingError
from utils.seeding import host_generators_kept

from .base import PADDING, Batch, ImageDataset, Key
from .pixels import Pixels, Unreadable
from .randomness import seed_sample
from .samples import Samples


class Images(ImageDataset):
    """The training or the validation part of a source whose images are read one by one."""

    def __init__(self, samples: Samples, data: DataConfig, train: bool, seed: int) -> None:
        self.samples, self.classes = samples, samples.classes
        self.data, self.seed, self.train = data, seed, train
        self.pixels = Pixels(data, train)

    def augment(self, train: TrainConfig) -> ImageDataset:
        self.pixels = Pixels(self.data, self.train, train)
        return self

    def __len__(self) -> int:
        return len(self.samples)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        return self.samples.shuffled(generator)

    def __getitems__(self, keys: list[Key]) -> Batch:
        if get_worker_info() is not None:
            return self._load(keys)
        with host_generators_kept():
            return self._load(keys)

    def _load(self, keys: list[Key]) -> Batch:
        size = self.data.IMAGE_SIZE
        images = torch.zeros(len(keys), self.data.IMAGE_CHANNELS, size, size, dtype=torch.uint8)
        labels = torch.zeros(len(keys), dtype=torch.int64)
        self.samples.expect([index for _, index in keys if index != PADDING])
        for row, (epoch, index) in enumerate(keys):
            if index == PADDING:
                continue
            if self.train:
                seed_sample(self.seed, epoch, index)
            self._fill(images[row], index)
            labels[row] = int(self.samples.labels[index])
        return Batch(images, labels, torch.tensor([index for _, index in keys]))

    def _fill(self, out: torch.Tensor, index: int) -> None:
        name = self.samples.name(index)
        try:
            self.pixels(self.samples.read(index), out)
        except FileNotFoundError:
            raise TrainingError(f"The image {name} (sample {index}) does not exist.") from None
        except (OSError, Unreadable) as error:
            raise TrainingError(
                f"The image {name} (sample {index}) cannot be read: {error}. Replace it or leave it out."
            ) from None
