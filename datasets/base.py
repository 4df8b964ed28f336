"""What every source gives and what a batch is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from datasets.damage.broken import Broken
from datasets.samples import Encoded
from datasets.transforms.augment import keys_set
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.log import log

Key = tuple[int, int]
"""(epoch, sample index): all that the content of a training sample depends on, besides the seed."""

PADDING = -1


class Batch(NamedTuple):
    """Samples side by side. Where `indices` is -1 there is no sample: the image is black, the label 0."""

    images: torch.Tensor
    """uint8, B x C x H x W"""
    labels: torch.Tensor
    """int64, B"""
    indices: torch.Tensor
    """int64, B"""


class ImageDataset(Dataset[Batch]):
    """Images with a label each, fetched in batches."""

    classes: list[str] | None = None
    """Names of the classes in the order of their labels, where the source knows them."""
    in_memory: bool = False
    """True: batches come straight from (device) memory, and loading processes would only be in the way."""
    max_bad: int = 0
    """Images that may turn out to be unreadable before training stops."""

    def augment(self, train: TrainConfig) -> ImageDataset:
        """This part with TRAIN's changes of single images. Where images are in memory, there is no place for them."""
        if without_effect := keys_set(train):
            log.warning(
                "%s: without effect on this data set, whose images are never opened one by one. Mixup, cutmix and "
                "random erasing do act.",
                ", ".join(without_effect),
            )
        return self

    def at_size(self, size: int) -> ImageDataset:
        """The same part with images of this height and width. What is held in memory is shared."""
        raise NotImplementedError(f"{type(self).__name__} has images of one size")

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The order of one epoch: every sample once."""
        return generator.permutation(len(self))

    def take_broken(self) -> list[Broken]:
        """Images that could not be read since the last call, in this process."""
        return []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, keys: list[Key]) -> Batch: ...


@dataclass(frozen=True)
class Source:
    """One name of DATA.DATASET."""

    open: Callable[[DataConfig, bool, int, int, torch.device], ImageDataset]
    """(data, train, num_classes, seed, device) -> the training or the validation part; labels.ANY_LABEL as num_classes:
    its labels are not checked"""
    check: Callable[[DataConfig, int, bool], None]
    """(data, num_classes, train): raise UserError for what can be seen without opening an image"""
    single: Callable[[DataConfig], Callable[[Encoded, torch.Tensor], None]] | None = None
    """What writes the pixels of one image as validation does, where that is not the way of files"""
    fetches: bool = False
    """With DATA.DOWNLOAD, `check` gets what is not there"""
