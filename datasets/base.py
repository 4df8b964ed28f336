"""Interfaces of the data sets (samples, batches, sources), and facts that follow from the DATA settings."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from utils.config.data import DataConfig
from utils.config.kinds import AUTO
from utils.config.train import TrainConfig
from utils.log import log, warn_once
from utils.seeding import generator_of
from vitamp.sizes import MOST_BYTES, ImageSize

Key = tuple[int, int]
"""(epoch, sample index): besides the seed, all that determines a training sample."""

PADDING = -1


remarks: list[str] = []
"""Warnings of a loading process, which come to the log with its next batch"""


@cache
def remark(text: str) -> None:
    """Log a warning, once per process; also in a loading process, which has no log of its own."""
    if get_worker_info() is None:
        warn_once(text)
    else:
        remarks.append(text)


class Batch(NamedTuple):
    """A batch of samples. Where `indices` is -1 the row is padding: a black image with label 0."""

    images: torch.Tensor
    """uint8, B x C x H x W; float32 if DATA.BITS or DATA.IMAGE_CHANNELS are those of other images than photographs"""
    labels: torch.Tensor
    """int64, B; with several labels per sample (DATA.MULTI_LABEL) float32, B x C, of zeros and ones"""
    indices: torch.Tensor
    """int64, B"""


Encoded = bytes | np.ndarray
"""An encoded image file, or raw pixels (height x width x channels, uint8). Several files are one zip."""

Colour = tuple[int, int, int]

StorageKind = Literal["files", "tar files", "pixels"]
"""How images are stored: as single files, as encoded images in tar files, or as raw pixels."""

CSV_PREFIX = "csv:"
"""Beginning of DATA.DATASET for a table, or the folder of tables, that is not in DATA_PATH"""
HUB_PREFIX = "hf:"
"""Beginning of DATA.DATASET for a data set of the Hugging Face hub, or a folder of such files."""

Part = Literal["train", "val", "test", "all"]
TITLES = {"train": "training split", "val": "validation split", "test": "test split", "all": "all images"}
"""Values of DATA.PART -> what they are called in messages"""


def part_of(data: DataConfig, train: bool) -> Part:
    """Return the split to open: the training split, or else the one that DATA.PART names, by default `val`."""
    if train:
        return "train"
    return "val" if data.PART == AUTO else data.PART


Parts = Mapping[Part, object]
"""The splits that a data set has, and where each is.

If it comes without a validation split, this is `all`, perhaps with `test`; the program then makes `train` and `val`.
"""


SPLIT: Parts = {"train": "train", "val": "val"}
UNSPLIT: Parts = {"all": "all"}


def distinct(parts: Parts) -> list[Part]:
    """List the splits of a data set, without `test` if its images are also the validation split.

    `parts`: each split, and where it is.
    """
    return [part for part in parts if part != "test" or parts.get("val") != parts["test"]]


def parts_read(data: DataConfig, train: bool, parts: Parts) -> list[Part]:
    """List the splits that a run reads: `train` and `val` in training, else the one that DATA.PART names.

    DATA.PART=all means every split of a data set that comes with splits; a data set that comes unsplit has a split
    `all`. `parts`: the splits of the data set, and where each is.
    """
    if train:
        return ["train", "val"]
    part = part_of(data, train=False)
    if part == "all" and "all" not in parts:
        return distinct(parts)
    return [part]


def part_to_make(parts: Parts, part: Part) -> Part | None:
    """Return `part` if the program must make this split from `all`; None if the data set comes with it.

    `parts`: the splits that the data set comes with. They are `all`, perhaps with `test`, if it comes without a
    validation split.
    """
    comes_unsplit = "all" in parts
    is_stored_test = part == "test" and "test" in parts
    return part if comes_unsplit and not is_stored_test else None


class Samples(ABC):
    """One split of a data set, read image by image.

    Loading processes share it, so it holds no open file and no Python object per sample.
    """

    labels: np.ndarray
    """int64, one per sample; with DATA.MULTI_LABEL uint8, samples x classes, of zeros and ones"""
    classes: list[str] | None = None
    """Class names in the order of their labels, if known."""
    stored: StorageKind = "files"
    groups: list[str] | None = None
    """Group of each sample, if DATA.GROUP is set"""
    relabel: Mapping[str, Any] | None = None
    """Changes that DATA.RELABEL made to the training split, for run.json and meta.json"""
    remote = False
    """Whether it is read over a network. Loading processes then mostly wait and use little CPU."""
    machines: int = 1
    """Number of machines of the run that reads it"""
    most_bytes = MOST_BYTES
    """Most bytes of a stored image (DATA.MAX_IMAGE_BYTES)"""
    by_machine = False
    """Whether each machine reads files of its own (DATA.SAMPLER by_machine)"""
    window: int = 1
    """Number of files whose samples are shuffled together, if a file has several samples"""
    file_begins: np.ndarray = np.arange(0)
    """The first sample of each file, and the end of the last; empty if each sample is a file of its own"""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """Return the stored image of a sample. Raises OSError if it cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample in messages and in lists of broken images, such as its path."""

    def size(self, index: int) -> int:
        """Return the bytes of a stored image without reading it. Raises OSError."""
        return os.stat(self.name(index)).st_size

    def stamp(self, index: int) -> str:
        """Return a text that changes when the files of a stored image change: sizes and times. Raises OSError.

        '' without files.
        """
        return stamp_of(self.name(index))

    def names(self) -> Iterator[bytes | memoryview]:
        """Yield bytes that depend on the names of all samples and their order, but not on the data's folder."""
        yield from (os.fsencode(self.name(index)) + b"\0" for index in range(len(self)))

    def prefetch(self, indices: Sequence[int]) -> None:  # noqa: B027 - most sources have nothing to prefetch
        """Announce the samples that are read next. A remote source can fetch them all at once."""

    def look_ahead(self) -> float | None:
        """Return the fraction of an epoch by which `announce` must be called ahead, and log how images are read.

        None: `announce` is not needed.
        """
        return None

    def announce(self, indices: Sequence[int]) -> None:  # noqa: B027 - as above
        """Announce samples that are read later, so that their files can be downloaded meanwhile."""

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """Draw a random order for one epoch, with every sample once."""
        return generator.permutation(len(self))


def stamp_of(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def shuffled_by_file(files: Sequence[Sequence[int]], window: int, generator: np.random.Generator) -> np.ndarray:
    """Shuffle files, then the samples within each `window` of consecutive files, so that few files are read at once.

    `files`: the first sample of each file, and the end. Returns the samples in their new order.
    """
    file_order = generator.permutation(len(files))
    shuffled = [np.arange(0)]
    for first in range(0, len(files), window):
        numbers = file_order[first : first + window]
        samples = [np.arange(files[number][0], files[number][1]) for number in numbers]
        shuffled.append(generator.permutation(np.concatenate(samples)))
    return np.concatenate(shuffled)


class Broken(NamedTuple):
    """An image that cannot be read."""

    sample: int
    name: str
    """See `Samples.name`."""
    reason: str
    line: str
    """Its line in a list for DATA.EXCLUDE."""
    storage: bool = False
    """True if the storage failed; the file itself may be intact."""


class Box(NamedTuple):
    """A rectangle in an image, in whole pixels."""

    left: int
    top: int
    width: int
    height: int


class Unreadable(Exception):
    """Bytes that are not an image, or a broken one. The text says why."""


NO_MEMORY = (
    "memory ran out while it was read; if others fail so, too, use fewer loading processes (DATA.NUM_WORKERS, "
    "-num_workers), a smaller -batch_size, or more memory"
)
"""Reason of a broken image. Nothing shows whether it takes too much memory, or others left too little."""


def background_of(data: DataConfig) -> Colour | None:
    """Return DATA.BACKGROUND as a colour; None if the alpha channel is dropped."""
    colour_of = {"white": (255, 255, 255), "black": (0, 0, 0), "mean": mean_colour(data), "drop": None}
    return colour_of[data.BACKGROUND] if isinstance(data.BACKGROUND, str) else data.BACKGROUND


def per_channel(values: tuple[float, ...], channels: int) -> list[float]:
    """Return one value per channel. If there are fewer or more values than channels, the first serves every channel."""
    return list(values) if len(values) == channels else [values[0]] * channels


def mean_colour(data: DataConfig) -> Colour:
    """Return the colour of photographs that normalisation maps to 0, in 8 bits."""
    red, green, blue = map(round, per_channel(shades_of_mean(data), 3))
    return red, green, blue


def shades_of_mean(data: DataConfig) -> tuple[float, ...]:
    """Return the stored values that normalisation maps to 0, by channel; for photographs, whole numbers in 8 bits."""
    low, high = data.value_range
    shades = [low + (high - low) * value for value in per_channel(data.IMAGENET_MEAN, data.IMAGE_CHANNELS)]
    return tuple(min(255, max(0, round(shade))) if data.is_plain else shade for shade in shades)


def dtype_of(data: DataConfig) -> torch.dtype:
    """Return the type of the values in a batch."""
    return torch.uint8 if data.is_plain else torch.float32


PAD = 4
"""Width of the black border of DATA.CROP: pad, in pixels, as is usual for CIFAR"""


class ImageDataset(Dataset[Batch]):
    """Labelled images, fetched in batches."""

    classes: list[str] | None = None
    """Class names in the order of their labels, if the source knows them."""
    in_memory: bool = False
    """Batches come straight from (device) memory; loading processes would only slow this down."""
    copies: int = 1
    """How often a sample can be in an epoch, each time with other random numbers; see `variants.Repeated`."""
    data: DataConfig
    """The settings that it was opened with"""

    def augment(self, train: TrainConfig) -> ImageDataset:
        """Return this split with the single-image augmentations of TRAIN. Images in memory do not support them."""
        keys = ", ".join(train.single_image_keys)
        if keys:
            log.warning("%s: no effect on images in memory. Mixup, cutmix and random erasing do work.", keys)
        return self

    def at_size(self, size: ImageSize) -> ImageDataset:
        """Return this split at another image size. Data held in memory is shared."""
        raise NotImplementedError(f"{type(self).__name__} has images of one size")

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """Draw a random order for one epoch, with every sample once."""
        samples = self.single_images()
        return generator.permutation(len(self)) if samples is None else samples.shuffled(generator)

    def sample_labels(self) -> np.ndarray:
        """Return the labels of all samples, as in `Samples.labels`."""
        raise NotImplementedError

    def single_images(self) -> Samples | None:
        """Return the samples of this split if images are read one by one; None if batches come from memory."""
        return None

    def groups(self) -> list[str]:
        """Return the group of each sample, if DATA.GROUP is set; else an empty list."""
        samples = self.single_images()
        return (samples.groups if samples is not None else None) or []

    def take_broken(self) -> list[Broken]:
        """Return the images that this process could not read since the last call."""
        return []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, keys: list[Key]) -> Batch: ...


@dataclass(frozen=True)
class Source:
    """A data set that DATA.DATASET can name."""

    samples: Callable[[DataConfig, Part, int], Samples] | None
    """(data, part, num_classes) -> the images of a split; of data that comes unsplit, also those of `all`. With
    labels.ANY_LABEL as num_classes, labels are not checked. None: `open` makes the split."""
    check: Callable[[DataConfig, int, bool], None] | None = None
    """(data, num_classes, train): raise UserError for problems that show without opening an image; None: `samples` of
    the splits that are read does"""
    open: Callable[[DataConfig, bool, int, int, torch.device], ImageDataset] | None = None
    """(data, train, num_classes, seed, device) -> the split of `part_of`"""
    arrays: Literal["cropped", "whole"] | None = None
    """Its images are arrays in memory, which validation crops or leaves whole; see `given.ArrayPixels`"""
    count: Callable[[DataConfig, bool], int] | None = None
    """(data, train) -> number of classes, where it is known without listing every image; None: open the split"""
    parts: Callable[[DataConfig], Parts] = lambda _: SPLIT
    fetches: bool = False
    """DATA.DOWNLOAD=true downloads the data set"""
    multi_label: bool = False
    """Whether a sample may have several labels (DATA.MULTI_LABEL)"""
    reads_path: bool = True
    """Whether the data set is in DATA.DATA_PATH"""
    groups: bool = False
    """Whether its paths or columns can name groups (DATA.GROUP)"""
    shares_list: bool = False
    """Whether the ranks of a machine share the list of its images"""
    labelled: bool = True
    """Whether its labels mean something; those of images alone are placeholders"""

    def is_unsplit(self, data: DataConfig) -> bool:
        """Tell whether the data comes without a validation split, so the program makes one. Only then has it folds."""
        return "all" in self.parts(data)


def sample_table(seed: int, epoch: int, samples: int, columns: int) -> np.ndarray:
    """Draw uniform random numbers in 0..1, one row per sample, for sources that transform whole batches at once."""
    return generator_of(seed, "sample", epoch).random((samples, columns))


def name_prefix(data: DataConfig) -> str:
    """Return the common prefix of all sample names: DATA_PATH with a slash, or the folder of a file; '' without it."""
    if data.DATA_PATH is None:
        return ""
    if "://" in data.DATA_PATH:
        return f"{data.DATA_PATH.rstrip('/')}/"
    place = Path(data.DATA_PATH).expanduser()
    folder = place.parent if place.is_file() else place
    return f"{folder}/"
