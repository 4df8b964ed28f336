"""What every source gives, what a batch is, and the random numbers of a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.log import log
from utils.seeding import key, seed_host

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


Encoded = bytes | np.ndarray
"""A file's bytes, or pixels (height x width x channels, uint8) that need no decoding."""

Stored = Literal["files", "tar files", "pixels"]
"""Images as files of their own, as encoded images in tar files, or as pixels that need no decoding."""


class Samples(ABC):
    """One part of a data set. Loading processes share it: it holds no open file, and no object a sample."""

    labels: np.ndarray
    """int64, one for each sample"""
    classes: list[str] | None = None
    """Names of the classes in the order of their labels, where they are known."""
    stored: Stored = "files"
    remote = False
    """Read through a network, for which loading processes wait without taking a core."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The sample's image as it is stored. Raises OSError where it cannot be had."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What messages and lists of broken files call the sample; it leads a person to it."""

    def expect(self, indices: Sequence[int]) -> None:  # noqa: B027 - most sources have nothing to do
        """These are read next. A source that is far away may fetch them all at once."""

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The order of one epoch: every sample once."""
        return generator.permutation(len(self))


class Broken(NamedTuple):
    """One image that cannot be read."""

    sample: int
    name: str
    """Leads a person to it."""
    reason: str
    line: str
    """What a list for DATA.EXCLUDE says of it."""
    storage: bool = False
    """The storage did not give it, which is no fault of the file."""


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
        if without_effect := train.single_image_keys:
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

    def single_images(self) -> Samples | None:
        """The images of this part where they are read one by one; None where batches come from memory."""
        return None

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


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed python, numpy and torch for the transforms of one sample."""
    seed_host(seed, "sample", epoch, index)


def sample_table(seed: int, epoch: int, samples: int, columns: int) -> np.ndarray:
    """Uniform numbers in 0..1, a row a sample: for sources that transform whole batches at once."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, "sample", epoch)))
    return generator.random((samples, columns))
