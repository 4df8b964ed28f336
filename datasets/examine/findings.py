"""Findings about the images of a data set: their kinds, one finding about an image, and all findings together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from datasets.base import Samples
from datasets.decoding import Header
from datasets.examine.names import companions_of, series_of
from datasets.examine.trust import Doubt
from datasets.labels import ANY_LABEL, distinct_names, images_of_classes
from utils.config.data import DataConfig
from utils.statistics.proportions import Interval

FEW = 5
"""Training images below which a class is called tiny"""
TIMES_LARGER = 4
"""An image whose shorter side is so many times the median is called much larger, if few images are"""
PIXELS = "pixels"
"""`Finding.kind` of a copy that has the same pixels in other bytes"""


class Kind(NamedTuple):
    """Kind of finding: a defect, or a note."""

    name: str
    """Its key in the file of -json"""
    heading: str
    """Its description in the report"""
    defect: bool = False
    """Whether it spoils training or its metrics; a note does not"""

    @property
    def title(self) -> str:
        return f"DEFECT: {self.heading}" if self.defect else f"note: {self.heading}"


UNREADABLE = Kind("unreadable", "cannot be read", defect=True)
DAMAGED = Kind("damaged_but_readable", "damaged, although they can be read", defect=True)
LABELS = Kind("label_out_of_range", "labels out of range", defect=True)
EMPTY_CLASSES = Kind("empty_classes", "classes without training images", defect=True)
DUPLICATES = Kind("duplicate", "duplicates within a split", defect=True)
OVERLAP = Kind("in_both_parts", "in two splits (training images in another, or validation images in test)", defect=True)
CONFLICTS = Kind("conflicting_labels", "the same image with different labels", defect=True)
NEAR_OVERLAP = Kind("nearly_in_both_parts", "nearly the same in two splits (encoded again, resized)", defect=True)
NEAR_CONFLICTS = Kind(
    "nearly_the_same_with_conflicting_labels",
    "nearly the same with different labels: one is wrong, unless classes differ in details",
    defect=True,
)
DUPLICATES_OF_OTHERS = DUPLICATES._replace(defect=False)
"""Duplicates in validation and test count twice in the metrics, but spoil no training"""
UNVALIDATED = Kind("classes_without_validation_images", "classes without validation images")
TINY = Kind("tiny_classes", f"classes with fewer than {FEW} training images")
SMALL = Kind("smaller_than_image_size", "smaller than IMAGE_SIZE; enlarged when read")
MODES = Kind("not_plain", "colours are converted when read (transparent parts become DATA.BACKGROUND)")
BLANK = Kind("blank_bands", "bands that are blank")
UNLIKE = Kind("in_another_format", "perhaps placeholders: in another format than nearly all others")
LARGE = Kind("much_larger", f"at least {TIMES_LARGER} times as large as most others")
TURNED = Kind(
    "to_be_turned", "to be turned by their EXIF data, but read as they are stored; DATA.EXIF_ROTATE=true turns them"
)
SHORTCUTS = Kind("shortcuts", "classes that the file shows nearly without mistakes, without its picture", defect=True)
LESSER_SHORTCUTS = Kind(
    "perhaps_shortcuts", "classes partly recognised without the picture, or by a simple property of it"
)
SOURCES = Kind("of_another_source", "properties (format, colours, size) that a split lacks, perhaps of another source")
NEAR_DUPLICATES = Kind("nearly_duplicate", "nearly the same within a split")
FLAT_IMAGES = Kind("of_one_colour", "almost of one colour; if they should not be, see DATA.BACKGROUND")


class Scan(NamedTuple):
    """Result of looking at one image: only its header before training, all fields once check_data.py has decoded it."""

    header: Header
    problem: str = ""
    """Kind of problem in a word, such as missing; '' if the image can be read"""
    reason: str = ""
    """Message about the problem"""
    digest: bytes = b""
    """Hash of the bytes; b'' if they cannot be read"""
    same: bytes = b""
    """Hash of the pixels, or of the bytes if all pixels have one colour; b'' if the image cannot be read"""
    damage: str = ""
    """The decoder's warning about an image that it could read all the same; '' if there is none"""
    thumbnail: bytes = b""
    """Pixels of the whole image, channels x SIDE x SIDE; b'' if it cannot be read"""


@dataclass
class Split:
    """Split of a data set with the scans of its images."""

    title: str
    """training, validation or test"""
    samples: Samples
    scans: list[Scan] = field(default_factory=list)
    """One scan per image; empty if check_data.py has not scanned them"""

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, each different; empty if the data set has none."""
        return distinct_names(self.samples.classes or ())

    def images(self) -> Iterator[Image]:
        """Yield each scanned image."""
        return (Image(self, index, scan) for index, scan in enumerate(self.scans))


class Image(NamedTuple):
    """Image of a split, with what was read of it."""

    split: Split
    index_in_split: int
    """Its index in `split.samples`"""
    scan: Scan

    @property
    def header(self) -> Header:
        return self.scan.header

    @property
    def name(self) -> str:
        return self.split.samples.name(self.index_in_split)

    @property
    def group(self) -> str:
        """Its group (DATA.GROUP); '' without groups."""
        groups = self.split.samples.groups
        return groups[self.index_in_split] if groups else ""

    @property
    def label(self) -> str:
        """Name of its class, of all its classes as in `cat;dog`, or `label 3` where a class has no name."""
        label = self.split.samples.labels[self.index_in_split]
        names = self.split.class_names
        classes = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(label).tolist()
        words = [names[number] if 0 <= number < len(names) else f"label {number}" for number in classes]
        return ";".join(words) or "no label"


class Finding(NamedTuple):
    """Defect of one image, or a note about it."""

    split: str
    """Title of its split"""
    name: str
    """Name of the image"""
    description: str
    kind: str = ""
    """Kind of problem if the image is unreadable; PIXELS for a copy in other bytes; '' for all else"""
    copy_of: str = ""
    """Name of the image that it is a copy of; '' if it is no copy"""
    contradicts: bool = False
    """Whether it is a copy of an image in another split that has another label there"""


@dataclass
class Copies:
    """Copies in one split (validation or test) of images in another split (training or validation).

    The keys in data.json are the names of these fields, which say validation and training for any two splits.
    """

    found: int
    """Images of the first split whose bytes are those of an image in the second"""
    compared: int
    """Images of the first split that were compared with all images of their size in the second"""
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Name of a copy in the first split, and of its original in the second"""
    relabelled: int = 0
    """Copies whose label differs from that of their original"""
    training: int = 0
    """Images of the second split that were compared; fewer than all if the time was too short"""
    images: list[int] = field(default_factory=list)
    """Indices of the copies in the first split"""


@dataclass
class Shortcut(Doubt):
    """Properties that recognise classes without the picture, by a small classifier."""

    properties: str = ""
    """Name of their group"""
    of_file: bool = True
    """Whether they are of the file alone; else they may be what the images show, or do no harm"""
    nearly_all: bool = False
    """Whether they are of the file alone, and separate nearly all images of a class from nearly all others"""
    classes: dict[str, float] = field(default_factory=dict)
    """Class -> percent of its training images that are recognised, in folds; the clearest class first"""
    interval: Interval | None = None
    """The 95 % interval of the percentage of the clearest class"""
    mistaken: float = 0.0
    """Percent of the other training images that are mistaken for the clearest class"""
    fact: str = ""
    """The single property that separates the clearest class best from others, such as size 1024 x 1024"""
    fact_counts: list[int] = field(default_factory=list)
    """Training images of the clearest class that have it, and all of this class; others that have it, and all others"""
    top1: float = 0.0
    """Percent of all training images whose class is recognised, in folds"""
    top1_interval: Interval | None = None
    in_validation: bool = False
    """Whether they recognise the clearest class in the validation split, too"""
    validation_top1: float | None = None
    """Percent of validation images whose class is recognised; None if none were looked at"""
    validation_interval: Interval | None = None
    misled: list[int] = field(default_factory=list)
    """Indices of the validation images whose class they do not recognise: only knowledge of the picture can"""


@dataclass
class Findings:
    """All findings about a data set. The fields are the keys of data.json; dictionaries are by title of the split."""

    images: dict[str, int]
    """Number of images in each split"""
    classes: dict[str, dict[str, int]]
    """Number of images of each class, in each split"""
    largest_class_percent: float | None = None
    """Top-1 of always guessing the most frequent class of the validation split; None with several labels"""
    copies: Copies | None = None
    """Copies of training images in validation; None if they were not searched for"""
    copies_in_test: dict[str, Copies] = field(default_factory=dict)
    """Copies in the test split of images in each other split"""
    companions: str = ""
    """Sentence saying that images may be masks of others, judging by their names; '' if none seem to be"""
    series: str = ""
    """Sentence saying that images of one group, or perhaps of one thing, are in several splits; '' if none are.

    With DATA.GROUP, another sentence says that images of one group have different labels.
    """
    series_advice: str = ""
    """What to do about images that are perhaps of one thing, with an example"""
    series_group: str = ""
    """The value of DATA.GROUP that keeps them together"""
    namesakes: list[int] = field(default_factory=list)
    """Indices of the validation images whose names say that they may show one thing with training images"""
    alike: list[int] = field(default_factory=list)
    """Validation images that look like a training image, as edited copies do, and those compared; empty if unknown"""
    related: list[int] = field(default_factory=list)
    """Indices of the validation images with a relative in training: a copy, an image of their group, a look-alike"""
    looked_at: int = 0
    """Number of images whose headers were read"""
    unlike: list[str] = field(default_factory=list)
    """Name and format of each image whose format few others have"""
    modes: dict[str, int] = field(default_factory=dict)
    """Number of images of each colour mode that is converted when read"""
    shorter: int = 0
    """Median of the images' shorter sides, in pixels"""
    turned: int = 0
    """Number of images to be turned by their EXIF data"""
    shortcuts: list[Shortcut] = field(default_factory=list)
    """Properties that recognise classes without the picture"""

    def __post_init__(self) -> None:
        # These are no fields, so data.json lacks them.
        self.by_kind = defaultdict[Kind, list[Any]](list)
        """The findings of each kind: a `Finding` per image, or a string about a class or a property"""
        self.unlabelled = dict[str, int]()
        """Number of images without a label in each split; empty unless the data set has several labels per image"""

    @classmethod
    def of(cls, splits: Mapping[str, Samples], data: DataConfig, unnamed: str, num_classes: int = ANY_LABEL) -> Self:
        """Start the findings with what the labels and names of the images show, without reading images.

        `unnamed` is the prefix of labels of classes without names. Labels from `num_classes` on are out of range.
        """
        series = series_of(splits, data)
        return cls(
            images={title: len(samples) for title, samples in splits.items()},
            classes=_images_by_class(splits, unnamed, num_classes),
            companions=companions_of(splits),
            series=series.sentence,
            series_advice=series.advice,
            series_group=series.group,
            namesakes=list(series.namesakes),
        )

    def add(self, kind: Kind, image: Image, description: str, problem: str = "") -> None:
        """Add a finding about an image. `problem` is the kind of problem of an unreadable image."""
        self.by_kind[kind].append(Finding(image.split.title, image.name, description, problem))

    def of_kinds(self, defects: bool) -> dict[Kind, list[Any]]:
        """Return the findings of all kinds of defects, or of all kinds of notes."""
        return {kind: findings for kind, findings in self.by_kind.items() if kind.defect == defects}

    @property
    def clean(self) -> bool:
        """Whether there is no defect."""
        return not any(self.of_kinds(defects=True).values())

    @property
    def unvalidated(self) -> list[str]:
        """Names of the classes that have training images, but no validation images."""
        training = self.classes.get("training", {})
        validation = self.classes.get("validation", {})
        return [name for name, count in validation.items() if not count and training.get(name)]

    def pairs(self) -> list[tuple[str, str, Copies]]:
        """Return each search for copies: the split of the copies, the split of the originals, and the copies.

        Empty if no copies were searched for.
        """
        if self.copies is None:
            return []
        with_test = [("test", title, copies) for title, copies in self.copies_in_test.items()]
        return [("validation", "training", self.copies), *with_test]


def _images_by_class(splits: Mapping[str, Samples], unnamed: str, num_classes: int) -> dict[str, dict[str, int]]:
    """Count the images of each class in each split. Returns title of the split -> name of the class -> number.

    A class is called by its name; if two classes have the same name, the label is added to it. If the data set has no
    names, they are made of the prefix `unnamed` and the label, for labels from 0 to the largest one below
    `num_classes`. Other labels are counted as `label 7`.
    """
    first_split = next(iter(splits.values()))
    several_labels = first_split.labels.ndim == 2
    names = distinct_names(first_split.classes or ())
    if not names:
        largest_of_splits = (
            samples.labels[samples.labels < num_classes].max(initial=-1) for samples in splits.values()
        )
        largest = max(largest_of_splits)
        number_of_classes = first_split.labels.shape[1] if several_labels else int(largest) + 1
        names = [f"{unnamed}{label}" for label in range(number_of_classes)]

    images_by_class = {title: dict.fromkeys(names, 0) for title in splits}
    for title, samples in splits.items():
        if several_labels:
            counts = enumerate(images_of_classes(samples.labels, len(names)))
        else:
            counts = zip(*np.unique(samples.labels, return_counts=True), strict=True)
        for label, count in counts:
            name = names[label] if 0 <= label < len(names) else f"label {label}"
            images_by_class[title][name] = int(count)
    return images_by_class
