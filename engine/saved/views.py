"""Test-time augmentation (-tta): the views of an image over which a model's probabilities are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from datasets.given import squeezes
from utils.config.data import DataConfig
from utils.errors import UserError

FLIP, CROPS = "flip", "crops"


@dataclass(frozen=True)
class Views:
    """Views of images of `side` x `side` pixels, each as large as the model's input."""

    size: int
    side: int
    flip: bool = False

    @classmethod
    def asked(cls, tta: str | None, data: DataConfig, model: str) -> Views:
        """The views of -tta. `data`: settings of the model, which errors call `model`."""
        kinds = tta.split(",") if tta else []
        side = _side(data, model) if CROPS in kinds else data.IMAGE_SIZE
        return cls(data.IMAGE_SIZE, side, FLIP in kinds)

    def data(self, data: DataConfig) -> DataConfig:
        """Settings that read images of `side` x `side`: those of `data`, but without its crop of the centre."""
        if self.side == self.size:
            return data
        return data.model_copy(update={"IMAGE_SIZE": self.side, "CROP_PCT": 1.0})

    def of(self, images: Tensor) -> Iterator[Tensor]:
        """Each view of the images, the one that validation sees first."""
        for crop in self._crops(images):
            yield crop
            if self.flip:
                yield crop.flip(-1)

    def words(self) -> str:
        """What is averaged; '' for one view."""
        if self.side == self.size:
            return "mean of the probabilities of each image and its mirror image" if self.flip else ""
        mirrored, count = (" and their mirror images", 10) if self.flip else ("", 5)
        return (
            f"mean of the probabilities of {count} views of each image: {self.size} x {self.size} pixels in the centre "
            f"and the four corners of {self.side} x {self.side}{mirrored}"
        )

    def _crops(self, images: Tensor) -> Iterator[Tensor]:
        end = self.side - self.size
        if not end:
            yield images
            return
        middle = round(end / 2)
        for top, left in ((middle, middle), (0, 0), (0, end), (end, 0), (end, end)):
            yield images[..., top : top + self.size, left : left + self.size]


def _side(data: DataConfig, model: str) -> int:
    """Side of the square from which validation cuts the centre."""
    advice = f"Leave {CROPS} out; -tta {FLIP} works, if a mirror does not change your classes."
    if squeezes(data):
        raise UserError(
            f"-tta {CROPS}: {model} sees the whole image, resized to a square, so there is nothing to crop. {advice}"
        )
    side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
    if side == data.IMAGE_SIZE:
        raise UserError(
            f"-tta {CROPS}: DATA.CROP_PCT is {data.CROP_PCT:g} for {model}, so the centre of an image is all of its "
            f"resized square. {advice}"
        )
    return side
