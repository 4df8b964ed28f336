"""The settings of the section DATA."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from utils.config.fields import TRAINING, Section, excludes, needs, overridden_by, setting
from utils.config.kinds import (
    Background,
    Count,
    Fold,
    FoldText,
    Fraction,
    FractionBelowOne,
    NonNegative,
    Numbers,
    Pair,
    Positive,
    PositiveOrAuto,
    PositiveUnlessAuto,
    Workers,
    as_integer,
    folded,
    read_fold,
)
from vitamp.metrics import ONE_LABEL, SEVERAL_LABELS, TaskKind


def _true_is_batch(value: str | bool) -> str | bool:
    return "batch" if value is True else value


def _false_is_off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else folded(value)


DropLast = Annotated[Literal["batch", "update"] | bool, BeforeValidator(folded), AfterValidator(_true_is_batch)]


class DataConfig(Section):
    """Source of the samples, decoding and augmentation."""

    BATCH_SIZE: PositiveOrAuto = setting(
        256,
        "Images per process and micro-batch; auto: as many as fit into memory, see docs/performance_settings.md.",
        excludes(
            "DIST.STRATEGY=fsdp",
            at="auto",
            why="the search for a batch size does not support FSDP",
            do="give a number",
        ),
        excludes(
            *("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX"),
            at="1",
            when=TRAINING,
            why="mixup and CutMix mix images of a batch",
            do="use 2 or more",
        ),
    )
    BATCH_SIZE_EVAL: PositiveUnlessAuto = setting(None, "Images per process in validation; null or auto: BATCH_SIZE.")
    DATA_PATH: str | None = setting(None, "Folder of the data set; a csv file, or the URL of tar files, also works.")
    DATASET: str = setting(
        "imagenet2012",
        "Name of a data set or layout (docs/datasets.md). If it is not set, the layout of DATA_PATH is recognised; the "
        "default applies only if DATA_PATH is not set or does not exist.",
    )
    IMAGE_SIZE: PositiveOrAuto = setting(
        224,
        "Height and width of the model's input, in pixels; auto: that of the pretrained weights, or without any the "
        "median of the training images, within 32 to 96 (docs/small_images.md).",
    )
    IMAGE_CHANNELS: Annotated[Literal[1, 3], BeforeValidator(as_integer)] = setting(3, "3 for RGB, 1 for grey.")
    CROP_PCT: float = setting(
        0.875, "Validation: side of the centre crop, as a fraction of the image's short side.", gt=0, le=1
    )
    CROP_MODE: Annotated[Literal["center", "squash", "border"], BeforeValidator(folded)] = setting(
        "center",
        "Validation: which side of the image is resized to IMAGE_SIZE / CROP_PCT before the centre is cropped. center: "
        "the short one. squash: both, without keeping the aspect ratio. border: the long one; the rest is filled with "
        "IMAGENET_MEAN.",
    )
    NUM_WORKERS: Workers | None = setting(
        None,
        "Loading processes per rank; null: one per core, at most 16. The cores are those that SLURM reserves per task; "
        "without SLURM, usable cores (a container's CPU quota limits them) / ranks on this machine.",
    )
    IMAGENET_MEAN: Numbers = setting((0.5, 0.5, 0.5), "Mean for normalisation, subtracted from images scaled to 0..1.")
    IMAGENET_STD: Numbers = setting((0.5, 0.5, 0.5), "Standard deviation for normalisation.")
    SAMPLER: Annotated[Literal["shuffle", "balanced"], BeforeValidator(folded)] = setting(
        "shuffle",
        "Training: shuffle: no image twice in an epoch. balanced: each class equally often, in an epoch of the "
        "same length; images of rare classes repeat, each time with a new augmentation.",
        excludes(
            "DATA.MULTI_LABEL",
            why="drawing an image for one of its labels draws the others too",
            do="use TRAIN.CLASS_WEIGHTS=balanced instead",
        ),
    )
    DROP_LAST: DropLast = setting(
        "batch",
        "What to drop at the end of an epoch, if it is incomplete. batch (or true): the last micro-batch. update: the "
        "last update. false: nothing.",
    )
    CROP: Literal["random", "pad", "none"] = setting(
        "random",
        "Training: random: a random crop by CROP_SCALE and CROP_RATIO. pad: resize to IMAGE_SIZE without keeping the "
        "aspect ratio, pad by 4 pixels, crop at random. none: resize in the same way, without a crop, in "
        "validation too.",
    )
    CROP_SCALE: Pair = setting(
        (0.05, 1.0), "Training: smallest and largest area of the random crop, as fractions of the image."
    )
    CROP_RATIO: Pair = setting(
        (0.75, 4 / 3), "Training: smallest and largest aspect ratio (width / height) of the random crop."
    )
    FLIP: Fraction = setting(0.5, "Training: probability of a horizontal flip.")
    INTERPOLATION: Literal["bicubic", "bilinear"] = setting("bicubic", "Interpolation when images are resized.")
    SHIFT: Fraction = setting(0.0, "Training: largest random shift, as a fraction of width and height.")
    ZOOM: FractionBelowOne = setting(0.0, "Training: largest random change of scale; 0.1 means 90 % to 110 %.")
    ROTATE: float = setting(0.0, "Training: largest random rotation, in degrees.", ge=0, le=180)
    AFFINE_PROB: Fraction = setting(1.0, "Training: probability that SHIFT, ZOOM and ROTATE are applied to a sample.")
    REPEATED_AUGMENT: Positive = setting(
        1,
        "Repeated augmentation: copies of a sample per epoch, each augmented differently; the epoch's length "
        "stays the same.",
    )
    SYNTHETIC_TRAIN: Positive = setting(12800, "Data set 'synthetic': number of training images.")
    SYNTHETIC_VAL: Positive = setting(1280, "Data set 'synthetic': number of validation images.")
    VAL_FRACTION: float = setting(
        0.1,
        "Fraction of each class that becomes the validation split, if the data set has none; digits always uses 0.2.",
        overridden_by("DATA.FOLD", why="its fold is the validation split"),
        gt=0,
        lt=1,
    )
    PART: Annotated[Literal["auto", "train", "val", "test", "all"], BeforeValidator(folded)] = setting(
        "auto",
        "Split that -eval evaluates; auto: val, or all images of data that the model was not trained on, if it has no "
        "validation split of its own.",
        needs(
            "EVAL=true",
            at="train|test|all",
            why="training always validates on the validation split",
            do="add -eval, or leave DATA.PART out",
        ),
    )
    FOLD: FoldText = setting(
        None,
        "Cross-validation: validate on fold K of N stratified folds and train on the others; "
        "null: the data set's own validation split, else one by VAL_FRACTION.",
    )
    GROUP: str | None = setting(
        None,
        "Keeps images of a group, such as a patient or a video, on one side of the split by VAL_FRACTION or FOLD. A "
        "column of a csv table, or a regular expression that finds the group in each path.",
    )
    SPLIT_SEED: Count = setting(0, "Seed of the split by VAL_FRACTION and of the folds; independent of SEED.")
    MULTI_LABEL: bool = setting(
        False,
        "An image can have several labels, one or none; they are read from a csv table (docs/several_labels.md).",
    )
    DOWNLOAD: bool = setting(False, "Download the data set into DATA_PATH if it is missing.")
    CHECK: Annotated[Literal["quick", "full", "off"], BeforeValidator(_false_is_off)] = setting(
        "quick",
        "What is said of image files before training: classes, copies of images in both splits, odd images. quick: as "
        "much as a few seconds allow. full: all images. No training changes by it.",
    )
    EXCLUDE: str | None = setting(None, "File with images to leave out, one per line; scripts/check_data.py writes it.")
    MAX_BAD: NonNegative = setting(
        0.01,
        "Stop if more training images than this are unreadable; a value below 1 is a fraction of the training images, "
        "any other a number of images.",
    )
    BACKGROUND: Background = setting(
        "white",
        "Colour behind transparent pixels: white, black, mean (IMAGENET_MEAN) or [r, g, b], each from 0 to 255; drop: "
        "ignore transparency, so that the colours stored under it appear.",
    )
    EXIF_ROTATE: bool = setting(False, "Rotate photographs as their EXIF data says.")
    CACHE: str | None = setting(
        None,
        "Folder for compiled code, for copies of data sets hf:NAME, and for an index of tar files if it cannot be "
        "stored beside them; null: ~/.cache/vitamp.",
    )

    @property
    def task(self) -> TaskKind:
        return SEVERAL_LABELS if self.MULTI_LABEL else ONE_LABEL

    @property
    def fold(self) -> Fold | None:
        """The fold to validate on; None without cross-validation."""
        return None if self.FOLD is None else read_fold(self.FOLD)
