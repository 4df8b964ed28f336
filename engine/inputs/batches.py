"""What a micro-batch goes through on the device: normalisation, random erasing, mixup and cutmix; and token dropping.

The random numbers come from generators that are seeded for each micro-batch, so they depend only on its position in
the run. Erasing comes before mixing, as in DeiT and Swin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing
from timm.layers.patch_dropout import PatchDropout
from torch import Tensor, nn

from datasets.base import background_of
from datasets.registry import squeezes
from engine.callback import Callback, Figure
from engine.task.base import Task
from models import Shortcuts
from utils.config.data import DataConfig
from utils.config.schema import Config
from utils.config.train import TrainConfig

ERASE_SPLITS = 2
"""RANDOM_ERASE_SPLIT does not erase in the first 1 / ERASE_SPLITS of a micro-batch."""


class TransformedBatch(NamedTuple):
    """A micro-batch as the model gets it, with its targets."""

    images: Tensor
    targets: Tensor
    """Labels; for mixed images one row of class weights per image."""
    labels: Tensor
    """As in the batch; for a mixed image those of the image with the larger weight."""


BatchTransform = Callable[[Tensor, Tensor], TransformedBatch]
"""(normalised images, labels) -> the model's input and targets. May write into the images."""


def no_transform(images: Tensor, labels: Tensor) -> TransformedBatch:
    return TransformedBatch(images, labels, labels)


class MixedWeights:
    """Class weights of images that MIXUP_MODE elem mixes one by one.

    An image and its partner then do not share out their weights, so what a micro-batch counts for is known only when
    it is mixed; `MicroBatch` counts it by its own labels.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        self.ratio = torch.ones((), device=weights.device)
        """What the last micro-batch counts for, relative to its share"""

    def note(self, targets: Tensor, labels: Tensor) -> None:
        self.ratio = (targets * self._weights).sum() / self._weights[labels].sum()


def build_batch_transform(
    train: TrainConfig, task: Task, device: torch.device, weights: MixedWeights | None = None
) -> BatchTransform:
    """The batch transform that TRAIN asks for. Validation has none."""
    if not task.mixes:
        return no_transform
    erase = _random_erasing(train, device) if train.RANDOM_ERASE_PROB else None
    mix = Mixing(train, task, weights) if train.mixes else None
    if erase is None and mix is None:
        return no_transform

    def transform(images: Tensor, labels: Tensor) -> TransformedBatch:
        if erase is not None:
            images = erase(images)
        return mix.mixed(images, labels) if mix is not None else no_transform(images, labels)

    return transform


def _random_erasing(train: TrainConfig, device: torch.device) -> RandomErasing:
    return RandomErasing(
        probability=train.RANDOM_ERASE_PROB,
        mode=train.RANDOM_ERASE_MODE,
        max_count=train.RANDOM_ERASE_COUNT,
        num_splits=ERASE_SPLITS if train.RANDOM_ERASE_SPLIT else 0,
        device=device,  # pyright: ignore[reportArgumentType]  # timm passes it to torch unchanged
    )


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

    def __init__(self, train: TrainConfig, task: Task, weights: MixedWeights | None = None) -> None:
        self._task, self._weights = task, weights
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
        targets, shown = self._task.mixed(labels, lam.reshape(count, 1))
        if self._weights is not None:
            self._weights.note(targets, labels)
        return TransformedBatch(mixed, targets, shown)

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


def shortcuts_of(config: Config) -> Shortcuts:
    train, full = config.TRAIN, config.DATA.IMAGE_SIZE
    return Shortcuts(train.TOKEN_DROP, tuple(sorted({size for _, size in train.SIZE_SCHEDULE} - {full})))


class TokenDrop(Callback):
    """Sets the model's patch dropout. Tokens are drawn anew for each sample, by its micro-batch's random numbers."""

    def __init__(self, train: TrainConfig) -> None:
        self.fraction, self.last = train.TOKEN_DROP, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL
        self.tail = train.TOKEN_DROP_TAIL
        self._now = 0.0

    def phase(self, epoch: int) -> str:
        return self._share() if epoch <= self.last else ""

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        self._now = self.fraction if epoch <= self.last else 0.0
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, PatchDropout):
                module.prob = self._now
        return False

    def figures(self) -> dict[str, Figure]:
        return {"token_drop": Figure(self._now, f"Patches left out: {100 * self._now:g}%")}

    def rows(self) -> dict[str, str]:
        epochs = f"{self.tail} epochs" if self.tail > 1 else "epoch"
        tail = f", none in the last {epochs}" if self.tail else ""
        return {"shortcuts": f"{self._share()}{tail}"}

    def _share(self) -> str:
        return f"{100 * self.fraction:g} % of the patches left out"


# TRAIN.SIZE_SCHEDULE: training images grow. The data set makes them (`datasets.Sized`); this is what the log says.


class GrowingImages(Callback):
    def __init__(self, train: TrainConfig, full: int) -> None:
        """`full`: size of the images in epochs for which the schedule has none."""
        self._train, self._full, self._size = train, full, full

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        self._size = self._train.size_in(epoch, self._full)
        return False

    def figures(self) -> dict[str, Figure]:
        return {"image_size": Figure(self._size, f"Size: {self._size}")}

    def rows(self) -> dict[str, str]:
        steps = (f"{size} from epoch {self._first_epoch(start)}" for start, size in self._train.SIZE_SCHEDULE)
        return {"shortcuts": f"images of {', '.join(steps)}"}

    def _first_epoch(self, start: float) -> int:
        """First epoch after `start`, a fraction of the run."""
        return int(-(-self._train.epochs_before(start) // 1)) + 1
