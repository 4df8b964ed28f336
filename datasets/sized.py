"""Images that grow in the course of training: TRAIN.SIZE_SCHEDULE."""

from __future__ import annotations

import numpy as np

from datasets.base import Batch, ImageDataset, Key
from datasets.damage.broken import Broken
from utils.config.train import TrainConfig


class Sized(ImageDataset):
    """The same samples in several sizes. Which one follows from the epoch alone, that comes with every key."""

    def __init__(self, samples: ImageDataset, train: TrainConfig, full: int) -> None:
        self.train, self.full, self.samples = train, full, samples
        self.by_size = {full: samples} | {
            size: samples.at_size(size) for _, size in train.SIZE_SCHEDULE if size != full
        }
        self.classes, self.in_memory, self.max_bad = samples.classes, samples.in_memory, samples.max_bad

    def __len__(self) -> int:
        return len(self.samples)

    def at_size(self, size: int) -> ImageDataset:
        return self.samples.at_size(size)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        return self.samples.shuffled(generator)

    def take_broken(self) -> list[Broken]:
        return [broken for samples in self.by_size.values() for broken in samples.take_broken()]

    def __getitems__(self, keys: list[Key]) -> Batch:
        return self.by_size[self.train.size_in(keys[0][0], self.full)].__getitems__(keys)
