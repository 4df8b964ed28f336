"""The settings of the section DATA."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from utils.config.fields import TRAINING, Section, excludes, needs, only_with, overridden_by, setting
from utils.config.kinds import (
    AUTO,
    Background,
    Columns,
    Count,
    Fold,
    FoldText,
    Fraction,
    FractionBelowOne,
    FractionsAboveZero,
    NonNegative,
    NumbersAboveZeroOrAuto,
    NumbersOrAuto,
    Positive,
    PositiveOrAuto,
    PositiveUnlessAuto,
    RangeOrAuto,
    Ratios,
    SizeOrAuto,
    as_integer,
    read_fold,
)
from vitamp.metrics import ONE_LABEL, SEVERAL_LABELS, TaskKind
from vitamp.sizes import MOST_BYTES, sides

DropLast = Annotated[
    Literal["batch", "update"] | bool, AfterValidator(lambda value: "batch" if value is True else value)
]
Bits = Annotated[Literal[8, 16, "float"], BeforeValidator(as_integer)]
_RANDOM = only_with("DATA.CROP=random")
_CROPPED = overridden_by("DATA.CROP=none")
_MIXING = ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX")


class DataConfig(Section):
    """Source of the samples, decoding and augmentation."""

    BATCH_SIZE: PositiveOrAuto = setting(
        256,
        "Images per process and micro-batch; auto: as many as fit into memory, see docs/performance.md.",
        excludes("DIST.STRATEGY=fsdp", at="auto", why="the search does not support FSDP", do="give a number"),
        excludes(*_MIXING, at="1", when=TRAINING, why="mixup and CutMix mix images of a batch", do="use 2 or more"),
    )
    BATCH_SIZE_EVAL: PositiveUnlessAuto = setting(None, "Images per process in validation; null or auto: BATCH_SIZE.")
    DATA_PATH: str | None = setting(
        None, "Folder of the data set; a csv file, or the URL of tar files, also works.", decides="source"
    )
    DATASET: str = setting(
        "imagenet2012",
        "A data set or layout (docs/data.md); not set: recognised in DATA_PATH; the default if that is missing.",
        decides="source",
    )
    COLUMNS: Columns | None = setting(
        None, "Columns of a csv table: file=NAME,label=NAME (docs/data.md).", decides="images"
    )
    IMAGE_SIZE: SizeOrAuto = setting(
        224,
        "Side of the model's input in pixels, or [height, width] (docs/data.md); auto: of the weights, or the "
        "median image (docs/small_images.md).",
        decides="weights|patches",
    )
    IMAGE_CHANNELS: Positive = setting(3, "3 for RGB, 1 for grey; others for files of so many bands (docs/bands.md).")
    BITS: Bits = setting(8, "Bits of a stored value; with 16 and float, none of them is lost (docs/bands.md).")
    RANGE: RangeOrAuto = setting(
        None,
        "Stored values that become 0 and 1; auto: measured; null: 0 and 255, 0 and 65535; 0 and 1 of floats.",
        decides="input",
    )
    CROP_PCT: float = setting(
        0.875, "Validation: centre crop as a fraction of the short side.", _CROPPED, decides="input", gt=0, le=2
    )
    CROP_MODE: Literal["center", "squash", "border"] = setting(
        "center",
        "Validation, what is resized to IMAGE_SIZE / CROP_PCT: the short side; squash: both sides; border: the long "
        "side, with IMAGENET_MEAN around. Then the centre is cropped.",
        _CROPPED,
        decides="input",
    )
    NUM_WORKERS: int | None = setting(
        None, "Loading processes per rank; null: one per core that it has, at most 16; see THREADS.", ge=0, le=1024
    )
    IMAGENET_MEAN: NumbersOrAuto = setting(
        (0.5, 0.5, 0.5),
        "Mean for normalisation, subtracted from images scaled to 0..1; auto: docs/bands.md.",
        decides="input",
    )
    IMAGENET_STD: NumbersAboveZeroOrAuto = setting(
        (0.5, 0.5, 0.5), "Standard deviation for normalisation, or auto.", decides="input"
    )
    SAMPLER: Literal["shuffle", "balanced", "by_machine"] = setting(
        "shuffle",
        "Training: shuffle: no image twice in an epoch. balanced: each class equally often, in an epoch of the "
        "same length; images of rare classes repeat, each time with a new augmentation. by_machine: as shuffle, but "
        "each machine reads tar files of its own (docs/shards.md).",
        needs("DATA.DATASET=shards|hf:*", at="by_machine", when=TRAINING, why="only tar files are shared out so"),
        excludes(
            "DATA.MULTI_LABEL",
            at="balanced",
            why="an image of one label has others",
            do="use TRAIN.CLASS_WEIGHTS=balanced",
        ),
    )
    DROP_LAST: DropLast = setting(
        "batch", "An incomplete end of an epoch to drop: batch (or true): micro-batch; update: update; false: nothing."
    )
    CROP: Literal["random", "pad", "none"] = setting(
        "random",
        "Training: random: by CROP_SCALE and CROP_RATIO. pad: squash to IMAGE_SIZE, pad by 4 pixels, crop at random. "
        "none: squash to IMAGE_SIZE, in validation too.",
        decides="evaluation",
    )
    CROP_SCALE: FractionsAboveZero = setting((0.05, 1.0), "Training: smallest and largest area of a crop.", _RANDOM)
    CROP_RATIO: Ratios = setting(
        (0.75, 4 / 3), "Training: smallest and largest width / height of a crop, times that of IMAGE_SIZE.", _RANDOM
    )
    FLIP: Fraction = setting(0.5, "Training: probability of a horizontal flip.")
    VERTICAL_FLIP: Fraction = setting(0.0, "Training: probability of a vertical flip, as for aerial images.")
    INTERPOLATION: Literal["bicubic", "bilinear"] = setting(
        "bicubic", "Interpolation when images are resized.", decides="input"
    )
    SHIFT: Fraction = setting(0.0, "Training: largest random shift, as a fraction of width and height.")
    ZOOM: FractionBelowOne = setting(0.0, "Training: largest random change of scale; 0.1 means 90 % to 110 %.")
    ROTATE: float = setting(0.0, "Training: largest random rotation, in degrees.", ge=0, le=180)
    AFFINE_PROB: Fraction = setting(
        1.0, "Training: probability that a sample is changed so.", only_with("DATA.SHIFT", "DATA.ZOOM", "DATA.ROTATE")
    )
    REPEATED_AUGMENT: Positive = setting(1, "Copies of a sample per epoch, which stays as long; each is augmented.")
    SYNTHETIC_TRAIN: Positive = setting(12800, "Data set 'synthetic': number of training images.")
    SYNTHETIC_VAL: Positive = setting(1280, "Data set 'synthetic': number of validation images.")
    VAL_FRACTION: Annotated[float, Field(gt=0, lt=1)] = setting(
        0.1,
        "Fraction of each class that validates, if the data set has no such split; digits always uses 0.2.",
        overridden_by("DATA.FOLD", why="its fold is the validation split"),
        decides="random split",
    )
    PART: Literal["auto", "train", "val", "test", "all"] = setting(
        "auto",
        "Split that -eval evaluates; auto: val, or all of data that the model did not train on and that is not split.",
        needs("EVAL=true", at="train|test|all", why="training uses val", do="add -eval, or leave DATA.PART out"),
        decides="one start",
    )
    FOLD: FoldText = setting(
        None,
        "Cross-validation: validate on fold K of N folds; null: the data set's split, else one by VAL_FRACTION.",
        decides="split",
    )
    GROUP: str | None = setting(
        None,
        "Keeps images of a group, such as a patient or a video, on one side of the split by VAL_FRACTION or FOLD, and "
        "of folds for probes. A column of a csv table; else name (the file's name without its last number), name_start "
        "(up to the first -, _ or blank), or a regular expression that finds the group in each path.",
        decides="split",
    )
    KEEP_TEST: bool = setting(
        False,
        "Without a split val, keep test for the end, and take VAL_FRACTION or FOLD of train for validation.",
        decides="split",
    )
    SPLIT_SEED: Count = setting(
        0, "Seed of the split by VAL_FRACTION and of the folds; independent of SEED.", decides="random split"
    )
    MULTI_LABEL: bool = setting(False, "Images may have several labels, or none (a csv table; docs/several_labels.md).")
    DOWNLOAD: bool = setting(False, "Download the data set into DATA_PATH if it is missing.")
    CHECK: Literal["quick", "full", "off"] = setting(
        "quick", "Report classes, copies in both splits and odd images: quick: within seconds; full: of all images."
    )
    EXCLUDE: str | None = setting(
        None, "File with images to leave out, one per line; scripts/check_data.py writes it.", decides="images"
    )
    RELABEL: str | None = setting(
        None,
        "Table of training images to leave out or to train with another label; see docs/broken_images.md.",
        decides="training images",
    )
    MAX_BAD: NonNegative = setting(0.01, "Stop at more unreadable training images: below 1 a fraction, else a number.")
    MAX_IMAGE_BYTES: Positive = setting(
        MOST_BYTES,
        "Most bytes of an image's pixels, by its header; a larger image is unreadable. A pixel of a photograph or of "
        "DICOM counts 8.",
    )
    BACKGROUND: Background = setting(
        "white",
        "Colour behind transparent pixels: a name, mean (IMAGENET_MEAN) or [r, g, b]; drop: transparency is ignored.",
        decides="evaluation",
    )
    EXIF_ROTATE: bool = setting(
        False, "Rotate photographs as their EXIF data says.", only_with("DATA.BITS=8"), decides="evaluation"
    )
    CACHE: str | None = setting(
        None, "Folder for compiled code, features and downloaded data; null: ~/.cache/vitamp.", decides="nothing"
    )
    CACHE_GB: NonNegative = setting(50, "Most gigabytes of tar files at a URL that are kept in CACHE; 0: none.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the model's input."""
        return self.IMAGE_CHANNELS, *sides(self.IMAGE_SIZE)

    @property
    def val_batch(self) -> int:
        """Images per process in validation; 64 if it is `auto`, and no training has replaced that by a number."""
        batch_size = self.BATCH_SIZE_EVAL or self.BATCH_SIZE
        return 64 if batch_size == AUTO else int(batch_size)

    @property
    def is_plain(self) -> bool:
        """Whether images are RGB or grey with 8 bits, so that all decoders and augmentations take them."""
        return self.BITS == 8 and self.IMAGE_CHANNELS in (1, 3)

    @property
    def value_range(self) -> tuple[float, float]:
        """The stored values that are scaled to 0 and 1."""
        if self.RANGE:
            return self.RANGE
        largest = 1.0 if self.BITS == "float" else 2.0**self.BITS - 1
        return 0.0, largest

    @property
    def task(self) -> TaskKind:
        return SEVERAL_LABELS if self.MULTI_LABEL else ONE_LABEL

    @property
    def has_affine(self) -> bool:
        """Whether SHIFT, ZOOM or ROTATE has any effect."""
        return self.AFFINE_PROB > 0 and (self.SHIFT > 0 or self.ZOOM > 0 or self.ROTATE > 0)

    @property
    def fold(self) -> Fold | None:
        """The fold to validate on; None without cross-validation."""
        return None if self.FOLD is None else read_fold(self.FOLD)
