"""Kinds of findings, and what is found in a data set."""

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
from datasets.labels import ANY_LABEL, distinct_names, images_of_classes
from utils.config.data import DataConfig

FEW = 5
"""Training images below which a class is called tiny"""
TIMES_LARGER = 4
"""Side of an image over the median, from which on it is called much larger, if few are"""
PIXELS = "pixels"


class Kind(NamedTuple):
    """Of findings."""

    name: str
    """In -json"""
    heading: str
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
CONFLICTS = Kind("conflicting_labels", "the same bytes with different labels", defect=True)
NEAR_OVERLAP = Kind("nearly_in_both_parts", "nearly the same in two splits (encoded again, resized)", defect=True)
NEAR_CONFLICTS = Kind(
    "nearly_the_same_with_conflicting_labels",
    "nearly the same with different labels: one is wrong, unless classes differ in details",
    defect=True,
)
DUPLICATES_OF_OTHERS = DUPLICATES._replace(defect=False)
"""In validation and test they count twice, but spoil no training."""
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
SOURCES = Kind(
    "of_another_source",
    "properties (format, colours, size) that tell classes or splits apart, perhaps of another source",
)
NEAR_DUPLICATES = Kind("nearly_duplicate", "nearly the same within a split")
FLAT_IMAGES = Kind("of_one_colour", "almost of one colour; if they should not be, see DATA.BACKGROUND")


class Scan(NamedTuple):
    """What is known of one image: before training its header, after check_data.py has decoded it everything."""

    header: Header
    problem: str = ""
    """Kind of problem in a word; '' where the image can be read"""
    reason: str = ""
    digest: bytes = b""
    """Equal for images of equal bytes; b'' where they cannot be read"""
    same: bytes = b""
    """Equal for images of equal pixels too, unless they are of one colour"""
    damage: str = ""
    """The decoder's warning about an image that it could read all the same"""
    thumbnail: bytes = b""
    """Pixels of the whole image, channels x SIDE x SIDE; b'' where it cannot be read"""


@dataclass
class Split:
    """Split of a data set with the scans of its images."""

    title: str
    samples: Samples
    scans: list[Scan] = field(default_factory=list)
    """Of all its images, if they were scanned"""

    @cached_property
    def names(self) -> list[str]:
        """Of the classes, if known"""
        return distinct_names(self.samples.classes or ())

    def images(self) -> Iterator[Image]:
        return (Image(self, number, scan) for number, scan in enumerate(self.scans))


class Image(NamedTuple):
    """An image that was looked at."""

    split: Split
    number: int
    scan: Scan

    @property
    def header(self) -> Header:
        return self.scan.header

    @property
    def name(self) -> str:
        return self.split.samples.name(self.number)

    @property
    def label(self) -> str:
        """The name of the class, or of all of them, as in cat;dog; numbers where classes have no names."""
        label = self.split.samples.labels[self.number]
        names = self.split.names
        numbers = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(label).tolist()
        return ";".join(names[one] if 0 <= one < len(names) else f"label {one}" for one in numbers) or "no label"


class Found(NamedTuple):
    """One image with a defect or a note."""

    split: str
    name: str
    about: str
    kind: str = ""
    """Kind of problem of an unreadable image; PIXELS of a copy in other bytes"""
    copy_of: str = ""
    """Name of the image that it is a copy of"""
    contradicts: bool = False
    """It is a copy of an image of another split that has another label"""


@dataclass
class Copies:
    """Images of one split, such as validation, whose bytes are those of an image in another, such as training."""

    found: int
    compared: int
    """Images of the one that were compared with all images of their size in the other"""
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Names in the one and in the other"""
    relabelled: int = 0
    """Those found whose label is another in the other"""
    training: int = 0
    """Images of the other that they were compared with; fewer than all where time was too short"""


@dataclass
class Findings:
    """Of all splits."""

    images: dict[str, int]
    """By split"""
    classes: dict[str, dict[str, int]]
    """Images of each class, by split"""
    largest_class_percent: float | None = None
    """Top-1 of always guessing the most frequent class of the validation split; None with several labels"""
    copies: Copies | None = None
    """Of training images in validation; None where they were not looked for"""
    copies_in_test: dict[str, Copies] = field(default_factory=dict)
    """Of images of each other split in the test split"""
    companions: str = ""
    """That images may be masks of others, by their names"""
    series: str = ""
    """That images of a group, or whose names look like those of one thing, are in several splits"""
    alike: list[int] = field(default_factory=list)
    """Validation images that look like a training image, as edited copies do, and those compared; empty if unknown"""
    looked_at: int = 0
    """Images whose headers were read"""
    unlike: list[str] = field(default_factory=list)
    """Names of those in a format that few others have, and the format"""
    modes: dict[str, int] = field(default_factory=dict)
    """Images by how their colours are stored, where it is not as the model takes them"""
    shorter: int = 0
    """Pixels of the shorter side of an image (the median)"""
    turned: int = 0

    def __post_init__(self) -> None:
        # Not in data.json
        self.found = defaultdict[Kind, list[Any]](list)
        """By kind: images, each Found, or names of classes"""
        self.unlabelled = dict[str, int]()
        """Images without a label, by split; empty where every image has exactly one"""

    @classmethod
    def of(cls, splits: Mapping[str, Samples], data: DataConfig, unnamed: str, num_classes: int = ANY_LABEL) -> Self:
        """What labels and names say. `unnamed`: words before the label of a class that has no name."""
        return cls(
            images={title: len(samples) for title, samples in splits.items()},
            classes=_images_by_class(splits, unnamed, num_classes),
            companions=companions_of(splits),
            series=series_of(splits, data),
        )

    def add(self, kind: Kind, image: Image, about: str, problem: str = "") -> None:
        self.found[kind].append(Found(image.split.title, image.name, about, problem))

    def of_kinds(self, defects: bool) -> dict[Kind, list[Any]]:
        """The defects, or the notes."""
        return {kind: found for kind, found in self.found.items() if kind.defect == defects}

    @property
    def clean(self) -> bool:
        return not any(self.of_kinds(defects=True).values())

    @property
    def unvalidated(self) -> list[str]:
        """Classes that have training images alone."""
        training = self.classes.get("training", {})
        validation = self.classes.get("validation", {})
        return [name for name, count in validation.items() if not count and training.get(name)]

    def pairs(self) -> list[tuple[str, str, Copies]]:
        """For each two splits that were compared: the one, the other, and the images of the one that are copies."""
        if self.copies is None:
            return []
        of_test = [("test", title, copies) for title, copies in self.copies_in_test.items()]
        return [("validation", "training", self.copies), *of_test]


def _images_by_class(splits: Mapping[str, Samples], unnamed: str, num_classes: int) -> dict[str, dict[str, int]]:
    """Images per class, by split: by name, with the label where classes share one, and by label where it has no class.

    Without names, the labels from 0 to the largest valid one are the names.
    """
    first = next(iter(splits.values()))
    several = first.labels.ndim == 2
    names = distinct_names(first.classes or ())
    if not names:
        largest = max(samples.labels[samples.labels < num_classes].max(initial=-1) for samples in splits.values())
        number = first.labels.shape[1] if several else int(largest) + 1
        names = [f"{unnamed}{label}" for label in range(number)]
    by_split = {title: dict.fromkeys(names, 0) for title in splits}
    for title, samples in splits.items():
        if several:
            found = enumerate(images_of_classes(samples.labels, len(names)))
        else:
            found = zip(*np.unique(samples.labels, return_counts=True), strict=True)
        for label, count in found:
            name = names[label] if 0 <= label < len(names) else f"label {label}"
            by_split[title][name] = int(count)
    return by_split
