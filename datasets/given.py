"""Data sets of image files that a user names, without labels, preprocessed exactly as in validation."""

from collections.abc import Sequence

import numpy as np
import torch

from datasets.base import Encoded
from datasets.decoding import Reader
from datasets.images import Images
from datasets.memory import planes, resized
from datasets.registry import source_named
from datasets.sources.files import FileSamples
from utils.config.data import DataConfig


def open_given(paths: Sequence[str], data: DataConfig) -> Images:
    """Open a data set of these files, in this order. Their labels are all 0, as a placeholder."""
    data = data.changed(EXCLUDE=None, RELABEL=None)
    placeholders = np.zeros(len(paths), dtype=np.int64)
    samples = FileSamples("", paths, placeholders, None)  # no root and no classes: `paths` are complete
    samples.most_bytes = data.MAX_IMAGE_BYTES
    images = Images(samples, data, train=False, seed=0)
    # The model was trained on this data set. If its images are arrays in memory, they are preprocessed in another way.
    source = source_named(data.DATASET)
    if source is not None and source.arrays is not None:
        images.pixels = ArrayPixels(data, cropped=source.arrays == "cropped")
    return images


class ArrayPixels:
    """Preprocesses a single image as `InMemory` does in validation, for sources whose images are arrays."""

    def __init__(self, data: DataConfig, cropped: bool = True) -> None:
        self.data = data
        self.reader = Reader(data)
        self.squeezed = not cropped or data.CROP == "none"

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Decode, resize and write one image to `out`. Raises Unreadable for a file that is not a readable image."""
        pixels = self.reader.whole(encoded)
        out.copy_(resized(planes(pixels[None], self.data.IMAGE_CHANNELS), self.data, self.squeezed)[0])
