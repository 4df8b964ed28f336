"""Normalises a micro-batch on the device; mixing.py erases and mixes its images."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from datasets.base import background_of, per_channel
from datasets.registry import squeezes
from models.sizes import Shortcuts
from utils.config.data import DataConfig
from utils.config.schema import Config
from vitamp.sizes import sides


class TransformedBatch(NamedTuple):
    """A micro-batch as the model gets it, with its targets."""

    images: Tensor
    targets: Tensor
    """Labels; for mixed images one row of class weights per image."""
    labels: Tensor
    """As in the batch; for a mixed image the labels of the image with the larger weight."""


BatchTransform = Callable[[Tensor, Tensor], TransformedBatch]
"""(normalised images, labels) -> the model's input and targets. May write into the images."""


def no_transform(images: Tensor, labels: Tensor) -> TransformedBatch:
    """Leave the micro-batch as it is: its labels are the targets."""
    return TransformedBatch(images, labels, labels)


def mean_and_std(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> Tensor:
    """Return a tensor with two rows, mean and std, with a column per channel."""
    return torch.tensor([per_channel(mean, channels), per_channel(std, channels)], dtype=torch.float64)


class Inputs(nn.Module):
    """Converts images to normalised floats: (x / 255 - mean) / std.

    With other bits or a DATA.RANGE of low to high, it is ((x - low) / (high - low) - mean) / std.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, data: DataConfig) -> None:
        """Compute factor and offset per channel, in fp64, so that x * factor + offset is the normalised image."""
        super().__init__()
        mean, std = mean_and_std(data.IMAGENET_MEAN, data.IMAGENET_STD, data.IMAGE_CHANNELS)
        self.layout = torch.contiguous_format
        """Memory format of the images: channels_last if SPEED chooses it."""
        shape = (1, -1, 1, 1)
        low, high = data.value_range
        span = high - low
        factor = 1 / (span * std)
        offset = (-low / span - mean) / std
        self.register_buffer("factor", factor.float().reshape(shape), persistent=False)
        self.register_buffer("offset", offset.float().reshape(shape), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        floats = images.to(torch.float32, memory_format=self.layout)  # the bytes may be in another memory format
        return torch.addcmul(self.offset, floats, self.factor)


def input_of(data: DataConfig) -> dict[str, Any]:
    """Describe how validation makes the model's input from an image, with the keys that exported files use too."""
    fields = {
        "image_size": data.IMAGE_SIZE,
        "channels": data.IMAGE_CHANNELS,
        "crop": "none" if squeezes(data) else "middle",
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "interpolation": data.INTERPOLATION,
        "mean": per_channel(data.IMAGENET_MEAN, data.IMAGE_CHANNELS),
        "std": per_channel(data.IMAGENET_STD, data.IMAGE_CHANNELS),
        "exif_rotate": data.EXIF_ROTATE,
        "background": background_of(data),
    }
    if not data.is_plain:
        fields["bits"] = data.BITS
    if not data.is_plain or data.RANGE is not None:
        fields["range"] = list(data.value_range)
    return fields


def shortcuts_of(config: Config) -> Shortcuts:
    """Return the fraction of tokens to drop, and the scheduled image sizes that differ from DATA.IMAGE_SIZE."""
    train = config.TRAIN
    scheduled = {size for _, size in train.SIZE_SCHEDULE} - {config.DATA.IMAGE_SIZE}
    return Shortcuts(train.TOKEN_DROP, tuple(sorted(scheduled, key=sides)))
