"""What the headers of images show: odd formats, colours and sizes, and those that tell classes or splits apart."""

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from datasets.base import Samples, Unreadable
from datasets.decoding import Header, header_of
from datasets.examine.copies import until
from datasets.examine.findings import (
    BLANK,
    FEW,
    LARGE,
    MODES,
    SMALL,
    SOURCES,
    TIMES_LARGER,
    TURNED,
    UNLIKE,
    Findings,
    Image,
    Kind,
    Scan,
    Split,
)
from utils.config.data import DataConfig
from utils.text import some_of
from vitamp.sizes import sides

HEADER_SECONDS = 1.0
"""Most seconds of reading headers with DATA.CHECK quick"""
LOOKED_AT = 2000
"""Images whose headers are read, if there is time."""
MEASURED = 100
"""Images whose sides give `median_side`."""
RARE = 100
"""Images among which one is odd: in a format of its own, or much larger"""
AT_LEAST = 20
"""Images of a format, of colours or of a size, from which on these are compared with classes and splits"""
MOST_KEPT = 0.6
"""Fraction of an image that a validation crop keeps, from which on nothing is said of it"""


def look_at_headers(findings: Findings, train: Samples, data: DataConfig) -> None:
    """`add_headers` of training images, as many as DATA.CHECK allows."""
    count = len(train)
    seconds = float("inf")
    if data.CHECK == "quick":
        count = min(LOOKED_AT, count)
        seconds = HEADER_SECONDS
    end = time.monotonic() + seconds
    split = Split("training", train)
    images = [Image(split, index, Scan(header)) for index, header in until(end, _headers(train, count, data))]
    add_headers(findings, images, data)


def median_side(samples: Samples, data: DataConfig) -> int | None:
    """Median of the shorter sides of some images, in pixels; None if no image has a readable header.

    Other than `look_at_headers`, it reads the same images however long that takes, because every rank has to find the
    same.
    """
    shorter = _shorter_sides(header for _, header in _headers(samples, MEASURED, data))
    return statistics.median_low(shorter) if shorter else None


def _headers(samples: Samples, count: int, data: DataConfig) -> Iterator[tuple[int, Header]]:
    """Headers of `count` images, always the same ones, and their numbers; without images that cannot be read."""
    for index in np.random.default_rng(0).permutation(len(samples))[:count].tolist():
        with contextlib.suppress(OSError, Unreadable):
            yield index, header_of(samples.read(index), data)


def _shorter_sides(headers: Iterable[Header]) -> list[int]:
    """In pixels, where they are known."""
    shorter = (min(header.size) for header in headers)
    return [side for side in shorter if side > 0]


def add_headers(findings: Findings, images: Sequence[Image], data: DataConfig) -> None:
    """How images are stored, and what is odd about an image alone or beside all others."""
    headers = [image.header for image in images]
    # Placeholders and drawings often have a format of their own.
    formats = Counter(header.format for header in headers if header.format)
    rare = {name for name, number in formats.items() if number * RARE <= formats.total()}
    known = _shorter_sides(headers)
    median = float(np.median(known)) if known else np.inf
    large = TIMES_LARGER * median
    if sum(side >= large for side in known) * RARE > len(known):
        large = np.inf
    for image in images:
        for kind, about in _notes_of(image.header, data, rare, large):
            findings.add(kind, image, about)
    findings.looked_at = len(images)
    findings.unlike = [f"{one.name} ({one.about})" for one in findings.found.get(UNLIKE, ())]
    findings.modes = dict(Counter(one.about for one in findings.found.get(MODES, ())))
    findings.shorter = round(median) if known else 0
    findings.turned = sum(header.turned for header in headers)


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


def add_sources(findings: Findings, images: Iterable[Image], data: DataConfig) -> None:
    """Formats, colours and sizes that tell a class, or that a split has not: those of another camera or website."""
    usual = "grey" if data.IMAGE_CHANNELS == 1 else "RGB"
    properties: dict[str, Callable[[Header], str]] = {
        "format": lambda header: header.format,
        "colours": lambda header: header.mode or usual,
        "size": lambda header: "{} x {}".format(*header.size),
    }
    images = [image for image in images if image.header.format]  # unknown of arrays and bands
    of_class = Counter(image.label for image in images)
    of_split = Counter(image.split.title for image in images)
    for what, value_of in properties.items():
        by_value = defaultdict[str, list[Image]](list)
        for image in images:
            by_value[value_of(image.header)].append(image)
        findings.found[SOURCES] += [f"{what} {text}" for text in _told_by(by_value, of_class, of_split)]


def _told_by(by_value: Mapping[str, Sequence[Image]], of_class: Counter[str], of_split: Counter[str]) -> Iterator[str]:
    """Values of a property that tell classes or splits apart, the rarest first. `of_class`, `of_split`: all images."""
    total = of_class.total()
    told = list[set[str]]()
    for value, having in sorted(by_value.items(), key=lambda item: (len(item[1]), item[0])):
        number = len(having)
        if number < AT_LEAST:
            continue
        have = Counter(image.label for image in having)
        common = 2 * number > total
        classes = _classes_with(have, of_class, common)
        if classes and classes not in told:
            told += [classes, of_class.keys() - classes]
            yield f"{value}: {_apart(classes, have, of_class)}; a model may go by it"
        splits = {image.split.title for image in having}
        for title, size in of_split.items():
            expected = number * size / total
            if expected >= FEW and title not in splits and not common:
                yield f"{value}: none of {number:,} images in {title}, where chance puts {expected:.0f}"


def _classes_with(have: Counter[str], of_class: Counter[str], common: bool) -> set[str]:
    """Classes that a property tells from the others; empty if it tells none.

    `have`: images of each class that have it, of all images `of_class`; `common`: more than half of all have it.
    """
    number = have.total()
    total = of_class.total()
    label, most = have.most_common(1)[0]
    if not common:  # then nearly all of those may be of one class, of which others lack it
        without = (of_class[label] - most) / (total - number)
        if most >= 0.9 * number and without <= 0.5:
            return {label}
    mostly = {label for label in have if 2 * have[label] > of_class[label]}
    inside = _sum_of(of_class, mostly)
    outside = total - inside
    if min(inside, outside) < AT_LEAST or total < AT_LEAST * len(of_class):  # few images of a class are alike by chance
        return set()
    having = _sum_of(have, mostly)
    clear = having >= 0.9 * inside and number - having <= 0.1 * outside
    return mostly if clear else set()


def _apart(classes: set[str], have: Counter[str], of_class: Counter[str]) -> str:
    """How many images of the classes, or of the others if these are fewer, have a property; as `_classes_with`."""
    others = of_class.keys() - classes
    named, rest = (classes, others) if len(classes) <= len(others) else (others, classes)
    having = _sum_of(have, named)
    images = _sum_of(of_class, named)
    many = "all" if having == images else f"{having:,} of"
    names = some_of(sorted(named))
    beside = f"{_sum_of(have, rest):,} of {_sum_of(of_class, rest):,} of the other classes"
    return f"{many} {images:,} images of {names}, {beside}"


def _sum_of(counts: Counter[str], names: Iterable[str]) -> int:
    return sum(counts[name] for name in names)


def kept_by_crop(headers: Iterable[Header], data: DataConfig) -> str:
    """How much of the images a square validation crop keeps; '' if it is most of them."""
    sizes = np.array([header.size for header in headers if min(header.size) > 0])
    high, wide = sides(data.IMAGE_SIZE)
    if not len(sizes) or high != wide or data.CROP_MODE != "center" or data.CROP == "none":
        return ""
    crop = sizes.min(1) * min(data.CROP_PCT, 1)
    kept = np.minimum(crop**2 / sizes.prod(1), 1)
    median = float(np.median(kept))
    if median > MOST_KEPT:
        return ""
    return (
        f"The crop of validation (CROP_PCT {data.CROP_PCT:g}) keeps {100 * median:.0f} % of an image (the median; the "
        f"least: {100 * kept.min():.0f} %). Where what counts may be at the margin, DATA.CROP_MODE=squash "
        "DATA.CROP_PCT=1 keeps all."
    )
