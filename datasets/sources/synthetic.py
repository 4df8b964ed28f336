"""`synthetic`: random images in device memory, to measure training without loading data.

A model can memorise them, so its accuracy is meaningless.
"""

import numpy as np
import torch

from datasets.base import PADDING, Batch, ImageDataset, Key, Source, part_of
from datasets.sources.split import no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import generator_of
from vitamp.sizes import ImageSize

POOL = 128
"""Number of different images. Sample i is image i modulo POOL."""


class Synthetic(ImageDataset):
    """A data set of random images. Its samples repeat a small pool, which training and validation share."""

    in_memory = True

    def __init__(self, samples: int, data: DataConfig, num_classes: int, seed: int, device: torch.device) -> None:
        """`samples`: how many samples an epoch has; they take no memory beyond the pool."""
        self.samples = samples
        self.device = device
        self.data = data
        self.num_classes = num_classes
        self.seed = seed
        shape = (POOL, *data.shape)
        generator = generator_of(seed, "synthetic")
        self.images = torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8)).to(device)
        self.labels = torch.arange(POOL, device=device) % num_classes

    def __len__(self) -> int:
        return self.samples

    def sample_labels(self) -> np.ndarray:
        return np.arange(self.samples) % POOL % self.num_classes

    def at_size(self, size: ImageSize) -> ImageDataset:
        data = self.data.changed(IMAGE_SIZE=size)
        return Synthetic(self.samples, data, self.num_classes, self.seed, self.device)

    def __getitems__(self, keys: list[Key]) -> Batch:
        # Padding gets some image, because its index excludes it anyway and making it black would cost time.
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        in_pool = indices.clamp(min=0) % POOL
        labels = self.labels[in_pool] * (indices != PADDING)  # the label of padding is 0
        return Batch(self.images[in_pool], labels, indices)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Synthetic:
    """Open a split; `all` has as many samples as training and validation together."""
    part = part_of(data, train)
    if part == "test":
        raise no_such_part(part, "the data set synthetic")
    sizes = {"train": data.SYNTHETIC_TRAIN, "val": data.SYNTHETIC_VAL}
    samples = sizes.get(part) or sum(sizes.values())  # `all` has no size of its own
    return Synthetic(samples, data, num_classes, seed, device)


def _count(_data: DataConfig, _train: bool) -> int:
    raise UserError("MODEL.NUM_CLASSES auto: synthetic images have no classes; give a number, as in -num_classes 10.")


SOURCE = Source(None, open=_open, count=_count, reads_path=False)
