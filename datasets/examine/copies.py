"""Search for copies, which are images of equal bytes or pixels.

`find_copies` compares the files of two splits in a limited time, before training. `add_copies` compares all images that
check_data.py has decoded.
"""

import contextlib
import hashlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from datasets.base import Encoded, Samples, Unreadable
from datasets.examine.findings import (
    CONFLICTS,
    DUPLICATES,
    DUPLICATES_OF_OTHERS,
    OVERLAP,
    PIXELS,
    Copies,
    Finding,
    Findings,
    Image,
)

Item = TypeVar("Item")

QUICK_SECONDS = 3.5
"""Longest time of one search for copies with DATA.CHECK quick"""
# Fractions of that time after which no more file sizes are looked up, so that time is left to compare contents
SIZES_OF_VALIDATION = 0.2
SIZES_OF_BOTH = 0.65
BLOCK = 256
"""Neighbouring images whose sizes are looked up together: they are in one folder, so this is faster than at random."""
MOST_NAMED = 5
"""Copies whose names are kept as examples"""


def until(end: float, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, but stop once `time.monotonic()` is past `end`."""
    return itertools.takewhile(lambda _: time.monotonic() <= end, items)


def digest_of(encoded: Encoded) -> bytes:
    """Return a hash of an encoded image, which is equal for images of equal bytes."""
    return hashlib.blake2b(bytes(encoded), digest_size=16).digest()


def find_copies(train: Samples, validation: Samples, seconds: float) -> Copies:
    """Find validation images that have the same bytes as a training image. `seconds` is the longest time of the search.

    The two may be other splits as well, such as validation and test. Images of equal file size are compared by a hash
    of their contents. If the time is too short, a random part of the images is compared; the result says how many.
    """
    # The first part of the time is for the file sizes of both splits, the rest for the contents.
    begin = time.monotonic()
    end = begin + seconds
    validation_sizes = _file_sizes(validation, begin + SIZES_OF_VALIDATION * seconds)
    training_sizes = _file_sizes(train, begin + SIZES_OF_BOTH * seconds)

    if training_sizes.max(initial=0) <= 0:  # no file can be read: a table may outlive its images
        return Copies(found=0, compared=0)

    # A validation image whose size no training image has is no copy, so it counts as compared.
    known_sizes = validation_sizes[validation_sizes >= 0]
    shared_sizes = np.intersect1d(known_sizes, training_sizes)
    of_unique_size = len(known_sizes) - np.isin(known_sizes, shared_sizes).sum()
    copies = Copies(found=0, compared=int(of_unique_size), training=int((training_sizes >= 0).sum()))

    training_images_of_size = _lookup_by_size(training_sizes)
    validation_images_of_size = _lookup_by_size(validation_sizes)
    for size in np.random.default_rng(0).permutation(shared_sizes).tolist():
        training_digests = dict(_digests(train, training_images_of_size(size), end))
        validation_images = validation_images_of_size(size)
        validation_digests = list(_digests(validation, validation_images, end))
        if time.monotonic() > end:  # perhaps not all images of this size have a digest, so they do not count
            break
        copies.compared += len(validation_images)
        for digest, image in validation_digests:
            if digest not in training_digests:
                continue
            original = training_digests[digest]
            copies.found += 1
            copies.images.append(image)
            names = validation.name(image), train.name(original)
            if np.array_equal(validation.labels[image], train.labels[original]):
                copies.examples.append(names)
            else:  # shown first, since it matters most
                copies.relabelled += 1
                copies.examples.insert(0, names)
            del copies.examples[MOST_NAMED:]
    return copies


def _file_sizes(samples: Samples, end: float) -> np.ndarray:
    """Look up the size in bytes of each image, until the time `end`.

    Blocks of neighbours are looked up in random order. The size is -1 where the time was too short, and 0 where the
    image has no readable file.
    """
    sizes = np.full(len(samples), -1, dtype=np.int64)
    number_of_blocks = math.ceil(len(samples) / BLOCK)
    blocks = np.random.default_rng(0).permutation(number_of_blocks).tolist()
    for block in until(end, blocks):
        for image in range(block * BLOCK, min((block + 1) * BLOCK, len(samples))):
            sizes[image] = 0
            with contextlib.suppress(OSError, ValueError):  # training reports it when it reads the image
                sizes[image] = samples.size(image)
    return sizes


def _lookup_by_size(sizes: np.ndarray) -> Callable[[int], list[int]]:
    """Sort images by their size, and return a function that looks up the indices of all images of one size."""
    order = np.argsort(sizes, kind="stable")
    sorted_sizes = sizes[order]

    def images_of_size(size: int) -> list[int]:
        first, end = np.searchsorted(sorted_sizes, (size, size + 1))
        return order[first:end].tolist()

    return images_of_size


def _digests(samples: Samples, images: list[int], end: float) -> Iterator[tuple[bytes, int]]:
    """Yield the digest and the index of each image, without those that cannot be read, until the time `end`."""
    for image in until(end, images):
        with contextlib.suppress(OSError, ValueError, Unreadable):
            yield digest_of(samples.read(image)), image


def add_copies(findings: Findings, images: Iterable[Image]) -> None:
    """Add the scanned images that have equal bytes or pixels to the findings. `images` is in the order of the splits.

    Copies with different labels are all added, because none of the labels is known to be right. Copies with one label
    are added so that leaving out the findings leaves one image: within a split, all but the first are duplicates; if
    several splits have the image, all images of the earlier splits overlap with the last split.
    """
    by_kind = findings.by_kind
    by_content = defaultdict[bytes, list[Image]](list)
    for image in images:
        content_hash = image.scan.same
        if content_hash:  # empty if the image cannot be read
            by_content[content_hash].append(image)
    for copies in by_content.values():
        if len(copies) == 1:
            continue
        if len({copy.label for copy in copies}) > 1:
            for copy in copies:
                contradicting = next(image for image in copies if image.label != copy.label)
                by_kind[CONFLICTS].append(finding_of_copy(copy, contradicting))
            continue
        by_split = [list(group) for _, group in itertools.groupby(copies, key=lambda copy: copy.split.title)]
        original = by_split[-1][0]  # in the last split
        for first, *later in by_split:
            kind = DUPLICATES if first.split.title == "training" else DUPLICATES_OF_OTHERS
            by_kind[kind] += [finding_of_copy(copy, first) for copy in later]
            is_last_split = first.split is original.split
            if not is_last_split:
                by_kind[OVERLAP] += [finding_of_copy(copy, original) for copy in (first, *later)]


def finding_of_copy(image: Image, original: Image, likeness: str = "") -> Finding:
    """Describe an image as a copy of `original`.

    `likeness` is how they compare, such as "nearly the same image as". Without it, they have equal bytes or pixels, and
    the description says which.
    """
    kind = ""
    if not likeness:
        likeness = "the same bytes as"
        if image.scan.digest != original.scan.digest:
            kind = PIXELS
            likeness = "the same pixels, in other bytes, as"
    same_split = image.split is original.split
    same_label = image.label == original.label
    where = "" if same_split else f" in the {original.split.title} split"
    labels = "" if same_label else f", but {image.label} instead of {original.label}"
    return Finding(
        split=image.split.title,
        name=image.name,
        description=f"{likeness} {original.name}{where}{labels}",
        kind=kind,
        copy_of=original.name,
        contradicts=not same_split and not same_label,
    )
