"""Encoded images, made into batches of pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import get_worker_info

from datasets.base import PADDING, Batch, Broken, Encoded, ImageDataset, Key, Samples, seed_sample
from datasets.damage.broken import allowed
from datasets.damage.exclude import line_of, without_excluded
from datasets.damage.retry import Failure, failure_of
from datasets.transforms.pixels import Pixels
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import TrainingError
from utils.seeding import fork_host_rng

FAILURES_OF_STORAGE = 8
"""So many images in a row that the storage does not give: that is no longer about single images."""


class Images(ImageDataset):
    """The training or the validation part of a source whose images are read one by one."""

    def __init__(self, samples: Samples, data: DataConfig, train: bool, seed: int) -> None:
        self.samples = without_excluded(samples, data)
        self.classes = samples.classes
        self.data, self.seed, self.train = data, seed, train
        self.changes: TrainConfig | None = None
        self.pixels: Callable[[Encoded, torch.Tensor], None] = Pixels(data, train)
        self.max_bad = allowed(data.MAX_BAD, len(self.samples))
        self._known: dict[int, Failure] = {}  # broken ones: to read them anew in every epoch would be in vain
        self._met: dict[int, Broken] = {}

    def augment(self, train: TrainConfig) -> ImageDataset:
        self.changes, self.pixels = train, Pixels(self.data, self.train, train)
        return self

    def at_size(self, size: int) -> ImageDataset:
        other = copy.copy(self)
        other.data = self.data.model_copy(update={"IMAGE_SIZE": size})
        other.pixels, other._met = Pixels(other.data, self.train, self.changes), {}
        return other

    def __len__(self) -> int:
        return len(self.samples)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        return self.samples.shuffled(generator)

    def single_images(self) -> Samples:
        return self.samples

    def take_broken(self) -> list[Broken]:
        met, self._met = self._met, {}
        return list(met.values())

    def __getitems__(self, keys: list[Key]) -> Batch:
        if get_worker_info() is not None:
            return self._load(keys)
        with fork_host_rng():
            return self._load(keys)

    def _load(self, keys: list[Key]) -> Batch:
        size = self.data.IMAGE_SIZE
        # Pixel by pixel, as decoders give it and resizing works; the device makes planes of it on the way to floats.
        images = torch.zeros(len(keys), size, size, self.data.IMAGE_CHANNELS, dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = torch.zeros(len(keys), dtype=torch.int64)
        indices = torch.tensor([index for _, index in keys])
        self.samples.expect([index for _, index in keys if index != PADDING])
        for row, key in enumerate(keys):
            if key[1] == PADDING:
                continue
            if self.train:
                labels[row] = int(self.samples.labels[self._fill(images[row], key)])
            elif self._fill_strictly(images[row], key):
                labels[row] = int(self.samples.labels[key[1]])
            else:
                indices[row] = PADDING
        return Batch(images, labels, indices)

    def _fill_strictly(self, out: torch.Tensor, key: Key) -> bool:
        """In validation nothing is replaced: a broken image is blank, does not count, and ends the pass at its end.

        Not before: the processes of a run go through their batches together.
        """
        failure = failure_of(lambda: self._write(out, key, key[1]))
        if failure is not None:
            self._met[key[1]] = self._broken(key[1], failure)
            out.zero_()
        return failure is None

    def _fill(self, out: torch.Tensor, key: Key) -> int:
        """Write the sample, or the next one that can be read, to `out`; the number of the one written.

        The random numbers stay those of the sample that was asked for.
        """
        asked, not_given = key[1], 0
        for step in range(len(self)):
            index = (asked + step) % len(self)
            if step and index in self._known:
                continue
            failure = self._known.get(index) or failure_of(lambda taken=index: self._write(out, key, taken))
            if failure is None:
                return index
            self._met[index] = broken = self._broken(index, failure)
            if not broken.storage:
                self._known[index] = failure
            not_given += broken.storage
            if not_given == FAILURES_OF_STORAGE:
                raise TrainingError(_storage(broken.name, failure.reason))
            # What the storage does not give is no fault of the files: first it has to be seen whether it is gone.
            if sum(not one.storage for one in self._met.values()) > self.max_bad:
                break
        raise TrainingError(f"No image could be read in place of {self.samples.name(asked)}.")

    def _broken(self, index: int, failure: Failure) -> Broken:
        name, storage = self.samples.name(index), failure.kind == "storage"
        line = line_of(name, failure.reason, self.data)
        # Who gives the list to DATA.EXCLUDE must not lose what the storage will give again: for that, it is a remark.
        return Broken(index, name, failure.reason, f"# {line}" if storage else line, storage)

    def _write(self, out: torch.Tensor, key: Key, index: int) -> None:
        if self.train:
            seed_sample(self.seed, *key)
        self.pixels(self.samples.read(index), out)


def _storage(name: str, problem: str) -> str:
    return (
        f"The storage gave none of {FAILURES_OF_STORAGE} training images in a row, the last of them {name}: {problem}. "
        "When it is back, go on from the last checkpoint by -resume."
    )
