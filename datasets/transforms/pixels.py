"""From one image as it is stored to the uint8 pixels the model's input is made of. Nothing is normalised here.

Parameters come before pixels: the header tells the size, the sample's random numbers what is taken of the image, and
only then is it decoded. Whatever decodes an image, the same numbers and the same resizing follow.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image

from datasets.base import Encoded
from datasets.decoding.reader import Reader, Unreadable, decoder_of, reason
from datasets.transforms.affine import affine_changes
from datasets.transforms.augment import ImageChange, image_changes
from datasets.transforms.crops import View, training_views, validation_views
from datasets.transforms.resize import PilResize, Resize, TorchResize
from utils.config.data import DataConfig
from utils.config.train import TrainConfig

SHRINKS = (8, 4, 2)
"""Fractions of their size at which JPEG files can be decoded"""


class Pixels:
    """Writes the pixels of one sample to where its batch wants them.

    Random numbers come from the generators of python, numpy and torch, which the caller seeds for the sample.
    """

    def __init__(self, data: DataConfig, train: bool, changes: TrainConfig | None = None) -> None:
        self.size, self.channels = data.IMAGE_SIZE, data.IMAGE_CHANNELS
        self.reader = Reader(data)
        self.views = training_views(data) if train else validation_views(data)
        self.resize: Resize = (PilResize if decoder_of(data) == "pil" else TorchResize)(data.INTERPOLATION)
        self.shrinks = data.DCT_SCALE
        self.pad = data.CROP_PAD if train and data.CROP == "pad" else 0
        self.flip = data.FLIP if train else 0.0
        self.changes: list[ImageChange] = []
        if train:
            self.changes = [*(image_changes(data, changes) if changes else ()), *affine_changes(data)]

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Raises Unreadable for what is no image. `out`: uint8, C x S x S, best stored pixel by pixel."""
        pixels, view = self.decode(encoded)
        place = out.numpy().transpose(1, 2, 0)
        # Pixels lie side by side in all that is done to them: written where they stay, they need not be copied.
        self.finish(self.resize(pixels, view, place if place.flags.c_contiguous else None), place)

    def decode(self, encoded: Encoded) -> tuple[np.ndarray, View]:
        """What the sample shows of the image, in its own resolution, and how it becomes the square."""
        try:
            stored = self.reader.open(encoded)
            view = self.views(stored.width, stored.height)
            if self.shrinks and (factor := _shrink(view)) > 1:
                factor = stored.shrink(factor)
                view = view.shrunk(factor, stored.width, stored.height)
            return stored.cut(view.box), view
        except MemoryError:
            raise  # no fault of the file
        except Exception as error:  # a damaged file can raise nearly anything in its decoder
            raise Unreadable(reason(error, encoded)) from None

    def finish(self, pixels: np.ndarray, place: np.ndarray) -> None:
        """Pad, mirror and change the square, and store it in its place, S x S x C, if it does not lie there already."""
        if self.pad:
            pixels = _moved(pixels, self.pad)
        if self.flip > 0 and random.random() < self.flip:
            pixels = torch.from_numpy(pixels).flip(1).numpy()  # a seventh of the time that numpy takes
        if self.changes:
            pixels = self._changed(pixels)
        if pixels is not place:
            np.copyto(place, pixels)  # one channel fills all three

    def _changed(self, pixels: np.ndarray) -> np.ndarray:
        grey = pixels.shape[2] == 1
        image = Image.fromarray(pixels[:, :, 0] if grey else pixels)
        if grey and self.channels == 3:
            image = image.convert("RGB")
        for change in self.changes:
            image = change(image)
        return np.asarray(image).reshape(self.size, self.size, self.channels)


def _shrink(view: View) -> int:
    """The smallest size to decode at that still has a pixel for each of the square's."""
    spare = min(view.across, view.down)
    return next((factor for factor in SHRINKS if spare >= factor), 1)


def _moved(pixels: np.ndarray, pad: int) -> np.ndarray:
    """Cut out anywhere of the square with a black margin: the square, moved by up to `pad` pixels."""
    height, width, _ = pixels.shape
    top, left = (int(random.random() * (2 * pad + 1)) for _ in range(2))
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    return padded[top : top + height, left : left + width]
