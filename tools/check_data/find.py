"""From what was seen of each image to what is wrong with a data set."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tools.check_data.look import Seen


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
CONFLICTS = "conflicting labels"
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
    for copies in _copies(parts):
        _add_copies(findings, copies)
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
    """By name, with the label where several classes share it; and each label beside the classes that occurs."""
    times = Counter(names)
    titles = [name if times[name] == 1 else f"{name} (label {label})" for label, name in enumerate(names)]
    counts = dict.fromkeys(titles, 0)
    for label, count in zip(*np.unique(part.samples.labels, return_counts=True), strict=True):
        counts[titles[label] if 0 <= label < len(names) else f"label {label}"] = int(count)
    return counts


class _Copy(NamedTuple):
    part: Seen
    number: int

    @property
    def label(self) -> int:
        return int(self.part.samples.labels[self.number])

    @property
    def name(self) -> str:
        return self.part.samples.name(self.number)

    def found(self, other: _Copy) -> Found:
        """What is to be said of this one, which has the bytes of `other`."""
        # What is worse than the same image twice.
        labels = "" if self.label == other.label else f", but label {self.label} instead of {other.label}"
        return _found(self.part, self.number, f"the same bytes as {other.name}{labels}")


def _copies(parts: list[Seen]) -> Iterator[list[_Copy]]:
    """Images of equal bytes, those of both parts together."""
    groups: dict[bytes, list[_Copy]] = {}
    for part in parts:
        for index, look in enumerate(part.looks):
            if look.digest:
                groups.setdefault(look.digest, []).append(_Copy(part, index))
    return (group for group in groups.values() if len(group) > 1)


def _add_copies(findings: Findings, copies: list[_Copy]) -> None:
    """Nothing tells which of two labels is right; where all agree, one copy stays: validation's, if it has one."""
    if len({copy.label for copy in copies}) > 1:
        for copy in copies:
            other = next(one for one in copies if one.label != copy.label)
            findings.defects[CONFLICTS].append(copy.found(other))
        return
    by_part = [list(of_part) for _, of_part in itertools.groupby(copies, key=lambda copy: copy.part.title)]
    for first, *later in by_part:
        findings.defects[DUPLICATES] += [copy.found(first) for copy in later]
    if len(by_part) == 2:
        training, validation = by_part
        findings.defects[OVERLAP] += [copy.found(validation[0]) for copy in training]
