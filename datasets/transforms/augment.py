"""Augmentation of single training images after the crop: RandAugment, AutoAugment, colour jitter and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps
from timm.data import auto_augment as timm_augment
from torchvision.transforms import InterpolationMode, v2

from datasets.decoding.background import mean_colour
from datasets.transforms.affine import has_affine
from utils.config.data import DataConfig
from utils.config.train import TrainConfig

ImageChange = Callable[[Image.Image], Image.Image]

MAGNITUDE_SPREAD = 0.5
"""Standard deviation of the magnitudes in RandAugment and AutoAugment, as in DeiT, Swin and PaddleViT."""
PROBABILITY = 0.5
"""Probability that an operation chosen by RandAugment is applied, as in the same three."""


def image_changes(data: DataConfig, train: TrainConfig) -> list[ImageChange]:
    """Augmentations of an image of the final size, in order. They draw from python's, numpy's and torch's generators.

    If several policies are on, RandAugment wins over AutoAugment, as in PaddleViT. Colour jitter applies without a
    policy or with ThreeAugment.
    """
    changes: list[ImageChange] = []
    if train.RAND_AUGMENT:
        changes.append(_rand_augment(data, train))
    elif train.AUTO_AUGMENT:
        changes.append(timm_augment.AutoAugment(timm_augment.auto_augment_policy("original", _options(data))))
    elif train.TRIVIAL_AUGMENT:
        changes.append(v2.TrivialAugmentWide(interpolation=InterpolationMode(data.INTERPOLATION), fill=_fill(data)))
    elif train.THREE_AUGMENT:
        changes.append(timm_augment.AutoAugment(timm_augment.auto_augment_policy("3a", _options(data, spread=0.0))))
    if train.COLOR_JITTER and jitters(train):
        strength = train.COLOR_JITTER
        changes.append(v2.ColorJitter(brightness=strength, contrast=strength, saturation=strength))
    if train.AUGMENT:
        from datasets.transforms.own import OwnChange

        changes += map(OwnChange, train.AUGMENT)
    return changes


def affine_changes(data: DataConfig) -> list[ImageChange]:
    """The transform for single images by SHIFT, ZOOM and ROTATE; none if they are off."""
    if not has_affine(data):
        return []
    affine = v2.RandomAffine(
        degrees=(-data.ROTATE, data.ROTATE),
        translate=(data.SHIFT, data.SHIFT),
        scale=(1 - data.ZOOM, 1 + data.ZOOM),
        interpolation=InterpolationMode.BILINEAR,
    )
    return [v2.RandomApply([affine], p=data.AFFINE_PROB)]


def jitters(train: TrainConfig) -> bool:
    """Whether the other settings leave colour jitter on."""
    return not (train.RAND_AUGMENT or train.AUTO_AUGMENT or train.TRIVIAL_AUGMENT)


def _rand_augment(data: DataConfig, train: TrainConfig) -> ImageChange:
    operations = timm_augment.rand_augment_ops(
        magnitude=train.RAND_AUGMENT_MAGNITUDE,
        prob=PROBABILITY,
        hparams=_options(data),
        transforms=timm_augment.rand_augment_choices("", increasing=True),
    )
    for operation in operations:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return timm_augment.RandAugment(operations, train.RAND_AUGMENT_LAYERS)


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Posterize to at least 1 bit: at high magnitudes timm asks for 0, a black image, which Pillow 13 rejects."""
    return ImageOps.posterize(image, max(1, bits_to_keep))


def _options(data: DataConfig, spread: float = MAGNITUDE_SPREAD) -> dict[str, Any]:
    """Options of timm's operations: fill colour of uncovered corners, interpolation, spread of magnitudes."""
    fill = _fill(data)
    return {
        "img_mean": fill[0] if data.IMAGE_CHANNELS == 1 else tuple(fill),
        "interpolation": Image.Resampling[data.INTERPOLATION.upper()],
        "magnitude_std": spread,
    }


def _fill(data: DataConfig) -> list[int]:
    """The mean colour, in as many channels as the images have."""
    return list(mean_colour(data)[: data.IMAGE_CHANNELS])
