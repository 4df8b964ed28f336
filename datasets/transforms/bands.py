"""Augmentation of images with any number of channels and any depth: of their shape, the same in all channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets.base import shades_of_mean
from datasets.transforms.augment import affine_changes, own_augmentations, rand_augment
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import UserError
from utils.log import warn_once

SHAPES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
"""Operations of RandAugment that move pixels; the others change the 8 bits of grey or RGB."""


class Bands:
    """Channels as images of their own, with the methods of Pillow's by which timm moves pixels."""

    def __init__(self, planes: list[Image.Image], fill: tuple[float, ...]) -> None:
        self.planes, self.size, self._fill = planes, planes[0].size, fill

    def transform(self, *args: Any, **options: Any) -> Bands:
        return self._each("transform", *args, **options)

    def rotate(self, *args: Any, **options: Any) -> Bands:
        return self._each("rotate", *args, **options)

    def _each(self, name: str, *args: Any, **options: Any) -> Bands:
        moved = zip(self.planes, self._fill, strict=True)
        return Bands([getattr(one, name)(*args, **options | {"fillcolor": fill}) for one, fill in moved], self._fill)


@dataclass(frozen=True)
class BandsChange:
    """Applies a change of timm's or of torchvision's to pixels (height x width x channels, float32)."""

    change: Any
    fill: tuple[float, ...] | None
    """The values for uncovered corners, of one of timm's; None: one of torchvision's"""

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        if self.fill is None:
            planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
            return self.change(planes).numpy().transpose(1, 2, 0)
        planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in pixels.transpose(2, 0, 1)]
        return np.dstack([np.asarray(plane) for plane in self.change(Bands(planes, self.fill)).planes])


def bands_changes(data: DataConfig, train: TrainConfig | None) -> list[BandsChange]:
    """Augmentations of an image of the final size, in order; see `image_changes`."""
    changes = [BandsChange(change, None) for change in affine_changes(data)]
    if train is not None and train.RAND_AUGMENT:
        changes.insert(0, BandsChange(rand_augment(data, train, SHAPES), shades_of_mean(data)))
    return changes


def check_bands(data: DataConfig, train: TrainConfig) -> None:
    """Say which augmentations bands do without; UserError for those of the user's own."""
    kind = f"images of {data.IMAGE_CHANNELS} channels, DATA.BITS {data.BITS}"
    if own := own_augmentations(train):
        raise UserError(f"TRAIN.AUGMENT {own[0]}: your own augmentations change Pillow's images, not {kind}.")
    left_out = [key for key in train.single_image_keys if key != "TRAIN.RAND_AUGMENT"]
    if train.RAND_AUGMENT:
        left_out.append(f"all of TRAIN.RAND_AUGMENT but {', '.join(SHAPES)}")
    if data.EXIF_ROTATE:
        left_out.append("DATA.EXIF_ROTATE")
    if left_out:
        warn_once(f"Left out, because they are for 8-bit grey or RGB and not for {kind}: {'; '.join(left_out)}.")
