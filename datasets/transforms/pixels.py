"""Preprocessing of one image: from the stored file to uint8 pixels of the model's size, not yet normalised.

Numbers come before pixels: the header gives the size, the sample's random numbers the crop, and only then is the image
decoded. The crop and the resizing do not depend on the decoder.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image

from datasets.base import Encoded, mean_colour
from datasets.decoding import Reader, decoder_of_jpeg, decoding_errors
from datasets.transforms.augment import ImageChange, affine_changes, image_changes
from datasets.transforms.crops import PAD, PilResize, Resize, TorchResize, View, training_views, validation_views
from utils.config.data import DataConfig
from utils.config.train import TrainConfig


class Pixels:
    """Writes the pixels of one sample into its batch.

    Random numbers come from the generators of python, numpy and torch, which the caller seeds for the sample.
    """

    def __init__(self, data: DataConfig, train: bool, augmentation: TrainConfig | None = None) -> None:
        self.size, self.channels = data.IMAGE_SIZE, data.IMAGE_CHANNELS
        self.reader = Reader(data)
        self.views = training_views(data) if train else validation_views(data)
        self.resize: Resize = (PilResize if decoder_of_jpeg() == "pil" else TorchResize)(data.INTERPOLATION)
        self.pad = PAD if train and data.CROP == "pad" else 0
        self.flip = data.FLIP if train else 0.0
        self.border = mean_colour(data)[: self.channels]
        self.changes: list[ImageChange] = []
        if train:
            self.changes = [*(image_changes(data, augmentation) if augmentation else ()), *affine_changes(data)]

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Write the pixels to `out` (uint8, C x S x S, best in channels-last). Raises Unreadable for a bad image."""
        pixels, view = self.decode(encoded)
        place = out.numpy().transpose(1, 2, 0)
        # All steps work channels-last: if `out` is, resizing writes straight into it, without a copy.
        self.finish(self.resize(pixels, view, place if place.flags.c_contiguous else None), place)

    def decode(self, encoded: Encoded) -> tuple[np.ndarray, View]:
        """Decode the part of the image that the sample shows; returns its pixels and the view to resize them by."""
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            view = self.views(stored.width, stored.height)
            return stored.cut(view.box), view

    def finish(self, pixels: np.ndarray, place: np.ndarray) -> None:
        """Pad, mirror and augment the resized pixels, and copy them to `place` (S x S x C) unless they are in it.

        Pixels smaller than `place`, by CROP_MODE border, get a border of the mean colour.
        """
        high, wide, _ = pixels.shape
        if high < self.size or wide < self.size:
            place[:] = self.border
            place = place[(self.size - high) // 2 :, (self.size - wide) // 2 :][:high, :wide]
        if self.pad:
            pixels = _padded_crop(pixels, self.pad)
        if self.flip > 0 and random.random() < self.flip:
            pixels = torch.from_numpy(pixels).flip(1).numpy()  # seven times as fast as numpy
        if self.changes:
            pixels = self._augmented(pixels)
        if pixels is not place:
            np.copyto(place, pixels)  # broadcasts one channel to three

    def _augmented(self, pixels: np.ndarray) -> np.ndarray:
        grey = pixels.shape[2] == 1
        image = Image.fromarray(pixels[:, :, 0] if grey else pixels)
        if grey and self.channels == 3:
            image = image.convert("RGB")
        for change in self.changes:
            image = change(image)
        return np.asarray(image).reshape(self.size, self.size, self.channels)


def _padded_crop(pixels: np.ndarray, pad: int) -> np.ndarray:
    """Pad with a black margin and crop the original size at a random place."""
    height, width, _ = pixels.shape
    top, left = (int(random.random() * (2 * pad + 1)) for _ in range(2))
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    return padded[top : top + height, left : left + width]
