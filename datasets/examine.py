"""What is said of a data set before training (DATA.CHECK): classes, copies of images in both splits, odd images.

Nothing here changes a training. In a large data set, only as much is looked at as a few seconds allow.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from datasets.base import Samples
from datasets.decoding.header import GREY, TRANSPARENT, Header, header_of
from datasets.labels import images_of_classes
from utils.config.data import DataConfig
from utils.text import counted

QUICK_SECONDS = {"copies": 3.0, "headers": 1.0}
"""Most seconds for each with DATA.CHECK quick"""
LOOKED_AT = 400
"""Images whose headers are read."""
UNEQUAL = 5
"""Largest class over smallest, from which on the classes are called unequal."""
HUGE = 16
"""Times as many pixels as the model sees, from which on an image is called huge."""
MOST_NAMED = 5


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_up(self) -> bool:
        return time.monotonic() > self._end


@dataclass
class Copies:
    """Validation images whose bytes are those of a training image."""

    found: int
    compared: int
    """Validation images that were compared with all training images of their size"""
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Names in validation and in training"""


@dataclass
class Findings:
    images: dict[str, int]
    """By split"""
    classes: dict[str, dict[str, int]]
    """Images of each class, by split"""
    largest_class_percent: float | None = None
    """Top-1 of always guessing the most frequent class of the validation split; None with several labels"""
    copies: Copies | None = None
    """None where they were not looked for"""
    links: int = 0
    looked_at: int = 0
    """Images whose headers were read"""
    modes: dict[str, int] = field(default_factory=dict)
    turned: int = 0
    smallest: tuple[int, int] = (0, 0)
    median: tuple[int, int] = (0, 0)
    largest: tuple[int, int] = (0, 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(train: Samples, validation: Samples, data: DataConfig) -> Findings:
    """Look at both splits, as far as DATA.CHECK allows."""
    splits = {"training": train, "validation": validation}
    names = _class_names(splits)
    by_class = {
        title: dict(zip(names, images_of_classes(samples.labels, len(names)).tolist(), strict=True))
        for title, samples in splits.items()
    }
    share = None
    if validation.labels.ndim == 1 and len(validation):
        share = 100 * max(by_class["validation"].values(), default=0) / len(validation)
    findings = Findings({title: len(samples) for title, samples in splits.items()}, by_class, share)
    findings.links = train.links + validation.links
    seconds = QUICK_SECONDS if data.CHECK == "quick" else dict.fromkeys(QUICK_SECONDS, float("inf"))
    if train.stored == "files" and validation.stored == "files" and not (train.remote or validation.remote):
        findings.copies = _copies(train, validation, _Clock(seconds["copies"]))
    _add_headers(findings, train, data, _Clock(seconds["headers"]))
    return findings


def _class_names(splits: dict[str, Samples]) -> list[str]:
    first = splits["training"]
    if first.classes is not None:
        return [str(name) for name in first.classes]
    if first.labels.ndim == 2:
        return [f"label {label}" for label in range(first.labels.shape[1])]
    most = max((int(samples.labels.max()) for samples in splits.values() if len(samples)), default=-1)
    return [f"label {label}" for label in range(most + 1)]


def _copies(train: Samples, validation: Samples, clock: _Clock) -> Copies:
    """Files of equal size are compared by their contents; a validation image whose turn does not come is left out."""
    by_size: dict[int, list[int]] = {}
    for index, size in _sizes(train, range(len(train)), clock):
        by_size.setdefault(size, []).append(index)
    if clock.is_up:
        return Copies(0, 0)
    digests: dict[int, dict[bytes, int]] = {}
    copies = Copies(0, 0)
    # In random order, so that a part of them stands for all; seeded, so that the same ones are looked at again.
    order = np.random.default_rng(0).permutation(len(validation)).tolist()
    for index, size in _sizes(validation, order, clock):
        if size in by_size and size not in digests:
            digests[size] = {_digest(train, other): other for other in by_size[size]}
        if clock.is_up:
            break
        copies.compared += 1
        if size in digests and (twin := digests[size].get(_digest(validation, index))) is not None:
            copies.found += 1
            if len(copies.examples) < MOST_NAMED:
                copies.examples.append((validation.name(index), train.name(twin)))
    return copies


def _sizes(samples: Samples, order: Sequence[int], clock: _Clock) -> Iterator[tuple[int, int]]:
    """(index, bytes) of files, until the time is up; without files that cannot be read."""
    for index in order:
        if clock.is_up:
            return
        try:
            yield index, os.stat(samples.name(index)).st_size
        except (OSError, ValueError):
            continue


def _digest(samples: Samples, index: int) -> bytes:
    try:
        return hashlib.blake2b(bytes(samples.read(index)), digest_size=16).digest()
    except OSError:  # unreadable: reported when it is trained on
        return b"%d of %d" % (index, id(samples))


def _add_headers(findings: Findings, train: Samples, data: DataConfig, clock: _Clock) -> None:
    """Modes, sizes and rotation of some training images."""
    count = len(train) if data.CHECK == "full" else min(LOOKED_AT, len(train))
    headers: list[Header] = []
    for index in np.random.default_rng(0).permutation(len(train))[:count].tolist():
        if clock.is_up:
            break
        try:
            encoded = train.read(index)
        except OSError:
            continue
        if not isinstance(encoded, np.ndarray):
            headers.append(header_of(bytes(encoded), data.IMAGE_CHANNELS))
    findings.looked_at = len(headers)
    findings.modes = dict(Counter(header.mode for header in headers if header.mode))
    findings.turned = sum(header.turned for header in headers)
    sizes = np.array([header.size for header in headers if header.size != (0, 0)])
    if len(sizes):
        by_area = sizes[np.argsort(sizes.prod(1), kind="stable")].tolist()
        findings.smallest, findings.median, findings.largest = (
            (width, height) for width, height in (by_area[0], by_area[len(by_area) // 2], by_area[-1])
        )


def notes_of(found: Findings, data: DataConfig, weighted: bool, check: str) -> list[str]:
    """Lines for the log. `weighted`: by TRAIN.CLASS_WEIGHTS. `check`: the command that checks this data set."""
    return [
        _classes(found),
        *_inequality(found, data, weighted),
        *_odd_images(found, data),
        *([_not_compared(found, check)] if found.copies is None or _unfinished(found) else []),
    ]


def warnings_of(found: Findings, check: str) -> list[str]:
    """What makes the metrics of a validation wrong, with the command that mends it."""
    lines = []
    if found.copies is not None and found.copies.found:
        of = f"{found.copies.found:,} of {found.copies.compared:,} validation images"
        one, other = found.copies.examples[0]
        lines.append(
            f"Copies of training images, on which a model does better than on new ones: {of}. {one} has the bytes of "
            f"{other}. `{check} -out exclude.txt -exclude_duplicates` lists the copies; train with "
            "DATA.EXCLUDE=exclude.txt."
        )
    validation = found.classes["validation"]
    if unseen := [name for name, count in found.classes["training"].items() if count and not validation.get(name)]:
        more = f" and {len(unseen) - MOST_NAMED} more" if len(unseen) > MOST_NAMED else ""
        lines.append(
            f"{counted(len(unseen), 'class')} without a validation image: {', '.join(unseen[:MOST_NAMED])}{more}. "
            "Nothing will be known of how well they are recognised."
        )
    return lines


def _classes(found: Findings) -> str:
    training = found.classes["training"]
    images = ", ".join(f"{count:,} {title}" for title, count in found.images.items())
    smallest, largest = (
        (pick(training, key=lambda name: training[name]) for pick in (min, max)) if training else ("", "")
    )
    text = f"Data: {images} images in {len(training):,} classes"
    if training:
        text += f", from {training[smallest]:,} ({smallest}) to {training[largest]:,} ({largest}) training images"
    if found.largest_class_percent is not None:
        text += f". Always guessing the largest class would give {found.largest_class_percent:.1f} % in validation"
    return text


def _inequality(found: Findings, data: DataConfig, weighted: bool) -> list[str]:
    counts = [count for count in found.classes["training"].values() if count]
    if found.largest_class_percent is None or not counts or max(counts) < UNEQUAL * min(counts):
        return []
    if weighted or data.SAMPLER == "balanced":
        return []
    times = max(counts) / min(counts)
    return [
        f"The largest class has {times:.0f} times as many images as the smallest: top-1 mostly counts the large ones. "
        "DATA.SAMPLER=balanced or TRAIN.CLASS_WEIGHTS=balanced would weigh classes alike"
    ]


def _odd_images(found: Findings, data: DataConfig) -> list[str]:
    lines = []
    of = f"of {found.looked_at:,} training images" + (
        "" if found.looked_at == found.images["training"] else " looked at"
    )
    if number := found.modes.get(TRANSPARENT):
        lines.append(f"With transparent pixels, composited by DATA.BACKGROUND={data.BACKGROUND}: {number:,} {of}")
    if number := found.modes.get(GREY):
        lines.append(f"Grey, read as colour images: {number:,} {of}")
    if found.turned and not data.EXIF_ROTATE:
        lines.append(
            f"To be turned by their EXIF data, but read as they are stored: {found.turned:,} {of}. "
            "DATA.EXIF_ROTATE=true turns them"
        )
    model = data.IMAGE_SIZE
    if found.median != (0, 0):
        sizes = (f"{width} x {height}" for width, height in (found.median, found.smallest, found.largest))
        lines.append("Sizes {} (median), {} to {}; the model sees {} x {}".format(*sizes, model, model))
        if min(found.median) < model / 2:
            lines[-1] += ": most images are enlarged, so a smaller -image_size would see as much"
        elif found.median[0] * found.median[1] > HUGE * model * model:
            lines[-1] += ": decoding such images takes most of the time; see docs/data_speed.md"
    return lines


def _unfinished(found: Findings) -> bool:
    return found.copies is not None and found.copies.compared < found.images["validation"]


def _not_compared(found: Findings, check: str) -> str:
    """Says that not all images were searched for copies in both splits."""
    if found.copies is None:
        return (
            f"Not searched for copies in both splits, because the images are not single local files; `{check}` does it"
        )
    some = f"{found.copies.compared:,} of {found.images['validation']:,} validation images"
    return f"Searched for copies in both splits: only {some}, in the time of DATA.CHECK quick; `{check}` compares all"
