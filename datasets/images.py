"""Data sets that read images one by one and make batches of pixels from them."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.data import get_worker_info

from datasets.base import PADDING, Batch, Broken, Encoded, ImageDataset, Key, Samples, dtype_of, part_of
from datasets.damage import FAILURES_OF_STORAGE, WHEN_BACK, Failure, allowed, failure_or, is_gone
from datasets.transforms.pixels import Pixels
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import TrainingError
from utils.seeding import fork_host_rng, seed_host
from vitamp.sizes import ImageSize


class Images(ImageDataset):
    """A split whose images are read one by one. Those of DATA.EXCLUDE and DATA.RELABEL are left out or relabelled."""

    def __init__(self, samples: Samples, data: DataConfig, train: bool, seed: int) -> None:
        """Leave out and relabel samples as the settings say. `train`: change images at random, by numbers of `seed`."""
        if data.EXCLUDE is not None:
            from datasets.exclude import without_excluded

            samples = without_excluded(samples, data)
        if data.RELABEL is not None and part_of(data, train) == "train":
            from datasets.exclude import relabelled

            samples = relabelled(samples, data)
        self.samples = samples
        self.classes = samples.classes
        self.data = data
        self.seed = seed
        self.train = train
        self.augmentation: TrainConfig | None = None
        self.pixels: Callable[[Encoded, torch.Tensor], None] = Pixels(data, train)
        self.max_bad = allowed(data.MAX_BAD, len(self.samples))  # a number of images
        # Sample -> failure of a damaged training image, which is not read again in later epochs.
        self._known_failures: dict[int, Failure] = {}
        # Sample -> image that could not be read since the last `take_broken`.
        self._new_broken: dict[int, Broken] = {}
        # Failures of the storage since the last image that was read.
        self._storage_failures = 0

    def augment(self, train: TrainConfig) -> ImageDataset:
        self.augmentation = train
        self.pixels = Pixels(self.data, self.train, train)
        return self

    def at_size(self, size: ImageSize) -> ImageDataset:
        resized = copy.copy(self)
        resized.data = self.data.changed(IMAGE_SIZE=size)
        resized.pixels = Pixels(resized.data, self.train, self.augmentation)
        resized._new_broken = {}
        return resized

    def __len__(self) -> int:
        return len(self.samples)

    def sample_labels(self) -> np.ndarray:
        return self.samples.labels

    def single_images(self) -> Samples:
        return self.samples

    def take_broken(self) -> list[Broken]:
        broken = self._new_broken
        self._new_broken = {}
        return list(broken.values())

    def __getitems__(self, keys: list[Key]) -> Batch:
        if get_worker_info() is not None:
            return self._load(keys)
        with fork_host_rng():
            return self._load(keys)

    def _load(self, keys: list[Key]) -> Batch:
        """Load a batch. A broken training image is replaced by the next one; in validation, it becomes padding."""
        channels, height, width = self.data.shape
        # Channels last, as decoders and resizing work; the device makes planes of it when it converts to float.
        images = torch.zeros(len(keys), height, width, channels, dtype=dtype_of(self.data)).permute(0, 3, 1, 2)
        label_shape = self.samples.labels.shape[1:]
        has_several_labels = len(label_shape) > 0
        labels = torch.zeros(len(keys), *label_shape, dtype=torch.float32 if has_several_labels else torch.int64)
        indices = torch.tensor([index for _, index in keys])
        self.samples.prefetch([index for _, index in keys if index != PADDING])
        for row, key in enumerate(keys):
            _, index = key
            if index == PADDING:
                continue
            if self.train:
                # The label below is that of the image read. `indices` keeps the sample that was wanted.
                index = self._write_or_replace(images[row], key)
            else:
                # `_write` returns None, so anything else is a failure.
                failure = failure_or(partial(self._write, images[row], key, index), self._storage_failures)
                if failure is not None:
                    # The image is black and not counted. The error is raised at the end of the validation pass, because
                    # all ranks go through their batches together.
                    self._new_broken[index] = self._describe_broken(index, failure)
                    images[row] = 0
                    indices[row] = PADDING
                    continue
            labels[row] = torch.as_tensor(self.samples.labels[index])
        return Batch(images, labels, indices)

    def _write_or_replace(self, out: torch.Tensor, key: Key) -> int:
        """Write a training image to `out`, or the next readable one in its place, and return the index of that one.

        A replacement uses the random numbers of the sample that it replaces. TrainingError if the storage fails, or if
        no image can be read.
        """
        _, wanted = key
        for step in range(len(self)):
            index = (wanted + step) % len(self)
            is_replacement = step > 0
            if is_replacement and index in self._known_failures:
                continue
            failure = self._known_failures.get(index)
            if failure is None:
                failure = failure_or(partial(self._write, out, key, index))
            if failure is None:
                return index
            broken = self._describe_broken(index, failure)
            self._new_broken[index] = broken
            if not broken.storage:
                self._known_failures[index] = failure
            if self._storage_failures >= FAILURES_OF_STORAGE:
                raise TrainingError(
                    f"Storage failure: {FAILURES_OF_STORAGE} training images in a row could not be read, the last "
                    f"{broken.name}: {failure.reason}. {WHEN_BACK}"
                )
            # Storage failures do not count towards MAX_BAD here: the next images show whether the storage is gone.
            damaged = [image for image in self._new_broken.values() if not image.storage]
            if len(damaged) > self.max_bad:
                break
        raise TrainingError(f"No image could be read in place of {self.samples.name(wanted)}.")

    def _describe_broken(self, index: int, failure: Failure) -> Broken:
        """Describe an image that cannot be read, and count it if the storage failed."""
        from datasets.exclude import line_of

        name = self.samples.name(index)
        # A missing image is a failure of the storage only if all of the data is gone: then the image may be intact.
        is_storage_failure = failure.kind == "storage" or (failure.kind == "missing" and is_gone(self.data))
        line = line_of(name, failure.reason, self.data)
        if is_storage_failure:
            self._storage_failures += 1
            # A comment, so that using the list as DATA.EXCLUDE does not drop images that the storage may return later.
            line = f"# {line}"
        return Broken(index, name, failure.reason, line, is_storage_failure)

    def _write(self, out: torch.Tensor, key: Key, index: int) -> None:
        """Read an image and write its pixels to `out`. In training, random numbers are those of `key`."""
        if self.train:
            seed_host(self.seed, "sample", *key)
        self.pixels(self.samples.read(index), out)
        self._storage_failures = 0


class Joined(Samples):
    """Several splits of a data set as one, with their samples one after the other."""

    def __init__(self, splits: Sequence[Samples]) -> None:
        """Join splits of one data set, so that the first one decides the classes and how images are stored."""
        self.splits = splits
        self.labels = np.concatenate([split.labels for split in splits])
        self.classes = splits[0].classes
        self.stored = splits[0].stored
        self.remote = splits[0].remote
        # The group of each sample; None without DATA.GROUP, as in each split.
        groups = itertools.chain.from_iterable(split.groups or () for split in splits)
        self.groups = list(groups) or None
        # Index of the first sample of each split, and the end of the last.
        self._begins_and_end = np.cumsum([0, *map(len, splits)])

    def read(self, index: int) -> Encoded:
        split, inside = self._split_and_index(index)
        return split.read(inside)

    def name(self, index: int) -> str:
        split, inside = self._split_and_index(index)
        return split.name(inside)

    def size(self, index: int) -> int:
        split, inside = self._split_and_index(index)
        return split.size(inside)

    def stamp(self, index: int) -> str:
        split, inside = self._split_and_index(index)
        return split.stamp(inside)

    def names(self) -> Iterator[bytes | memoryview]:
        for split in self.splits:
            yield from split.names()

    def prefetch(self, indices: Sequence[int]) -> None:
        for begin, split in zip(self._begins_and_end.tolist(), self.splits, strict=False):
            inside = [index - begin for index in indices if 0 <= index - begin < len(split)]
            if inside:
                split.prefetch(inside)

    def _split_and_index(self, index: int) -> tuple[Samples, int]:
        """Return the split that a sample is in, and its index there."""
        number = int(np.searchsorted(self._begins_and_end, index, side="right")) - 1
        return self.splits[number], index - int(self._begins_and_end[number])
