"""The settings of the section DATA."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section, with_retired
from utils.config.kinds import (
    Count,
    Fraction,
    FractionBelowOne,
    NonNegative,
    Numbers,
    Pair,
    Positive,
    PositiveOrAuto,
    PositiveUnlessAuto,
    as_integer,
)


class DataConfig(Section):
    """Source of the samples, decoding and augmentation."""

    BATCH_SIZE: PositiveOrAuto = Field(
        default=256, description="Images per process and micro-batch; auto: as many as fit, see docs/performance.md."
    )
    BATCH_SIZE_EVAL: PositiveUnlessAuto = Field(
        default=None, description="Images per process in validation; null or auto: BATCH_SIZE."
    )
    DATA_PATH: str | None = Field(default=None, description="Folder of the data set.")
    DATASET: str = Field(default="imagenet2012", description="Name of a data set or of a layout; see docs/data.md.")
    IMAGE_SIZE: Positive = Field(default=224, description="Height and width of the model's input, in pixels.")
    IMAGE_CHANNELS: Annotated[Literal[1, 3], BeforeValidator(as_integer)] = Field(
        default=3, description="3 for RGB, 1 for grey."
    )
    CROP_PCT: float = Field(
        default=0.875, gt=0, le=1, description="Validation: fraction of the resized image that the centre crop keeps."
    )
    NUM_WORKERS: Count | None = Field(
        default=None,
        description="Loading processes per rank; null: from the number of cores, or a container's CPU quota.",
    )
    IMAGENET_MEAN: Numbers = Field(
        default=(0.5, 0.5, 0.5), description="Mean for normalisation, subtracted from images scaled to 0..1."
    )
    IMAGENET_STD: Numbers = Field(default=(0.5, 0.5, 0.5), description="Standard deviation for normalisation.")
    DROP_LAST: bool = Field(default=True, description="Drop the last micro-batch of an epoch if it is incomplete.")
    CROP: Literal["random", "pad", "none"] = Field(
        default="random",
        description=(
            "Training: random: a random crop by CROP_SCALE and CROP_RATIO. pad: resize to IMAGE_SIZE, pad by "
            "CROP_PAD, crop at random. none: resize to IMAGE_SIZE without keeping the aspect ratio, in "
            "validation too."
        ),
    )
    CROP_PAD: Count = Field(default=4, description="Training: width of the black padding of CROP: pad, in pixels.")
    CROP_SCALE: Pair = Field(
        default=(0.05, 1.0),
        description="Training: smallest and largest area of the random crop, as fractions of the image.",
    )
    CROP_RATIO: Pair = Field(
        default=(0.75, 4 / 3),
        description="Training: smallest and largest aspect ratio (width / height) of the random crop.",
    )
    FLIP: Fraction = Field(default=0.5, description="Training: probability of a horizontal flip.")
    INTERPOLATION: Literal["bicubic", "bilinear"] = Field(
        default="bicubic", description="Interpolation when images are resized."
    )
    SHIFT: Fraction = Field(default=0.0, description="Training: largest random shift, as a fraction of the image.")
    ZOOM: FractionBelowOne = Field(
        default=0.0, description="Training: largest random change of scale; 0.1 means 90 % to 110 %."
    )
    ROTATE: float = Field(default=0.0, ge=0, le=180, description="Training: largest random rotation, in degrees.")
    AFFINE_PROB: Fraction = Field(
        default=1.0, description="Training: probability that SHIFT, ZOOM and ROTATE are applied to a sample."
    )
    REPEATED_AUGMENT: Positive = Field(
        default=1,
        description=(
            "Repeated augmentation: copies of a sample per epoch, each augmented differently; an epoch has "
            "as many samples as without."
        ),
    )
    SYNTHETIC_TRAIN: Positive = Field(default=12800, description="Data set 'synthetic': number of training images.")
    SYNTHETIC_VAL: Positive = Field(default=1280, description="Data set 'synthetic': number of validation images.")
    VAL_FRACTION: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Fraction of the images used for validation, if the data set has no validation split.",
    )
    SPLIT_SEED: Count = Field(default=0, description="Seed of the split by VAL_FRACTION; independent of SEED.")
    DOWNLOAD: bool = Field(default=False, description="Download the data set into DATA_PATH if it is missing.")
    EXCLUDE: str | None = Field(
        default=None, description="File with images to leave out, one per line; scripts/check_data.py writes it."
    )
    MAX_BAD: NonNegative = Field(
        default=0.01,
        description="Stop when more training images than this are unreadable: a fraction below 1, or a number.",
    )
    DECODER: Literal["auto", "simplejpeg", "pil"] = with_retired(
        "auto",
        "Decoder of JPEG files; auto: simplejpeg. PIL decodes all other files.",
        {"nvimgcodec": "it was not faster than simplejpeg, and decoded the same pixels"},
    )
    DCT_SCALE: bool = Field(
        default=False,
        description="Decode JPEG files at half the size or less, if the crop is at least twice IMAGE_SIZE.",
    )
    EXIF_ROTATE: bool = Field(default=False, description="Rotate photographs as their EXIF data says.")
    SHARD_WINDOW: Positive = Field(
        default=8, description="Data set 'shards': number of tar files whose samples are shuffled together."
    )
    CACHE: str | None = Field(
        default=None,
        description=(
            "Folder for files that are prepared once and cannot be stored beside the data; null: ~/.cache/vitamp."
        ),
    )
