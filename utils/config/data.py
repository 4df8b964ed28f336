"""The settings of the section DATA."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section, with_retired
from utils.config.kinds import (
    Count,
    Fraction,
    NonNegative,
    Numbers,
    Pair,
    Positive,
    PositiveOrAuto,
    PositiveUnlessAuto,
    Rate,
    as_integer,
)


class DataConfig(Section):
    """Where samples come from and how they reach the model."""

    BATCH_SIZE: PositiveOrAuto = Field(
        default=256, description="Images per process and micro-batch; auto: as many as fit, see docs/performance.md."
    )
    BATCH_SIZE_EVAL: PositiveUnlessAuto = Field(
        default=None, description="The same for validation; null or auto: BATCH_SIZE."
    )
    DATA_PATH: str | None = Field(default=None, description="Folder the data set lies in.")
    DATASET: str = Field(default="imagenet2012", description="Name of the data set's layout; see docs/data.md.")
    IMAGE_SIZE: Positive = Field(default=224, description="Height and width of what the model sees, in pixels.")
    IMAGE_CHANNELS: Annotated[Literal[1, 3], BeforeValidator(as_integer)] = Field(
        default=3, description="3 for RGB, 1 for grey."
    )
    CROP_PCT: float = Field(
        default=0.875, gt=0, le=1, description="Validation: share of the resized image that is kept."
    )
    NUM_WORKERS: Count | None = Field(
        default=None, description="Loading processes per rank; null: by the cores, or a container's CPU quota."
    )
    IMAGENET_MEAN: Numbers = Field(default=(0.5, 0.5, 0.5), description="Subtracted from images scaled to 0..1.")
    IMAGENET_STD: Numbers = Field(default=(0.5, 0.5, 0.5), description="Divides them afterwards.")
    DROP_LAST: bool = Field(default=True, description="Drop a last micro-batch that is not full.")
    CROP: Literal["random", "pad", "none"] = Field(
        default="random",
        description=(
            "Training: random: by CROP_SCALE and CROP_RATIO. pad: squeezed to IMAGE_SIZE, a margin of CROP_PAD added, "
            "cut out anywhere. none: squeezed to IMAGE_SIZE, in validation too."
        ),
    )
    CROP_PAD: Count = Field(default=4, description="Training: width of the black margin of CROP: pad, in pixels.")
    CROP_SCALE: Pair = Field(
        default=(0.05, 1.0), description="Training: area of the random crop, as a share of the image."
    )
    CROP_RATIO: Pair = Field(default=(0.75, 4 / 3), description="Training: width to height of the random crop.")
    FLIP: Fraction = Field(default=0.5, description="Training: probability of a horizontal flip.")
    INTERPOLATION: Literal["bicubic", "bilinear"] = Field(default="bicubic", description="How images are resized.")
    SHIFT: Fraction = Field(default=0.0, description="Training: greatest random shift, as a share of the image.")
    ZOOM: Rate = Field(default=0.0, description="Training: greatest random change of scale; 0.1 is 90 % to 110 %.")
    ROTATE: float = Field(default=0.0, ge=0, le=180, description="Training: greatest random rotation in degrees.")
    AFFINE_PROB: Fraction = Field(default=1.0, description="Probability that SHIFT, ZOOM and ROTATE act on a sample.")
    REPEATED_AUGMENT: Positive = Field(
        default=1, description="Times a sample stands in an epoch, each time augmented anew; the length stays."
    )
    SYNTHETIC_TRAIN: Positive = Field(default=12800, description="Data set 'synthetic': training images.")
    SYNTHETIC_VAL: Positive = Field(default=1280, description="Data set 'synthetic': validation images.")
    VAL_FRACTION: float = Field(
        default=0.1, gt=0, lt=1, description="Validation's share where a data set has no validation part of its own."
    )
    SPLIT_SEED: Count = Field(default=0, description="Seed of that split; it does not depend on SEED.")
    DOWNLOAD: bool = Field(default=False, description="Fetch the data set into DATA_PATH where it is not there yet.")
    EXCLUDE: str | None = Field(
        default=None, description="File that names images to leave out, one a line; scripts/check_data.py writes it."
    )
    MAX_BAD: NonNegative = Field(
        default=0.01,
        description="Stop when more training images than this cannot be read: a share below 1, or a number.",
    )
    DECODER: Literal["auto", "simplejpeg", "pil"] = with_retired(
        "auto",
        "What reads JPEG files; auto: simplejpeg. Everything else is read by PIL.",
        {"nvimgcodec": "it was no faster than simplejpeg, whose pixels it gave"},
    )
    DCT_SCALE: bool = Field(
        default=False, description="Decode JPEG files at a half or less where a crop is at least twice IMAGE_SIZE."
    )
    EXIF_ROTATE: bool = Field(default=False, description="Turn photographs as their EXIF data says.")
    SHARD_WINDOW: Positive = Field(default=8, description="Data set 'shards': tar files whose samples are mixed.")
    CACHE: str | None = Field(
        default=None,
        description="Folder for what is prepared once and cannot lie beside the data; null: ~/.cache/vitamp.",
    )
