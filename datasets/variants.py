"""Parts of a data set that show its samples in other ways: several times in an epoch, or in several sizes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from datasets.base import Batch, Broken, ImageDataset, Key, Samples
from utils.config.train import TrainConfig


class _Variant(ImageDataset):
    """The samples of another part, as many as there."""

    def __init__(self, samples: ImageDataset) -> None:
        self.samples = samples
        self.classes, self.in_memory, self.max_bad = samples.classes, samples.in_memory, samples.max_bad

    def __len__(self) -> int:
        return len(self.samples)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        return self.samples.shuffled(generator)

    def single_images(self) -> Samples | None:
        return self.samples.single_images()

    def take_broken(self) -> list[Broken]:
        return self.samples.take_broken()


class Repeated(_Variant):
    """Repeated augmentation: a sample is in an epoch several times, each time transformed anew.

    Sample i + n * copy of this part is sample i of the n there are, with the random numbers of that copy. An epoch
    stays as long as it was, so that it costs the same: it meets fewer different samples.
    """

    def __init__(self, samples: ImageDataset, copies: int) -> None:
        super().__init__(samples)
        self.copies = copies

    def augment(self, train: TrainConfig) -> ImageDataset:
        self.samples = self.samples.augment(train)
        return self

    def at_size(self, size: int) -> ImageDataset:
        return Repeated(self.samples.at_size(size), self.copies)

    def __getitems__(self, keys: list[Key]) -> Batch:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, (_, index) in enumerate(keys):
            rows[max(index, 0) // len(self.samples)].append(row)
        # A source may prepare one epoch at a time: each copy's samples are asked for on their own.
        parts = [self.samples.__getitems__([self._key(*keys[row]) for row in rows[copy]]) for copy in rows]
        if len(parts) == 1:
            return parts[0]
        found = torch.tensor([row for copy in rows for row in rows[copy]]).argsort()
        order = found.to(parts[0].images.device, non_blocking=True)
        return Batch(*(torch.cat(fields)[order] for fields in zip(*parts, strict=True)))

    def _key(self, epoch: int, index: int) -> Key:
        """Copies take epochs of their own, since a sample's random numbers depend on epoch and index alone."""
        copy, sample = divmod(max(index, 0), len(self.samples))
        return (epoch - 1) * self.copies + copy + 1, sample if index >= 0 else index


class Sized(_Variant):
    """Images that grow in the course of training (TRAIN.SIZE_SCHEDULE): the same samples in several sizes.

    Which size follows from the epoch alone, which comes with every key.
    """

    def __init__(self, samples: ImageDataset, train: TrainConfig, full: int) -> None:
        super().__init__(samples)
        self.train, self.full = train, full
        self.by_size = {full: samples} | {
            size: samples.at_size(size) for _, size in train.SIZE_SCHEDULE if size != full
        }

    def at_size(self, size: int) -> ImageDataset:
        return self.samples.at_size(size)

    def take_broken(self) -> list[Broken]:
        return [broken for samples in self.by_size.values() for broken in samples.take_broken()]

    def __getitems__(self, keys: list[Key]) -> Batch:
        return self.by_size[self.train.size_in(keys[0][0], self.full)].__getitems__(keys)
