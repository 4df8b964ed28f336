"""Random erasing, mixup and cutmix: what is done to a whole micro-batch, on the device, after it was normalised.

Their random numbers come from the generators that are seeded for each micro-batch, so they depend on where it stands
in the run and on nothing else. Erasing comes before mixing, as in DeiT and Swin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from utils.config.train import TrainConfig

CLEAN_PART = 2
"""RANDOM_ERASE_SPLIT leaves the first 1 / CLEAN_PART of a micro-batch alone."""


class Seen(NamedTuple):
    """What the model sees of a micro-batch, and what it is to learn from it."""

    images: Tensor
    targets: Tensor
    """Labels, or a row of class weights an image where images are mixed."""
    labels: Tensor
    """One label an image: where two are mixed, that of the larger weight."""


BatchChange = Callable[[Tensor, Tensor], Seen]
"""(normalised images, labels) -> what the model sees. May write into the images."""


def unchanged(images: Tensor, labels: Tensor) -> Seen:
    return Seen(images, labels, labels)


def batch_change(train: TrainConfig, classes: int, device: torch.device) -> BatchChange:
    """What TRAIN asks for; it is for training alone."""
    erase = _erasing(train, device) if train.RANDOM_ERASE_PROB else None
    mix = Mixing(train, classes) if train.mixes else None
    if erase is None and mix is None:
        return unchanged

    def change(images: Tensor, labels: Tensor) -> Seen:
        if erase is not None:
            images = erase(images)
        return mix.mixed(images, labels) if mix is not None else unchanged(images, labels)

    return change


def _erasing(train: TrainConfig, device: torch.device) -> RandomErasing:
    return RandomErasing(
        probability=train.RANDOM_ERASE_PROB,
        mode=train.RANDOM_ERASE_MODE,
        max_count=train.RANDOM_ERASE_COUNT,
        num_splits=CLEAN_PART if train.RANDOM_ERASE_SPLIT else 0,
        device=device,  # pyright: ignore[reportArgumentType]  # given on to torch as it is
    )


class _Draw(NamedTuple):
    """The random numbers of a micro-batch, a row an image: how much of it stays, and the box its partner fills."""

    share: np.ndarray
    boxes: np.ndarray
    """Rows of top, bottom, left, right; empty for mixup."""
    blended: np.ndarray
    """True: its partner shines through everywhere, and fills no box."""

    def for_all(self, count: int) -> _Draw:
        """One row for every image."""
        return _Draw(*(column.repeat(count, axis=0) for column in self))

    def mirrored(self, count: int) -> _Draw:
        """The rows of half a batch for the partners as well; the middle image of an odd one keeps itself."""
        middle = _Draw(np.ones(count % 2), np.zeros((count % 2, 4), dtype=np.int64), np.ones(count % 2, dtype=bool))
        return _Draw(*(np.concatenate((a, b, a[::-1])) for a, b in zip(self, middle, strict=True)))


class Mixing(Mixup):
    """timm's draws of mixup and cutmix, carried out for all images at once.

    timm's own pair and elem modes copy their numbers to the device in a way that waits for it, and take several
    operations an image. The partner of an image is, as there, the one as far from the other end of the batch; the
    middle one of an odd batch is its own partner and stays as it is.
    """

    def __init__(self, train: TrainConfig, classes: int) -> None:
        super().__init__(
            mixup_alpha=train.MIXUP_ALPHA,
            cutmix_alpha=train.CUTMIX_ALPHA,
            cutmix_minmax=train.CUTMIX_MINMAX,
            prob=train.MIXUP_PROB,
            switch_prob=train.MIXUP_SWITCH_PROB,
            mode=train.MIXUP_MODE,
            label_smoothing=0.0,  # the loss smooths, which comes to the same: both are linear in the target
            num_classes=classes,
        )

    def mixed(self, images: Tensor, labels: Tensor) -> Seen:
        """Images and labels mixed with those of their partners; the images given stay as they are."""
        count, height, width = len(images), images.shape[-2], images.shape[-1]
        draw = self._draw(count, (height, width))
        table = np.column_stack((draw.share, draw.boxes, draw.blended)).astype(np.float32)
        share, top, bottom, left, right, blended = (
            torch.from_numpy(table).to(images.device, non_blocking=True)[..., None, None, None].unbind(1)
        )
        row = torch.arange(height, device=images.device)[:, None]
        column = torch.arange(width, device=images.device)
        in_box = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        own = torch.where(blended > 0, share, 1.0).masked_fill(in_box, 0.0)
        both = torch.lerp(images.flip(0), images, own.to(images.dtype))
        share = share.reshape(count, 1)
        targets = mixup_target(labels, self.num_classes, share)  # pyright: ignore[reportArgumentType]  # a row an image
        return Seen(both, targets, torch.where(share[:, 0] >= 0.5, labels, labels.flip(0)))

    def _draw(self, count: int, size: tuple[int, int]) -> _Draw:
        """In timm's order, so that the same seed gives the same numbers."""
        if self.mode == "batch":
            share, cuts = self._params_per_batch()
            return self._with_boxes(np.array([share]), np.array([cuts]), size).for_all(count)
        if self.mode == "elem":
            return self._with_boxes(*self._params_per_elem(count), size)
        return self._with_boxes(*self._params_per_elem(count // 2), size).mirrored(count)

    def _with_boxes(self, share: np.ndarray, cuts: np.ndarray, size: tuple[int, int]) -> _Draw:
        share, boxes = share.astype(np.float64), np.zeros((len(share), 4), dtype=np.int64)
        for row in np.flatnonzero(cuts & (share != 1)):
            box, share[row] = cutmix_bbox_and_lam(size, share[row], self.cutmix_minmax, self.correct_lam)
            boxes[row] = [int(edge) for edge in box]
        return _Draw(share, boxes, ~cuts)
