"""`synthetic`: random images in device memory, to measure training without data loading. A model can memorise them."""

import numpy as np
import torch

from datasets.base import PADDING, Batch, ImageDataset, Key, Source, part_of
from datasets.sources.split import no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import generator_of
from vitamp.sizes import ImageSize

POOL = 128
"""Number of different images; sample i is image i modulo this."""


class Synthetic(ImageDataset):
    """Samples from a small pool of images, which training and validation share."""

    in_memory = True

    def __init__(self, samples: int, data: DataConfig, num_classes: int, seed: int, device: torch.device) -> None:
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
        # Padding keeps an image, because its index excludes it anyway and making it black would cost a pass.
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        chosen = indices.clamp(min=0) % POOL
        return Batch(self.images[chosen], self.labels[chosen] * (indices != PADDING), indices)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Synthetic:
    part = part_of(data, train)
    if part == "test":
        raise no_such_part(part, "the data set synthetic")
    samples = {"train": data.SYNTHETIC_TRAIN, "val": data.SYNTHETIC_VAL}
    return Synthetic(samples.get(part) or sum(samples.values()), data, num_classes, seed, device)


def _count(_data: DataConfig, _train: bool) -> int:
    raise UserError("MODEL.NUM_CLASSES auto: synthetic images have no classes; give a number, as in -num_classes 10.")


SOURCE = Source(None, open=_open, count=_count, reads_path=False)
