"""Defects and notes of a data set, of which every image was scanned."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from datasets.decoding import Header
from datasets.examine import RARE, Findings, rare_formats, shorter_sides
from tools.check_data.near import near_pairs
from tools.check_data.scan import Image, Split, thumbnails_of
from utils.config.data import DataConfig
from utils.text import some_of
from vitamp.sizes import sides

PIXELS = "pixels"
AT_LEAST = 20
"""Images of a format, of colours or of a size, from which on these are compared with classes and splits"""
TIMES_LARGER = 4
"""Side of an image over the median, from which on it is called much larger, if few are"""
FEW = 5
"""Training images below which a class is called tiny"""
MOST_KEPT = 0.6
"""Fraction of an image that a validation crop keeps, from which on nothing is said of it"""


class Kind(NamedTuple):
    """Of defects, or of notes."""

    name: str
    """In -json"""
    heading: str


UNREADABLE = Kind("unreadable", "cannot be read")
DAMAGED = Kind("damaged but readable", "damaged, although they can be read")
LABELS = Kind("label out of range", "labels out of range")
DUPLICATES = Kind("duplicate", "duplicates within a split")
OVERLAP = Kind("in both parts", "in two splits (training images in another, or validation images in test)")
CONFLICTS = Kind("conflicting labels", "the same bytes with different labels")
EMPTY_CLASSES = Kind("empty classes", "classes without training images")
UNVALIDATED = Kind("classes without validation images", "classes without validation images")
TINY = Kind("tiny classes", f"classes with fewer than {FEW} training images")
SMALL = Kind("smaller than IMAGE_SIZE", "smaller than IMAGE_SIZE; enlarged when read")
MODES = Kind("not plain", "colours are converted when read (transparent parts become DATA.BACKGROUND)")
BLANK = Kind("blank bands", "bands that are blank")
UNLIKE = Kind("in another format", "perhaps placeholders: in another format than nearly all others")
LARGE = Kind("much larger", f"at least {TIMES_LARGER} times as large as most others")
TURNED = Kind(
    "to be turned", "to be turned by their EXIF data, but read as they are stored; DATA.EXIF_ROTATE=true turns them"
)
SOURCES = Kind(
    "of another source",
    "properties (format, colours, size) that tell classes or splits apart, perhaps of another source",
)
NEAR_CONFLICTS = Kind(
    "nearly the same with conflicting labels",
    "nearly the same with different labels: one is wrong, unless classes differ in details",
)
NEAR_OVERLAP = Kind("nearly in both parts", "nearly the same in two splits (encoded again, resized)")
NEAR_DUPLICATES = Kind("nearly duplicate", "nearly the same within a split")
FLAT_IMAGES = Kind("of one colour", "almost of one colour; if they should not be, see DATA.BACKGROUND")


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
class AllFindings(Findings):
    """Of every image: defects, which spoil training or its metrics, and notes, which do not."""

    unlabelled: dict[str, int] = field(default_factory=dict)
    """Images without a label, by split; empty where every image has exactly one"""
    defects: dict[Kind, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By kind: images, each Found, or names of classes"""
    notes: dict[Kind, list[Any]] = field(default_factory=lambda: defaultdict(list))

    @property
    def clean(self) -> bool:
        return not any(self.defects.values())


def find_problems(splits: list[Split], num_classes: int, data: DataConfig) -> AllFindings:
    """Findings of all splits, of which training comes first."""
    findings = AllFindings.of({split.title: split.samples for split in splits}, data, "", num_classes)
    for split in splits:
        labels = split.samples.labels
        if labels.ndim == 2:
            findings.unlabelled[split.title] = int((labels.sum(1) == 0).sum())
    of_training = findings.classes.get("training", {})
    of_validation = findings.classes.get("validation", {})
    empty = [name for name, count in of_training.items() if not count]
    findings.defects[EMPTY_CLASSES] = empty
    findings.notes[UNVALIDATED] = [name for name, count in of_validation.items() if not count and name not in empty]
    findings.notes[TINY] = [f"{name} ({count})" for name, count in of_training.items() if 0 < count < FEW]
    images = list(itertools.chain.from_iterable(split.images() for split in splits))
    _add_single(findings, images, num_classes, data)
    usual = "grey" if data.IMAGE_CHANNELS == 1 else "RGB"
    findings.notes[SOURCES] = [*_sources(images, [split.title for split in splits], usual)]
    _add_copies(findings, images)
    _add_near(findings, splits)
    return findings


def _found(image: Image, about: str, kind: str = "") -> Found:
    return Found(image.split.title, image.name, about, kind)


def _copy(image: Image, other: Image, alike: str = "") -> Found:
    """Of an image that has the bytes or the pixels of `other`; `alike`: else how alike they are."""
    kind = ""
    if not alike:
        alike = "the same bytes as"
        if image.scan.digest != other.scan.digest:
            kind = PIXELS
            alike = "the same pixels, in other bytes, as"
    where = "" if image.split is other.split else f" in the {other.split.title} split"
    labels = "" if image.label == other.label else f", but {image.label} instead of {other.label}"
    about = f"{alike} {other.name}{where}{labels}"
    return _found(image, about, kind)._replace(copy_of=other.name, contradicts=bool(labels and where))


def _add_single(findings: AllFindings, images: Sequence[Image], num_classes: int, data: DataConfig) -> None:
    """What is wrong with an image alone, or odd beside all others."""
    headers = [image.header for image in images]
    rare = rare_formats(headers)
    known = shorter_sides(headers)
    large = TIMES_LARGER * np.median(known) if known else np.inf
    if sum(side >= large for side in known) * RARE > len(known):
        large = np.inf
    for image in images:
        for kind, found in _defects_of(image, num_classes):
            findings.defects[kind].append(found)
        for kind, about in _notes_of(image.header, data, rare, large):
            findings.notes[kind].append(_found(image, about))


def _defects_of(image: Image, num_classes: int) -> Iterator[tuple[Kind, Found]]:
    scan = image.scan
    label = image.split.samples.labels[image.number]
    if scan.problem:
        yield UNREADABLE, _found(image, scan.reason, scan.problem)
    if scan.damage:
        yield DAMAGED, _found(image, scan.damage)
    if np.ndim(label) == 0 and not 0 <= label < num_classes:
        yield LABELS, _found(image, f"label {label}; MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}")


def _notes_of(header: Header, data: DataConfig, rare: set[str], large: float) -> Iterator[tuple[Kind, str]]:
    """Kinds of notes, and what is odd. `rare`: formats; `large`: pixels of the shorter side of a large image."""
    wide, high = header.size
    size = f"{wide} x {high}"
    least_high, least_wide = sides(data.IMAGE_SIZE)
    if header.mode:
        yield MODES if header.format else BLANK, header.mode
    if min(wide, high) > 0 and (wide < least_wide or high < least_high):
        yield SMALL, size
    if header.format in rare:
        yield UNLIKE, header.format
    if min(wide, high) >= large:
        yield LARGE, size
    if header.turned and not data.EXIF_ROTATE:
        yield TURNED, size


def _sources(images: Iterable[Image], titles: list[str], usual: str) -> Iterator[str]:
    """Formats, colours and sizes that tell a class, or that a split has not: those of another camera or website.

    `titles`: of the splits. `usual`: the colours that the model takes.
    """
    images = [image for image in images if image.header.format]
    if not images:  # unknown of arrays and bands
        return
    labels, label_of = np.unique([image.label for image in images], return_inverse=True)
    split_of = np.array([titles.index(image.split.title) for image in images])
    of_split = np.bincount(split_of, minlength=len(titles))
    ones = np.ones(len(images), np.int64)
    for what, of_images in (
        ("format", [image.header.format for image in images]),
        ("colours", [image.header.mode or usual for image in images]),
        ("size", ["{} x {}".format(*image.header.size) for image in images]),
    ):
        values, value_of, counts = np.unique(of_images, return_inverse=True, return_counts=True)
        by_class = csr_array((ones, (value_of, label_of)), (len(values), len(labels)))  # ImageNet has many of both
        by_split = csr_array((ones, (value_of, split_of)), (len(values), len(titles))).toarray()
        of_class = by_class.sum(0)
        told = list[np.ndarray]()
        for at in np.argsort(counts, kind="stable")[counts >= AT_LEAST].tolist():
            count = counts[at]
            common = bool(count > len(images) / 2)
            have = by_class[[at]].toarray()[0]
            chosen = _told_by(have, of_class, common)
            if chosen is not None and not any(np.array_equal(chosen, one) for one in told):
                told += [chosen, ~chosen]
                yield f"{what} {values[at]}: {_of_classes(chosen, have, of_class, labels)}; a model may go by it"
            for title, has, size in zip(titles, by_split[at], of_split, strict=True):
                expected = count * size / len(images)
                if expected >= FEW and not has and not common:
                    absent = f"none of {count:,} images in {title}, where chance puts {expected:.0f}"
                    yield f"{what} {values[at]}: {absent}"


def _of_classes(chosen: np.ndarray, have: np.ndarray, images: np.ndarray, labels: np.ndarray) -> str:
    """How many images of the chosen classes, or of the others if these are fewer, have a property; as `_told_by`."""
    named = chosen if 2 * chosen.sum() <= len(chosen) else ~chosen
    of = images[named].sum()
    many = "all" if have[named].sum() == of else f"{have[named].sum():,} of"
    names = some_of(labels[named].tolist())
    return f"{many} {of:,} images of {names}, {have[~named].sum():,} of {images[~named].sum():,} of the other classes"


def _told_by(have: np.ndarray, images: np.ndarray, common: bool) -> np.ndarray | None:
    """Which classes a property tells from the others; None if it tells none.

    `have`: images of each class that have it, of so many `images`; `common`: more than half of all have it.
    """
    if not common:  # then nearly all of those may be of one class, of which others lack it
        label = have.argmax()
        without = (images[label] - have[label]) / (images.sum() - have.sum())
        if have[label] >= 0.9 * have.sum() and without <= 0.5:
            return np.arange(len(have)) == label
    most = 2 * have > images
    sizes = [images[most].sum(), images[~most].sum()]
    if min(sizes) < AT_LEAST or images.sum() < AT_LEAST * len(images):  # few images of a class are alike by chance
        return None
    clear = have[most].sum() >= 0.9 * sizes[0] and have[~most].sum() <= 0.1 * sizes[1]
    return most if clear else None


def _add_copies(findings: AllFindings, images: Iterable[Image]) -> None:
    """Images of the same bytes or pixels: all whose labels differ, else all but one, in the last split."""
    copies: dict[bytes, list[Image]] = defaultdict(list)
    for image in images:
        copies[image.scan.same].append(image)
    copies.pop(b"", None)
    for same in copies.values():
        if len(same) == 1:
            continue
        if len({copy.label for copy in same}) > 1:  # every copy is listed, since no label is known to be right
            for copy in same:
                other = next(one for one in same if one.label != copy.label)
                findings.defects[CONFLICTS].append(_copy(copy, other))
            continue
        by_split = [list(of_split) for _, of_split in itertools.groupby(same, key=lambda copy: copy.split.title)]
        for first, *later in by_split:  # in validation and test they count twice, but spoil no training
            duplicates = findings.defects if first.split.title == "training" else findings.notes
            duplicates[DUPLICATES] += [_copy(copy, first) for copy in later]
        last = by_split[-1][0]
        for of_split in by_split[:-1]:
            findings.defects[OVERLAP] += [_copy(copy, last) for copy in of_split]


def _add_near(findings: AllFindings, splits: Sequence[Split]) -> None:
    """Images that are nearly the same, though not pixel for pixel; of identical ones, one stands for all.

    The last split comes first, so that an image of the training split is reported as a copy of one in validation.
    """
    by_digest: dict[bytes, Image] = {}
    for split in reversed(splits):
        for image in split.images():
            if image.scan.thumbnail:
                by_digest.setdefault(image.scan.same, image)
    if not by_digest:
        return
    images = list(by_digest.values())
    thumbnails = thumbnails_of([image.scan for image in images])
    for index in np.flatnonzero(thumbnails.flat).tolist():
        findings.notes[FLAT_IMAGES].append(_found(images[index], "almost of one colour, as the model sees it"))
    reported: set[tuple[int, str]] = set()
    for first, second in near_pairs(thumbnails).tolist():
        one = images[first]
        other = images[second]
        conflict = one.split is other.split and one.label != other.label
        once = second, one.split.title
        if once in reported and not conflict:  # once for each split
            continue
        reported.add(once)
        found = _copy(other, one, "nearly the same image as")
        if conflict:
            findings.defects[NEAR_CONFLICTS].append(found)
        elif one.split is other.split:
            findings.notes[NEAR_DUPLICATES].append(found)
        else:
            findings.defects[NEAR_OVERLAP].append(found)


def kept_by_crop(headers: Iterable[Header], data: DataConfig) -> str:
    """How much of the images a square validation crop keeps; '' if it is most of them."""
    sizes = np.array([header.size for header in headers if min(header.size) > 0])
    high, wide = sides(data.IMAGE_SIZE)
    if not len(sizes) or high != wide or data.CROP_MODE != "center" or data.CROP == "none":
        return ""
    shorter = sizes.min(1) * min(data.CROP_PCT, 1)
    kept = np.minimum(shorter**2 / sizes.prod(1), 1)
    median = float(np.median(kept))
    if median > MOST_KEPT:
        return ""
    return (
        f"The crop of validation (CROP_PCT {data.CROP_PCT:g}) keeps {100 * median:.0f} % of an image (the median; the "
        f"least: {100 * kept.min():.0f} %). Where what counts may be at the margin, DATA.CROP_MODE=squash "
        "DATA.CROP_PCT=1 keeps all."
    )
