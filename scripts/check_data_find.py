"""From what was seen of each image to what is wrong with a data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scripts.check_data_look import Seen


class Found(NamedTuple):
    """One image that something is to be said of."""

    part: str
    number: int
    name: str
    about: str
    kind: str = ""
    """Of trouble, in a word, where it has one"""


@dataclass
class Classes:
    """How many images each class of a part has."""

    part: str
    counts: dict[str, int]

    @property
    def empty(self) -> list[str]:
        return [name for name, count in self.counts.items() if not count]


@dataclass
class Findings:
    """`defects` spoil a training or a figure; `notes` are worth knowing."""

    classes: list[Classes]
    defects: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    empty: list[str] = field(default_factory=list)
    """Classes without a training image."""

    @property
    def clean(self) -> bool:
        return not self.empty and not any(self.defects.values())


UNREADABLE, LABELS, DUPLICATES, OVERLAP = "unreadable", "label out of range", "duplicate", "in both parts"
SMALL, MODES = "smaller than IMAGE_SIZE", "not plain"


def find(parts: list[Seen], num_classes: int, image_size: int) -> Findings:
    """`parts`: training first."""
    names = _class_names(parts, num_classes)
    findings = Findings([Classes(part.title, _counts(part, names)) for part in parts])
    findings.empty = findings.classes[0].empty if parts[0].title == "training" else []
    for part in parts:
        for index, look in enumerate(part.looks):
            label = int(part.samples.labels[index])
            if look.kind:
                findings.defects[UNREADABLE].append(_found(part, index, look.reason, look.kind))
            if not 0 <= label < num_classes:
                about = f"label {label}; MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
                findings.defects[LABELS].append(_found(part, index, about))
            if look.mode:
                findings.notes[MODES].append(_found(part, index, look.mode))
            if look.size != (0, 0) and min(look.size) < image_size:
                findings.notes[SMALL].append(_found(part, index, f"{look.size[0]} x {look.size[1]}"))
        findings.defects[DUPLICATES].extend(_duplicates(part))
    if len(parts) == 2:
        findings.defects[OVERLAP].extend(_overlap(*parts))
    return findings


def _found(part: Seen, index: int, about: str, kind: str = "") -> Found:
    return Found(part.title, index, part.samples.name(index), about, kind)


def _class_names(parts: list[Seen], num_classes: int) -> list[str]:
    """As the source calls them, otherwise their labels from 0 to the greatest that fits."""
    known = parts[0].samples.classes
    if known is not None:
        return known
    fitting = [label for part in parts for label in np.unique(part.samples.labels).tolist() if 0 <= label < num_classes]
    return [str(label) for label in range(max(fitting, default=-1) + 1)]


def _counts(part: Seen, names: list[str]) -> dict[str, int]:
    """By name; beside the classes, each label that is none of them but occurs."""
    counts = dict.fromkeys(names, 0)
    for label, count in zip(*np.unique(part.samples.labels, return_counts=True), strict=True):
        counts[names[label] if 0 <= label < len(names) else f"label {label}"] = int(count)
    return counts


def _duplicates(part: Seen) -> Iterator[Found]:
    """The later ones of those with equal bytes."""
    first: dict[bytes, int] = {}
    for index, look in enumerate(part.looks):
        if not look.digest:
            continue
        before = first.setdefault(look.digest, index)
        if before != index:
            yield _found(
                part, index, f"the same bytes as {part.samples.name(before)}{_labels(part, index, part, before)}"
            )


def _overlap(training: Seen, validation: Seen) -> Iterator[Found]:
    """Training images that validation has too: they are the ones to leave out."""
    there = {look.digest: index for index, look in enumerate(validation.looks) if look.digest}
    for index, look in enumerate(training.looks):
        if look.digest in there:
            other = there[look.digest]
            about = f"the same bytes as {validation.samples.name(other)}{_labels(training, index, validation, other)}"
            yield _found(training, index, about)


def _labels(one: Seen, index: int, other: Seen, other_index: int) -> str:
    """What is worse than the same image twice."""
    here, there = int(one.samples.labels[index]), int(other.samples.labels[other_index])
    return "" if here == there else f", but label {here} instead of {there}"
