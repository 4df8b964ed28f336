"""Random erasing, mixup and cutmix on the device.

The random numbers come from generators that are seeded for each micro-batch, so they depend only on its position in
the run. Erasing comes before mixing, as in DeiT and Swin.
"""

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
    """Build the erasing and mixing that TRAIN asks for; `no_transform` for a task that cannot mix labels.

    Validation uses no batch transform.
    """
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

    def transform(images: Tensor, labels: Tensor) -> TransformedBatch:
        if erase is not None:
            images = erase(images)
        return mix.mixed(images, labels) if mix is not None else no_transform(images, labels)

    return transform


class Mixing(Mixup):
    """Mixup and cutmix with timm's random draws, computed for all images at once.

    timm's pair and elem modes wait for the device and need several operations per image. The partner of image i is, as
    in timm, the i-th from the end; the middle one of an odd batch is its own partner and stays unmixed.
    """

    def __init__(self, train: TrainConfig, task: Task) -> None:
        """Take the settings of mixup and CutMix. `task`: mixes the labels."""
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
        """Mix each image and its labels with those of its partner, into new tensors.

        The partner of image i is the i-th from the end, the image i of `images.flip(0)`. Mixup adds all pixels of both
        with weights; cutmix replaces those in a box by the partner's.
        """
        count = len(images)
        height = images.shape[-2]
        width = images.shape[-1]
        table = torch.from_numpy(self._draw(count, (height, width)).astype(np.float32))
        # The six columns that `_draw` describes, each of the shape (count, 1, 1, 1), to be broadcast over channels and
        # pixels. `lam` is the image's own weight, with cutmix the fraction of its pixels that stay.
        lam, top, bottom, left, right, is_mixup = table.to(images.device, non_blocking=True)[
            ..., None, None, None
        ].unbind(1)
        row = torch.arange(height, device=images.device)[:, None]
        column = torch.arange(width, device=images.device)
        in_box = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        # Weight of the image itself at each pixel. With cutmix it is 0 in the box and 1 elsewhere.
        pixel_weights = torch.where(is_mixup > 0, lam, 1.0).masked_fill(in_box, 0.0)
        mixed = torch.lerp(images.flip(0), images, pixel_weights.to(images.dtype))
        targets, main_labels = self._task.mixed(labels, lam.reshape(count, 1))
        return TransformedBatch(mixed, targets, main_labels)

    def _draw(self, count: int, size: tuple[int, int]) -> np.ndarray:
        """Draw the random numbers for mixing `count` images, in timm's order: the same seed gives the same numbers.

        Returns one row per image with six columns: lam, the image's own weight (its partner has the rest); top, bottom,
        left and right of the box that the partner fills, zeros for mixup; 1 for mixup, 0 for cutmix.
        `size`: height and width of the images.
        """
        # timm draws once for a batch, for each image (elem), or for each pair of images (pair).
        if self.mode == "batch":
            lam, use_cutmix = map(np.atleast_1d, self._params_per_batch())
        else:
            lam, use_cutmix = self._params_per_elem(count if self.mode == "elem" else count // 2)
        boxes = np.zeros((len(lam), 4))
        rows = np.column_stack((lam.astype(np.float64), boxes, ~use_cutmix))
        # The box of each cutmix. Its edges are whole pixels, so it corrects lam.
        for nth in np.flatnonzero(use_cutmix & (lam != 1)):
            box, corrected_lam = cutmix_bbox_and_lam(size, rows[nth, 0], self.cutmix_minmax, self.correct_lam)
            rows[nth, 0] = corrected_lam
            rows[nth, 1:5] = box

        if self.mode == "batch":
            return rows.repeat(count, axis=0)
        if self.mode == "elem":
            return rows
        # Pairs: image i and the i-th from the end are partners and share a row, so the second half is the first one
        # reversed. Between them, an odd batch has an image that stays unmixed: lam 1, no box, mixup.
        unmixed = np.array([[1, 0, 0, 0, 0, 1]])
        middle = unmixed if count % 2 == 1 else unmixed[:0]
        return np.concatenate((rows, middle, rows[::-1]))
