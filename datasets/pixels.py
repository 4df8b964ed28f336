"""From one image as it is stored to the uint8 pixels the model's input is made of. Nothing is normalised here."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from utils.config.schema import DataConfig, TrainConfig

from .samples import Encoded
from .transforms import as_wanted, training_transform, validation_transform


class Unreadable(Exception):
    """Bytes that are no image, or a broken one. The text says why."""


class Pixels:
    """Writes the pixels of one sample to where its batch wants them."""

    def __init__(self, data: DataConfig, train: bool, changes: TrainConfig | None = None) -> None:
        self.channels = data.IMAGE_CHANNELS
        self.transform = training_transform(data, changes) if train else validation_transform(data)

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Raises Unreadable for what is no image."""
        out.copy_(self.transform(self._decode(encoded)))

    def _decode(self, encoded: Encoded) -> Image.Image:
        if isinstance(encoded, np.ndarray):
            return as_wanted(Image.fromarray(encoded.squeeze()), self.channels)
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                return as_wanted(image, self.channels)
        except Exception as error:  # a damaged file can raise nearly anything in its decoder
            raise Unreadable(str(error) or type(error).__name__) from None
