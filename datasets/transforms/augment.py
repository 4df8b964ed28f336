"""Augment single training images after the crop: RandAugment, AutoAugment, own code and others."""

from collections.abc import Callable, Iterable
from typing import Any

from PIL import Image, ImageOps
from timm.data import auto_augment as timm_augment
from torchvision.transforms import InterpolationMode, v2

from datasets.base import mean_colour
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.errors import UserError
from utils.log import warn_once

ImageChange = Callable[[Image.Image], Image.Image]

MAGNITUDE_SPREAD = 0.5
"""Standard deviation of the magnitudes in RandAugment and AutoAugment, as in DeiT, Swin and PaddleViT."""
PROBABILITY = 0.5
"""Probability that an operation chosen by RandAugment is applied, as in the same three."""


SHAPES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
"""Operations of RandAugment that move pixels; the others change the 8 bits of grey or RGB."""


def image_changes(data: DataConfig, train: TrainConfig) -> list[ImageChange]:
    """List the augmentations of an image of the final size, in order.

    They draw from the generators of Python, numpy and torch.

    If RandAugment and AutoAugment are both on, only RandAugment is applied, as in PaddleViT. Colour jitter is left out
    beside RandAugment, AutoAugment and TrivialAugment, which change colours themselves.
    """
    changes: list[ImageChange] = []
    if not data.is_plain:  # bands have no colours, so only shapes change
        return [rand_augment(data, train, SHAPES)] if train.RAND_AUGMENT else []
    if train.RAND_AUGMENT:
        changes.append(rand_augment(data, train, timm_augment.rand_augment_choices("", increasing=True)))
    elif train.AUTO_AUGMENT:
        changes.append(timm_augment.AutoAugment(timm_augment.auto_augment_policy("original", _options(data))))
    changes += [POLICIES[name](data) for name in train.AUGMENT if name in POLICIES]
    changes_colours = train.RAND_AUGMENT or train.AUTO_AUGMENT or "trivial" in train.AUGMENT
    if train.COLOR_JITTER and not changes_colours:
        strength = train.COLOR_JITTER
        changes.append(v2.ColorJitter(brightness=strength, contrast=strength, saturation=strength))
    own = own_augmentations(train)
    if own:
        from datasets.transforms.own import OwnChange

        changes += map(OwnChange, own)
    return changes


def own_augmentations(train: TrainConfig) -> list[str]:
    """List the names in TRAIN.AUGMENT that files of USE register."""
    return [name for name in train.AUGMENT if name not in POLICIES]


def check_augmentations(train: TrainConfig, data: DataConfig) -> None:
    """Raise UserError for an unknown name in TRAIN.AUGMENT, and for two policies.

    For other images than photographs, warn of the augmentations that are left out.
    """
    policies = [name for name in train.AUGMENT if name in POLICIES]
    if len(policies) > 1:
        raise UserError(f"TRAIN.AUGMENT {', '.join(policies)}: these were never meant to be combined; choose one.")
    for name in train.AUGMENT:
        from utils.own_code import check_name

        check_name("augmentation", name, list(POLICIES))
    if data.is_plain:  # photographs, for which all augmentations are made
        return
    kind = f"images with DATA.IMAGE_CHANNELS {data.IMAGE_CHANNELS} and DATA.BITS {data.BITS}"
    own = own_augmentations(train)
    if own:
        raise UserError(f"TRAIN.AUGMENT {own[0]}: your own augmentations take 8-bit grey or RGB images, not {kind}.")
    # The settings that are on, without RandAugment, of which the operations that change shapes are applied.
    left_out = [key for key in train.single_image_keys if key != "TRAIN.RAND_AUGMENT"]
    if train.RAND_AUGMENT:
        left_out.append(f"TRAIN.RAND_AUGMENT but for {', '.join(SHAPES)}")
    if left_out:
        warn_once(f"Left out, because {kind} have no such colours: {'; '.join(left_out)}.")


def affine_change(data: DataConfig) -> ImageChange:
    """Make the random affine transform of single images, by DATA.SHIFT, ZOOM and ROTATE."""
    affine = v2.RandomAffine(
        degrees=(-data.ROTATE, data.ROTATE),
        translate=(data.SHIFT, data.SHIFT),
        scale=(1 - data.ZOOM, 1 + data.ZOOM),
        interpolation=InterpolationMode.BILINEAR,
    )
    return v2.RandomApply([affine], p=data.AFFINE_PROB)


def rand_augment(data: DataConfig, train: TrainConfig, names: Iterable[str]) -> ImageChange:
    """Make RandAugment with timm's operations of these names. Posterising never gets 0 bits; see `_posterize`."""
    operations = timm_augment.rand_augment_ops(
        magnitude=train.RAND_AUGMENT_MAGNITUDE, prob=PROBABILITY, hparams=_options(data), transforms=list(names)
    )
    for operation in operations:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return timm_augment.RandAugment(operations, train.RAND_AUGMENT_LAYERS)


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Posterize to at least 1 bit: at high magnitudes timm asks for 0, a black image, which Pillow 13 rejects."""
    return ImageOps.posterize(image, max(1, bits_to_keep))


def _options(data: DataConfig, spread: float = MAGNITUDE_SPREAD) -> dict[str, Any]:
    """Return the options of timm's operations: colour of uncovered corners, interpolation, spread of magnitudes."""
    # Bands are augmented one by one, after their mean is subtracted: so 0 is their mean.
    fill = mean_colour(data) if data.is_plain else (0,)
    has_one_channel = len(fill) == 1 or data.IMAGE_CHANNELS == 1
    return {
        "img_mean": fill[0] if has_one_channel else fill,
        "interpolation": Image.Resampling[data.INTERPOLATION.upper()],
        "magnitude_std": spread,
    }


def _trivial(data: DataConfig) -> ImageChange:
    fill = list(mean_colour(data)[: data.IMAGE_CHANNELS])
    return v2.TrivialAugmentWide(interpolation=InterpolationMode(data.INTERPOLATION), fill=fill)


POLICIES: dict[str, Callable[[DataConfig], ImageChange]] = {
    "trivial": _trivial,
    "three": lambda data: timm_augment.AutoAugment(timm_augment.auto_augment_policy("3a", _options(data, spread=0.0))),
}
"""Values of TRAIN.AUGMENT -> what makes them; all other values are the user's own"""
