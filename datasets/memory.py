"""Small images that lie in memory, on the device: gathered and augmented a whole batch at once.

Each sample has random numbers of its own, so that it does not matter which others are in its batch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from datasets.base import PADDING, Batch, Encoded, ImageDataset, Key, Samples, sample_table
from datasets.decoding.reader import Reader, Unreadable, reason
from datasets.decoding.stored import Box
from datasets.images import Images
from datasets.transforms.affine import BatchAffine, moves
from utils.config.data import DataConfig
from utils.config.train import TrainConfig


class ArraySamples(Samples):
    """Pixels (N x H x W x C, uint8) with a label each."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, classes: list[str], owner: str) -> None:
        # The three colours of a pixel side by side, as decoders give them and what resizes them takes for granted.
        self.pixels = np.ascontiguousarray(pixels)
        self.labels, self.classes, self.owner = labels, classes, owner

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]

    def name(self, index: int) -> str:
        return f"{self.owner}:{index}"


def open_arrays(samples: ArraySamples, data: DataConfig, train: bool, seed: int, device: torch.device) -> ImageDataset:
    """In memory where that can be. A crop of any size and shape is made one image at a time, in loading processes."""
    if train and data.CROP == "random":
        return Images(samples, data, train, seed)
    return InMemory(samples, data, train, seed, device)


@dataclass
class _Draw:
    """What one epoch does to each sample, a row a sample. None: nothing of that kind."""

    taken: torch.Tensor | None = None
    """Top edge of the crop, left edge, and 1 for a mirrored image"""
    matrices: torch.Tensor | None = None


class InMemory(ImageDataset):
    """One part of a data set, held on the device as it is stored."""

    in_memory = True

    def __init__(
        self,
        samples: ArraySamples,
        data: DataConfig,
        train: bool,
        seed: int,
        device: torch.device,
        cropped: bool = True,
    ) -> None:
        """`cropped=False`: no crop and no flip, neither in training nor in validation."""
        self.samples, self.classes = samples, samples.classes
        self.data, self.seed, self.device, self.train, self.cropped = data, seed, device, train, cropped
        self.images = _planes(samples.pixels, data.IMAGE_CHANNELS).to(device)
        self.labels = torch.from_numpy(samples.labels).to(device)
        self.squeezed = not cropped or train or data.CROP == "none"
        self.margin = data.CROP_PAD if train and cropped and data.CROP == "pad" else 0
        self.flip = data.FLIP if train and cropped else 0.0
        self.takes = self.margin > 0 or self.flip > 0
        self.affine = BatchAffine(data, device) if train and moves(data) else None
        self._draws: dict[int, _Draw] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def augment(self, train: TrainConfig) -> ImageDataset:
        """What changes single images goes through loading processes like any other image."""
        if not self.cropped:
            return super().augment(train)
        if self.train and train.single_image_keys:
            return Images(self.samples, self.data, self.train, self.seed).augment(train)
        return self

    def at_size(self, size: int) -> ImageDataset:
        other = copy.copy(self)
        other.data = self.data.model_copy(update={"IMAGE_SIZE": size})
        other.affine, other._draws = BatchAffine(other.data, self.device) if self.affine else None, {}
        return other

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        chosen = indices.clamp(min=0)
        labels, images = self.labels[chosen], resized(self.images[chosen], self.data, self.squeezed)
        if self.train:
            images = self._moved(images, self._drawn(keys[0][0]), chosen)
        images = images.expand(-1, self.data.IMAGE_CHANNELS, -1, -1).contiguous()
        # With one channel the strides may also be those of pixel by pixel, which convolutions would hand on.
        images = images.view(images.shape)
        if any(index == PADDING for _, index in keys):
            real = indices != PADDING
            images, labels = images * real[:, None, None, None], labels * real
        return Batch(images, labels, indices)

    def _moved(self, images: torch.Tensor, draw: _Draw, chosen: torch.Tensor) -> torch.Tensor:
        if draw.taken is not None:
            images = _taken(images, self.margin, draw.taken[chosen])
        if self.affine is not None and draw.matrices is not None:
            images = self.affine(images, draw.matrices[chosen])
        return images

    def _drawn(self, epoch: int) -> _Draw:
        if epoch not in self._draws:
            self._draws[epoch] = self._draw(epoch)
            # Repeated augmentation asks for several epochs in turn.
            while len(self._draws) > self.data.REPEATED_AUGMENT:
                del self._draws[next(iter(self._draws))]
        return self._draws[epoch]

    def _draw(self, epoch: int) -> _Draw:
        draw = _Draw()
        if not self.takes and self.affine is None:
            return draw
        columns = BatchAffine.COLUMNS
        uniform = sample_table(self.seed, epoch, len(self), columns + 3 * self.takes)
        if self.affine is not None:
            draw.matrices = self.affine.matrices(uniform[:, :columns]).to(self.device, non_blocking=True)
        if self.takes:
            edges = (uniform[:, columns : columns + 2] * (2 * self.margin + 1)).astype(np.int64)
            numbers = torch.from_numpy(np.c_[edges, uniform[:, columns + 2] < self.flip])
            draw.taken = numbers.to(self.device, non_blocking=True)
        return draw


def resized(images: torch.Tensor, data: DataConfig, squeezed: bool) -> torch.Tensor:
    """B x C x H x W of one size, as the square that the model sees: squeezed into it, or resized and cropped."""
    size, mode = data.IMAGE_SIZE, InterpolationMode(data.INTERPOLATION)
    if squeezed:
        if images.shape[-2:] == (size, size):
            return images
        return functional.resize(images, [size, size], mode, antialias=True)
    short_side = math.floor(size / data.CROP_PCT)
    if short_side != min(images.shape[-2:]):
        images = functional.resize(images, [short_side], mode, antialias=True)
    return functional.center_crop(images, [size, size])


class ArrayPixels:
    """Writes the pixels of a single image as validation makes those of images in memory."""

    def __init__(self, data: DataConfig, cropped: bool = True) -> None:
        self.data, self.reader = data, Reader(data)
        self.squeezed = not cropped or data.CROP == "none"

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Raises Unreadable for what is no image."""
        try:
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        except MemoryError:
            raise  # no fault of the file
        except Exception as error:  # a damaged file can raise nearly anything in its decoder
            raise Unreadable(reason(error, encoded)) from None
        out.copy_(resized(_planes(pixels[None], self.data.IMAGE_CHANNELS), self.data, self.squeezed)[0])


def _taken(images: torch.Tensor, margin: int, numbers: torch.Tensor) -> torch.Tensor:
    """Squares of the images' own size out of the images with a black margin, each from its place, some mirrored."""
    size = images.shape[-1]
    top, left, mirrored = numbers[:, :, None].unbind(1)
    if margin:
        images = torch.nn.functional.pad(images, (margin,) * 4)
    places = torch.arange(size, device=images.device)
    rows = top + places
    columns = left + torch.where(mirrored > 0, size - 1 - places, places)
    pixels = (rows[:, :, None] * images.shape[-1] + columns[:, None, :]).flatten(1)
    taken = images.flatten(2).gather(2, pixels[:, None].expand(-1, images.shape[1], -1))
    return taken.unflatten(2, (size, size))


def _planes(pixels: np.ndarray, channels: int) -> torch.Tensor:
    """N x H x W x C as N x C x H x W. Colours become grey by PIL's weights where one channel is wanted."""
    if channels == 1 and pixels.shape[-1] == 3:
        weighed = pixels @ np.array([19595, 38470, 7471], dtype=np.uint32) + np.uint32(0x8000)
        pixels = (weighed >> 16).astype(np.uint8)[..., None]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
