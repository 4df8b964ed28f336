"""Random erasing, mixup and cutmix on the device.

The random numbers come from generators that are seeded for each micro-batch, so they depend only on its position in
the run. Erasing comes before mixing, as in DeiT and Swin.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from engine.inputs.batches import BatchTransform, TransformedBatch, no_transform
from engine.task.base import Task
from utils.config.train import TrainConfig

ERASE_SPLITS = 2
"""RANDOM_ERASE_SPLIT does not erase in the first 1 / ERASE_SPLITS of a micro-batch."""


def build_batch_transform(train: TrainConfig, task: Task, device: torch.device) -> BatchTransform:
    """The batch transform that TRAIN asks for. Validation has none."""
    if not task.mixes:
        return no_transform
    erase = None
    if train.RANDOM_ERASE_PROB:
        erase = RandomErasing(
            probability=train.RANDOM_ERASE_PROB,
            mode=train.RANDOM_ERASE_MODE,
            max_count=train.RANDOM_ERASE_COUNT,
            num_splits=ERASE_SPLITS if train.RANDOM_ERASE_SPLIT else 0,
            device=device,  # pyright: ignore[reportArgumentType]  # timm passes it to torch unchanged
        )
    mix = Mixing(train, task) if train.mixes else None
    if erase is None and mix is None:
        return no_transform

    def transform(images: Tensor, labels: Tensor) -> TransformedBatch:
        if erase is not None:
            images = erase(images)
        return mix.mixed(images, labels) if mix is not None else no_transform(images, labels)

    return transform


class _Draw(NamedTuple):
    """Random numbers of a micro-batch, one row per image."""

    lam: np.ndarray
    """Weight of the image itself, as in timm; its partner has 1 - lam."""
    boxes: np.ndarray
    """Cutmix: top, bottom, left, right of the box that the partner fills. Zeros for mixup."""
    is_mixup: np.ndarray

    def repeated(self, count: int) -> _Draw:
        """The one row, for every image."""
        return _Draw(*(column.repeat(count, axis=0) for column in self))

    def mirrored(self, count: int) -> _Draw:
        """The rows of half a batch, also for their partners. The middle image of an odd batch stays unmixed."""
        middle = _Draw(np.ones(count % 2), np.zeros((count % 2, 4), dtype=np.int64), np.ones(count % 2, dtype=bool))
        return _Draw(*(np.concatenate((a, b, a[::-1])) for a, b in zip(self, middle, strict=True)))


class Mixing(Mixup):
    """Mixup and cutmix with timm's random draws, computed for all images at once.

    timm's pair and elem modes wait for the device and need several operations per image. The partner of image i is, as
    in timm, the i-th from the end; the middle one of an odd batch is its own partner and stays unmixed.
    """

    def __init__(self, train: TrainConfig, task: Task) -> None:
        self._task = task
        super().__init__(
            mixup_alpha=train.MIXUP_ALPHA,
            cutmix_alpha=train.CUTMIX_ALPHA,
            cutmix_minmax=train.CUTMIX_MINMAX,
            prob=train.MIXUP_PROB,
            switch_prob=train.MIXUP_SWITCH_PROB,
            mode=train.MIXUP_MODE,
            label_smoothing=0.0,  # the loss smooths, with the same result: both are linear in the target
        )

    def mixed(self, images: Tensor, labels: Tensor) -> TransformedBatch:
        """Mix images and labels with those of their partners, into new tensors."""
        count, height, width = len(images), images.shape[-2], images.shape[-1]
        draw = self._draw(count, (height, width))
        table = np.column_stack((draw.lam, draw.boxes, draw.is_mixup)).astype(np.float32)
        lam, top, bottom, left, right, is_mixup = (
            torch.from_numpy(table).to(images.device, non_blocking=True)[..., None, None, None].unbind(1)
        )
        row = torch.arange(height, device=images.device)[:, None]
        column = torch.arange(width, device=images.device)
        in_box = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        own = torch.where(is_mixup > 0, lam, 1.0).masked_fill(in_box, 0.0)
        mixed = torch.lerp(images.flip(0), images, own.to(images.dtype))
        return TransformedBatch(mixed, *self._task.mixed(labels, lam.reshape(count, 1)))

    def _draw(self, count: int, size: tuple[int, int]) -> _Draw:
        """Draw random numbers in timm's order, so that the same seed gives the same ones."""
        if self.mode == "batch":
            lam, use_cutmix = self._params_per_batch()
            return self._with_boxes(np.array([lam]), np.array([use_cutmix]), size).repeated(count)
        if self.mode == "elem":
            return self._with_boxes(*self._params_per_elem(count), size)
        return self._with_boxes(*self._params_per_elem(count // 2), size).mirrored(count)

    def _with_boxes(self, lam: np.ndarray, use_cutmix: np.ndarray, size: tuple[int, int]) -> _Draw:
        lam, boxes = lam.astype(np.float64), np.zeros((len(lam), 4), dtype=np.int64)
        for row in np.flatnonzero(use_cutmix & (lam != 1)):
            box, lam[row] = cutmix_bbox_and_lam(size, lam[row], self.cutmix_minmax, self.correct_lam)
            boxes[row] = [int(edge) for edge in box]
        return _Draw(lam, boxes, ~use_cutmix)
