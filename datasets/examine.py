"""What is said of a data set before training (DATA.CHECK): classes, copies of images in both splits, odd images.

Nothing here changes a training. In a large data set, only as much is looked at as a few seconds allow.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from datasets.base import Samples
from datasets.copies import MOST_NAMED, QUICK_SECONDS, Clock, Copies, can_compare, find_copies
from datasets.decoding.header import GREY, TRANSPARENT, Header, header_of
from datasets.hashes import hashes_of
from datasets.labels import images_of_classes
from utils.config.data import DataConfig
from utils.text import counted

HEADER_SECONDS = 1.0
"""Most seconds of reading headers with DATA.CHECK quick"""
LOOKED_AT = 2000
"""Images whose headers are read, if there is time."""
MEASURED = 100
"""Images whose sides give `median_side`."""
UNEQUAL = 5
"""Largest class over smallest, from which on the classes are called unequal."""
HUGE = 16
"""Times as many pixels as the model sees, from which on an image is called huge."""


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
    findings.links = train.links if _one_folder(train, validation) else train.links + validation.links
    quick = data.CHECK == "quick"
    if can_compare(train) and can_compare(validation):
        hashes = hashes_of(data)
        findings.copies = find_copies(train, validation, hashes, QUICK_SECONDS if quick else float("inf"))
        hashes.save()
    _add_headers(findings, train, data, Clock(HEADER_SECONDS if quick else float("inf")))
    return findings


def _one_folder(train: Samples, validation: Samples) -> bool:
    """Whether both splits are of one list of files, whose links each of them counts."""
    roots = [getattr(samples, "root", None) for samples in (train, validation)]
    return roots[0] is not None and roots[0] == roots[1]


def _class_names(splits: dict[str, Samples]) -> list[str]:
    first = splits["training"]
    if first.classes is not None:
        return [str(name) for name in first.classes]
    if first.labels.ndim == 2:
        return [f"label {label}" for label in range(first.labels.shape[1])]
    most = max((int(samples.labels.max()) for samples in splits.values() if len(samples)), default=-1)
    return [f"label {label}" for label in range(most + 1)]


def _add_headers(findings: Findings, train: Samples, data: DataConfig, clock: Clock) -> None:
    """Modes, sizes and rotation of some training images."""
    count = len(train) if data.CHECK == "full" else min(LOOKED_AT, len(train))
    headers = list(takewhile(lambda _: not clock.is_past(), _headers(train, count, data)))
    findings.looked_at = len(headers)
    findings.modes = dict(Counter(header.mode for header in headers if header.mode))
    findings.turned = sum(header.turned for header in headers)
    sizes = np.array([header.size for header in headers if header.size != (0, 0)])
    if len(sizes):
        by_area = sizes[np.argsort(sizes.prod(1), kind="stable")].tolist()
        findings.smallest, findings.median, findings.largest = (
            (width, height) for width, height in (by_area[0], by_area[len(by_area) // 2], by_area[-1])
        )


def _headers(samples: Samples, count: int, data: DataConfig) -> Iterator[Header]:
    """Headers of `count` images, always the same ones; without images whose file cannot be read."""
    for index in np.random.default_rng(0).permutation(len(samples))[:count].tolist():
        try:
            encoded = samples.read(index)
        except OSError:
            continue
        if not isinstance(encoded, np.ndarray):
            yield header_of(bytes(encoded), data.IMAGE_CHANNELS)


def median_side(samples: Samples, data: DataConfig) -> int | None:
    """Median of the shorter sides of some images, in pixels; None if no image has a readable header.

    Other than `examine`, it reads the same images however long that takes, because every rank has to find the same.
    """
    sides = [min(header.size) for header in _headers(samples, MEASURED, data) if header.size != (0, 0)]
    return statistics.median_low(sides) if sides else None


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
            f"{other}. `{check} -fix exclude.txt` lists the copies; train with "
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
    if not training:
        return f"Data: {images} images"
    smallest, largest = (pick(training, key=lambda name: training[name]) for pick in (min, max))
    text = f"Data: {images} images in {len(training):,} classes"
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
        text = "Sizes {} (median), {} to {}".format(*sizes)
        lines.append(f"{text}, {of}; the model sees {model} x {model}")
        if min(found.median) < model / 2:
            lines[-1] += ": most images are enlarged, so a smaller -image_size would see as much"
        elif found.median[0] * found.median[1] > HUGE * model * model:
            lines[-1] += ": decoding such images takes most of the time; see docs/data_speed.md"
    return lines


def _unfinished(found: Findings) -> bool:
    copies = found.copies
    return copies is not None and (
        copies.compared < found.images["validation"] or copies.training < found.images["training"]
    )


def _not_compared(found: Findings, check: str) -> str:
    """Says that not all images were searched for copies in both splits."""
    copies = found.copies
    if copies is None:
        return (
            "Not searched for copies in both splits, because the images are raw pixels or not on this machine; "
            f"`{check}` does it"
        )
    some = f"{copies.compared:,} of {found.images['validation']:,} validation images"
    if copies.training < found.images["training"]:
        some += f" with {copies.training:,} of {found.images['training']:,} training images"
    return f"Searched for copies in both splits: only {some}, in the time of DATA.CHECK quick; `{check}` compares all"
