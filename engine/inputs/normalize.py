"""Normalisation of uint8 images on the device, and what meta.json says of a run's preprocessing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from datasets.base import background_of
from datasets.registry import squeezes
from utils.config.data import DataConfig


def per_channel(values: tuple[float, ...], channels: int) -> list[float]:
    """One value per channel. If their numbers differ, the first value serves every channel."""
    return list(values) if len(values) == channels else [values[0]] * channels


class Inputs(nn.Module):
    """Converts uint8 images to normalised floats: (x / 255 - mean) / std, as one multiplication and one addition."""

    factor: Tensor
    offset: Tensor

    def __init__(self, data: DataConfig) -> None:
        super().__init__()
        mean = torch.tensor(per_channel(data.IMAGENET_MEAN, data.IMAGE_CHANNELS), dtype=torch.float64)
        std = torch.tensor(per_channel(data.IMAGENET_STD, data.IMAGE_CHANNELS), dtype=torch.float64)
        self.layout = torch.contiguous_format
        """Memory format of the images: channels_last if SPEED chooses it."""
        shape = (1, -1, 1, 1)
        self.register_buffer("factor", (1 / (255 * std)).float().reshape(shape), persistent=False)
        self.register_buffer("offset", (-mean / std).float().reshape(shape), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        floats = images.to(torch.float32, memory_format=self.layout)  # the bytes may be in another memory format
        return torch.addcmul(self.offset, floats, self.factor)


def input_of(data: DataConfig) -> dict[str, Any]:
    """How validation makes the model's input from an image, in the words that exported files use too."""
    return {
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
