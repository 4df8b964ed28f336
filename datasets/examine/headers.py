"""Findings from the headers of images: odd formats, colours and sizes, and those that a split lacks."""

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

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
from vitamp.sizes import sides

HEADER_SECONDS = 1.0
"""Longest time of reading headers with DATA.CHECK quick"""
LOOKED_AT = 2000
"""Images whose headers are read with DATA.CHECK quick, if there is time"""
MEASURED = 100
"""Images whose sides give `median_side`"""
RARE = 100
"""A format is rare, and a large image odd, if at most one of so many images is like that"""
AT_LEAST = 20
"""Fewest images of a format, colour mode or size for which splits are compared"""
MOST_KEPT = 0.6
"""Largest fraction of an image that a validation crop may keep for a remark on the crop"""


def look_at_headers(title: str, samples: Samples, data: DataConfig, most: int = LOOKED_AT) -> list[Image]:
    """Read the headers of images of a split, in random order, of as many as DATA.CHECK allows; of `most` if quick."""
    count = len(samples)
    seconds = float("inf")
    if data.CHECK == "quick":
        count = min(most, count)
        seconds = HEADER_SECONDS
    end = time.monotonic() + seconds
    split = Split(title, samples)
    return [Image(split, index, Scan(header)) for index, header in until(end, _headers(samples, count, data))]


def median_side(samples: Samples, data: DataConfig) -> int | None:
    """Return the median of the shorter sides of MEASURED images, in pixels; None if no image has a readable header.

    Unlike `look_at_headers`, it has no time limit: every rank must read the same images, to get the same median.
    """
    shorter_sides = _shorter_sides(header for _, header in _headers(samples, MEASURED, data))
    return statistics.median_low(shorter_sides) if shorter_sides else None


def _headers(samples: Samples, count: int, data: DataConfig) -> Iterator[tuple[int, Header]]:
    """Yield index and header of `count` random images, the same ones in every call, without unreadable images."""
    for index in np.random.default_rng(0).permutation(len(samples))[:count].tolist():
        with contextlib.suppress(OSError, Unreadable):
            yield index, header_of(samples.read(index), data)


def _shorter_sides(headers: Iterable[Header]) -> list[int]:
    """Return the shorter side of each image in pixels, without images whose size is unknown."""
    shorter_sides = (min(header.size) for header in headers)
    return [side for side in shorter_sides if side > 0]


def add_headers(findings: Findings, images: Sequence[Image], data: DataConfig) -> None:
    """Add notes on images that are stored in an odd way, and the totals of how all images are stored."""
    headers = [image.header for image in images]

    # Placeholders and drawings often have a format of their own.
    images_of_format = Counter(header.format for header in headers if header.format)
    rare_formats = {name for name, count in images_of_format.items() if count * RARE <= images_of_format.total()}

    # If many images are large, none is odd.
    shorter_sides = _shorter_sides(headers)
    median = float(np.median(shorter_sides)) if shorter_sides else np.inf
    large_side = TIMES_LARGER * median
    if sum(side >= large_side for side in shorter_sides) * RARE > len(shorter_sides):
        large_side = np.inf

    for image in images:
        for kind, description in _notes_on_header(image.header, data, rare_formats, large_side):
            findings.add(kind, image, description)
    findings.looked_at = len(images)
    findings.unlike = [f"{finding.name} ({finding.description})" for finding in findings.by_kind.get(UNLIKE, ())]
    findings.modes = dict(Counter(finding.description for finding in findings.by_kind.get(MODES, ())))
    findings.shorter = round(median) if shorter_sides else 0
    findings.turned = sum(header.turned for header in headers)


def _notes_on_header(
    header: Header, data: DataConfig, rare_formats: set[str], large_side: float
) -> Iterator[tuple[Kind, str]]:
    """Yield the kind and the description of each note on an image.

    An image is large if its shorter side has `large_side` pixels or more.
    """
    wide, high = header.size  # 0 if unknown
    size = f"{wide} x {high}"
    model_high, model_wide = sides(data.IMAGE_SIZE)
    if header.mode:  # only bands have a mode without a format, which says that some are blank
        yield MODES if header.format else BLANK, header.mode
    if min(wide, high) > 0 and (wide < model_wide or high < model_high):
        yield SMALL, size
    if header.format in rare_formats:
        yield UNLIKE, header.format
    if min(wide, high) >= large_side:
        yield LARGE, size
    if header.turned and not data.EXIF_ROTATE:
        yield TURNED, size


def add_sources(findings: Findings, images: Iterable[Image]) -> None:
    """Add a note on each format, colour mode or size that a split lacks: images with it are perhaps of another source.

    `shortcuts.py` finds those that classes differ in.
    """
    images = [image for image in images if image.header.encoding]  # it is unknown of arrays and bands
    split_sizes = Counter(image.split.title for image in images)
    by_property = defaultdict[str, Counter[str]](Counter)  # property -> number of images in each split
    notes = findings.by_kind[SOURCES]
    for image in images:
        header = image.header
        size = "size {} x {}".format(*header.size)
        for value in (f"format {header.format}", f"colours {header.encoding['colours']}", size):
            by_property[value][image.split.title] += 1
    for value, counts in sorted(by_property.items(), key=lambda item: item[1].total()):
        number = counts.total()
        if number < AT_LEAST or 2 * number > len(images):
            continue
        for title, split_size in split_sizes.items():
            expected = number * split_size / len(images)
            if expected >= FEW and not counts[title]:
                note = f"none of {number:,} images in {title}, where chance puts {expected:.0f}"
                notes.append(f"{value}: {note}")


def remark_on_crop(headers: Iterable[Header], data: DataConfig) -> str:
    """Say how much of the images a square validation crop keeps; '' if it keeps most, or crops in another way."""
    sizes = np.array([header.size for header in headers if min(header.size) > 0])
    high, wide = sides(data.IMAGE_SIZE)
    if not len(sizes) or high != wide or data.CROP_MODE != "center" or data.CROP == "none":
        return ""
    crop_sides = sizes.min(1) * min(data.CROP_PCT, 1)
    fractions = np.minimum(crop_sides**2 / sizes.prod(1), 1)
    median = float(np.median(fractions))
    if median > MOST_KEPT:
        return ""
    return (
        f"The crop of validation (CROP_PCT {data.CROP_PCT:g}) keeps {100 * median:.0f} % of an image (the median; the "
        f"least: {100 * fractions.min():.0f} %). Where what counts may be at the margin, DATA.CROP_MODE=squash "
        "DATA.CROP_PCT=1 keeps all."
    )
