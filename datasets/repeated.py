"""Repeated augmentation: a sample stands in an epoch several times, each time transformed anew."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from datasets.base import Batch, ImageDataset, Key
from datasets.damage.broken import Broken
from utils.config.train import TrainConfig


class Repeated(ImageDataset):
    """Sample i + n * copy of this one is sample i of the n there are, with the random numbers of that copy."""

    def __init__(self, samples: ImageDataset, copies: int) -> None:
        self.samples, self.copies = samples, copies
        self.classes, self.in_memory, self.max_bad = samples.classes, samples.in_memory, samples.max_bad

    def __len__(self) -> int:
        """An epoch stays as long as it was, so that it costs the same: it meets fewer different samples."""
        return len(self.samples)

    def augment(self, train: TrainConfig) -> ImageDataset:
        self.samples = self.samples.augment(train)
        return self

    def at_size(self, size: int) -> ImageDataset:
        return Repeated(self.samples.at_size(size), self.copies)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        return self.samples.shuffled(generator)

    def take_broken(self) -> list[Broken]:
        return self.samples.take_broken()

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
