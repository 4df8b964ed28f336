"""`synthetic`: random images made on the device, to measure training without input. They can be learned by heart."""

from __future__ import annotations

import logging

import numpy as np
import torch

from datasets.base import PADDING, Batch, ImageDataset, Key, Source
from utils.config.data import DataConfig
from utils.seeding import key

POOL = 128
"""Different images there are; sample i is image i modulo this."""

log = logging.getLogger("vitamp")


class Synthetic(ImageDataset):
    """`samples` samples out of a small pool of images, which training and validation share."""

    in_memory = True

    def __init__(self, samples: int, data: DataConfig, num_classes: int, seed: int, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.data, self.num_classes, self.seed = data, num_classes, seed
        shape = (POOL, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
        generator = np.random.Generator(np.random.Philox(key=key(seed, "synthetic")))
        self.images = torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8)).to(device)
        self.labels = torch.arange(POOL, device=device) % num_classes

    def __len__(self) -> int:
        return self.samples

    def at_size(self, size: int) -> ImageDataset:
        data = self.data.model_copy(update={"IMAGE_SIZE": size})
        return Synthetic(self.samples, data, self.num_classes, self.seed, self.device)

    def __getitems__(self, keys: list[Key]) -> Batch:
        # Padding takes part like a sample: its index says that it does not count, and blanking it would cost a pass.
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        chosen = indices.clamp(min=0) % POOL
        return Batch(self.images[chosen], self.labels[chosen] * (indices != PADDING), indices)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Synthetic:
    return Synthetic(data.SYNTHETIC_TRAIN if train else data.SYNTHETIC_VAL, data, num_classes, seed, device)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:  # noqa: ARG001 - there is nothing to be wrong
    if data.DATA_PATH is not None:
        log.info("DATA.DATA_PATH is not used: the data set synthetic is made on the device.")


SOURCE = Source(_open, _check)
