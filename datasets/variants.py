"""Wrappers of a split: one repeats its samples, one makes its images grow during training."""

from collections import defaultdict

import numpy as np
import torch

from datasets.base import Batch, Broken, ImageDataset, Key, Samples
from utils.config.train import TrainConfig
from vitamp.sizes import ImageSize


class Variant(ImageDataset):
    """Base of the wrappers, which have as many samples as the split that they wrap."""

    def __init__(self, inner: ImageDataset) -> None:
        self.inner = inner
        self.classes = inner.classes
        self.in_memory = inner.in_memory
        self.data = inner.data

    def __len__(self) -> int:
        return len(self.inner)

    def single_images(self) -> Samples | None:
        return self.inner.single_images()

    def sample_labels(self) -> np.ndarray:
        return self.inner.sample_labels()

    def take_broken(self) -> list[Broken]:
        return self.inner.take_broken()


class Repeated(Variant):
    """A split whose samples can be in an epoch several times, with a new augmentation each time.

    Repeated augmentation and DATA.SAMPLER balanced need it. Index i + n * copy, where n is the number of samples, is
    sample i with the random numbers of that copy. An epoch keeps its length, and so its cost; it has fewer different
    samples.
    """

    def __init__(self, inner: ImageDataset, copies: int) -> None:
        super().__init__(inner)
        self.copies = inner.copies = copies

    def at_size(self, size: ImageSize) -> ImageDataset:
        return Repeated(self.inner.at_size(size), self.copies)

    def __getitems__(self, keys: list[Key]) -> Batch:
        """Make a batch in which each copy of a sample has its own random numbers.

        Index i + n * copy is that copy of sample i, where n is the number of samples; -1 is padding.
        """
        # The wrapped split's random numbers depend on epoch and index alone. So each copy is given an epoch of its own:
        # epoch 1 with 3 copies becomes the epochs 1, 2 and 3.
        rows_of_copy = defaultdict[int, list[int]](list)
        inner_keys = list[Key]()
        for row, (epoch, index) in enumerate(keys):
            copy = max(index, 0) // len(self.inner)  # 0 for padding, whose index stays -1 below
            inner_epoch = (epoch - 1) * self.copies + copy + 1
            inner_keys.append((inner_epoch, index - copy * len(self.inner)))
            rows_of_copy[copy].append(row)
        if not self.in_memory or len(rows_of_copy) == 1:
            return self.inner.__getitems__(inner_keys)

        # A data set in memory takes the keys of one epoch at a time, so the batch is put together from several.
        batches = list[Batch]()
        rows = list[int]()
        for copy_rows in rows_of_copy.values():
            batches.append(self.inner.__getitems__([inner_keys[row] for row in copy_rows]))
            rows += copy_rows
        # `rows` has the row of each sample in the batches one after the other; sorting them restores the keys' order.
        order = torch.tensor(rows).argsort().to(batches[0].images.device, non_blocking=True)
        return Batch._make(torch.cat(fields)[order] for fields in zip(*batches, strict=True))


class Sized(Variant):
    """One split in several sizes, for images that grow during training (TRAIN.SIZE_SCHEDULE).

    The size depends on the epoch alone, which is part of every key.
    """

    def __init__(self, inner: ImageDataset, train: TrainConfig, full: ImageSize) -> None:
        super().__init__(inner)
        self.train = train
        self.full = full
        self.by_size = {full: inner} | {size: inner.at_size(size) for _, size in train.SIZE_SCHEDULE if size != full}

    def take_broken(self) -> list[Broken]:
        broken = []
        for dataset in self.by_size.values():
            broken += dataset.take_broken()
        return broken

    def __getitems__(self, keys: list[Key]) -> Batch:
        return self.by_size[self.train.size_in(keys[0][0], self.full)].__getitems__(keys)
