"""Search for validation images that are copies of training images, byte for byte, in the time that a start allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from datasets.base import Samples, Stamp
from datasets.hashes import Hashes

QUICK_SECONDS = 3.5
"""Most seconds of a search with DATA.CHECK quick"""
SIZES_OF_VALIDATION, SIZES_OF_BOTH = 0.2, 0.65
"""Fractions of the time after which no more sizes are looked up, so that time is left to compare contents"""
BLOCK = 256
"""Neighbours whose sizes are looked up together: neighbours are in one folder, so this is faster than at random."""
MOST_NAMED = 5


class Clock:
    def __init__(self, seconds: float) -> None:
        self._begin, self.seconds = time.monotonic(), seconds

    def is_past(self, fraction: float = 1.0) -> bool:
        return time.monotonic() - self._begin > fraction * self.seconds


@dataclass
class Copies:
    """Validation images whose bytes are those of a training image."""

    found: int
    compared: int
    """Validation images that were compared with all training images of their size"""
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Names in validation and in training"""
    training: int = 0
    """Training images that they were compared with; fewer than all where time was too short"""


@dataclass
class _Stamps:
    """Size and time of change of each file of a split; size -1 where it was not looked up."""

    sizes: np.ndarray
    changed: np.ndarray


def can_compare(samples: Samples) -> bool:
    """Whether images are bytes on this machine."""
    return samples.stored != "pixels" and not samples.remote


def find_copies(train: Samples, validation: Samples, hashes: Hashes, seconds: float) -> Copies:
    """Compare images of equal size by a hash of their contents.

    If the time is too short, a random part is compared. It is the same part in each start, so that with the hashes kept
    from the start before, the next one gets further.
    """
    clock = Clock(seconds)
    of_validation = _stamps(validation, clock, SIZES_OF_VALIDATION)
    of_training = _stamps(train, clock, SIZES_OF_BOTH)
    known = of_validation.sizes[of_validation.sizes >= 0]
    shared = np.intersect1d(known, of_training.sizes)
    copies = Copies(0, int(len(known) - np.isin(known, shared).sum()), training=int((of_training.sizes >= 0).sum()))
    for training, validating in _groups(of_training.sizes, of_validation.sizes, shared):
        twins = dict(_digests(train, of_training, training, hashes, clock))
        digests = list(_digests(validation, of_validation, validating, hashes, clock))
        if clock.is_past():
            break
        copies.compared += len(validating)
        for digest, index in digests:
            if digest in twins:
                copies.found += 1
                if len(copies.examples) < MOST_NAMED:
                    copies.examples.append((validation.name(index), train.name(twins[digest])))
    return copies


def _stamps(samples: Samples, clock: Clock, fraction: float) -> _Stamps:
    """Look up blocks of neighbours in random order, until that fraction of the time has passed."""
    stamps = _Stamps(np.full(len(samples), -1, dtype=np.int64), np.zeros(len(samples), dtype=np.int64))
    blocks = -(-len(samples) // BLOCK)
    for block in np.random.default_rng(0).permutation(blocks).tolist():
        if clock.is_past(fraction):
            break
        for index in range(block * BLOCK, min((block + 1) * BLOCK, len(samples))):
            try:
                stamps.sizes[index], stamps.changed[index] = samples.stamp(index)
            except (OSError, ValueError):  # unreadable: reported when it is trained on
                continue
    return stamps


def _groups(training: np.ndarray, validation: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[list[int], list[int]]]:
    """Images of each size in both splits, the sizes in random order."""
    orders = [np.argsort(split, kind="stable") for split in (training, validation)]
    ordered = [split[order] for split, order in zip((training, validation), orders, strict=True)]
    for size in np.random.default_rng(0).permutation(sizes).tolist():
        first, second = (
            order[np.searchsorted(split, size) : np.searchsorted(split, size, side="right")].tolist()
            for split, order in zip(ordered, orders, strict=True)
        )
        yield first, second


def _digests(
    samples: Samples, stamps: _Stamps, indices: list[int], hashes: Hashes, clock: Clock
) -> Iterator[tuple[bytes, int]]:
    for index in indices:
        if clock.is_past():
            return
        try:
            yield hashes.of(samples, index, Stamp(int(stamps.sizes[index]), int(stamps.changed[index]))), index
        except OSError:
            continue
