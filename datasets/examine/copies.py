"""Images of equal bytes or pixels: searched for in two splits, in a limited time, and among scanned images, in all."""

import contextlib
import hashlib
import itertools
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
    Findings,
    Found,
    Image,
)

Item = TypeVar("Item")

QUICK_SECONDS = 3.5
"""Most seconds of the search for copies with DATA.CHECK quick"""
# Fractions of them after which no more sizes are looked up, so that time is left to compare contents
SIZES_OF_VALIDATION = 0.2
SIZES_OF_BOTH = 0.65
BLOCK = 256
"""Neighbours whose sizes are looked up together: neighbours are in one folder, so this is faster than at random."""
MOST_NAMED = 5


def until(end: float, items: Iterable[Item]) -> Iterator[Item]:
    """Items, as long as there is time."""
    return itertools.takewhile(lambda _: time.monotonic() <= end, items)


def digest_of(encoded: Encoded) -> bytes:
    """Equal for images of equal bytes."""
    return hashlib.blake2b(bytes(encoded), digest_size=16).digest()


def find_copies(train: Samples, validation: Samples, seconds: float) -> Copies:
    """Compare images of equal size by a hash of their contents. If the time is too short, a random part is compared."""
    begin = time.monotonic()
    end = begin + seconds
    of_validation = _sizes(validation, begin + SIZES_OF_VALIDATION * seconds)
    of_training = _sizes(train, begin + SIZES_OF_BOTH * seconds)
    known = of_validation[of_validation >= 0]
    shared = np.intersect1d(known, of_training)
    without_twin = len(known) - np.isin(known, shared).sum()
    copies = Copies(found=0, compared=int(without_twin), training=int((of_training >= 0).sum()))
    training_of = _by_size(of_training)
    validation_of = _by_size(of_validation)
    for size in np.random.default_rng(0).permutation(shared).tolist():
        twins = dict(_digests(train, training_of(size), end))
        validating = validation_of(size)
        digests = list(_digests(validation, validating, end))
        if time.monotonic() > end:
            break
        copies.compared += len(validating)
        for digest, index in digests:
            if digest in twins:
                twin = twins[digest]
                relabelled = not np.array_equal(validation.labels[index], train.labels[twin])
                copies.found += 1
                copies.relabelled += int(relabelled)
                names = validation.name(index), train.name(twin)
                copies.examples.insert(0 if relabelled else MOST_NAMED, names)
                del copies.examples[MOST_NAMED:]
    return copies


def _sizes(samples: Samples, end: float) -> np.ndarray:
    """Sizes of blocks of neighbours in random order, as long as there is time; -1 for the others, 0 without a file."""
    sizes = np.full(len(samples), -1, dtype=np.int64)
    blocks = np.random.default_rng(0).permutation(-(-len(samples) // BLOCK)).tolist()
    for block in until(end, blocks):
        for index in range(block * BLOCK, min((block + 1) * BLOCK, len(samples))):
            sizes[index] = 0
            with contextlib.suppress(OSError, ValueError):  # unreadable: reported when it is trained on
                sizes[index] = samples.size(index)
    return sizes


def _by_size(sizes: np.ndarray) -> Callable[[int], list[int]]:
    """Gives the indices of the images of a size."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]

    def images_of(size: int) -> list[int]:
        first, end = np.searchsorted(ordered, (size, size + 1))
        return order[first:end].tolist()

    return images_of


def _digests(samples: Samples, indices: list[int], end: float) -> Iterator[tuple[bytes, int]]:
    for index in until(end, indices):
        with contextlib.suppress(OSError, ValueError, Unreadable):
            yield digest_of(samples.read(index)), index


def add_copies(findings: Findings, images: Iterable[Image]) -> None:
    """Scanned images of the same bytes or pixels: all whose labels differ, else all but one, in the last split."""
    found = findings.found
    copies = defaultdict[bytes, list[Image]](list)
    for image in images:
        if image.scan.same:
            copies[image.scan.same].append(image)
    for same in copies.values():
        if len(same) == 1:
            continue
        if len({copy.label for copy in same}) > 1:  # every copy is listed, since no label is known to be right
            for copy in same:
                other = next(one for one in same if one.label != copy.label)
                found[CONFLICTS].append(as_copy(copy, other))
            continue
        by_split = [list(of_split) for _, of_split in itertools.groupby(same, key=lambda copy: copy.split.title)]
        last = by_split[-1][0]
        for first, *later in by_split:
            kind = DUPLICATES if first.split.title == "training" else DUPLICATES_OF_OTHERS
            found[kind] += [as_copy(copy, first) for copy in later]
            if first.split is not last.split:
                found[OVERLAP] += [as_copy(copy, last) for copy in (first, *later)]


def as_copy(image: Image, other: Image, alike: str = "") -> Found:
    """An image that has the bytes or the pixels of `other`; `alike`: else how alike they are."""
    kind = ""
    if not alike:
        alike = "the same bytes as"
        if image.scan.digest != other.scan.digest:
            kind = PIXELS
            alike = "the same pixels, in other bytes, as"
    where = "" if image.split is other.split else f" in the {other.split.title} split"
    labels = "" if image.label == other.label else f", but {image.label} instead of {other.label}"
    return Found(
        split=image.split.title,
        name=image.name,
        about=f"{alike} {other.name}{where}{labels}",
        kind=kind,
        copy_of=other.name,
        contradicts=bool(labels and where),
    )
