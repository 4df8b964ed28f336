"""Defects and notes of a data set, from the scans of its images."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from datasets.labels import images_of_classes
from tools.check_data.near import SIDE, Thumbnails, near_pairs
from tools.check_data.scan import Split


class Found(NamedTuple):
    """One image with a defect or a note."""

    split: str
    number: int
    name: str
    about: str
    kind: str = ""
    """Kind of problem of an unreadable image"""


@dataclass
class Classes:
    """Images per class of a split."""

    split: str
    counts: dict[str, int]
    images: int
    unlabelled: int | None = None
    """Images without a label; None where every image has exactly one"""

    @property
    def empty(self) -> list[str]:
        return [name for name, count in self.counts.items() if not count]


@dataclass
class Findings:
    """Defects, which spoil training or its metrics, and notes, which do not."""

    classes: list[Classes]
    defects: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    empty: list[str] = field(default_factory=list)
    """Classes without training images: a defect"""
    unvalidated: list[str] = field(default_factory=list)
    """Other classes without validation images: a note"""
    tiny: list[str] = field(default_factory=list)
    """Classes with fewer than FEW training images, with their number: a note"""

    @property
    def clean(self) -> bool:
        return not self.empty and not any(self.defects.values())


UNREADABLE, DAMAGED = "unreadable", "damaged but readable"
LABELS, DUPLICATES, OVERLAP = "label out of range", "duplicate", "in both parts"
CONFLICTS = "conflicting labels"
SMALL, MODES = "smaller than IMAGE_SIZE", "not plain"
NEAR_OVERLAP, NEAR_DUPLICATES, FLAT_IMAGES = "nearly in both parts", "nearly duplicate", "of one colour"
FEW = 5
"""Training images below which a class is called tiny"""


def find_problems(splits: list[Split], num_classes: int, image_size: int) -> Findings:
    """Findings of all splits, of which training comes first."""
    names = _class_names(splits, num_classes)
    findings = Findings([_classes_of(split, names) for split in splits])
    empty = {classes.split: classes.empty for classes in findings.classes}
    findings.empty = empty.get("training", [])
    findings.unvalidated = [name for name in empty.get("validation", []) if name not in findings.empty]
    if splits[0].title == "training":
        counts = findings.classes[0].counts
        findings.tiny = [f"{name} ({count})" for name, count in counts.items() if 0 < count < FEW]
    for split in splits:
        for index, scan in enumerate(split.scans):
            if scan.problem:
                findings.defects[UNREADABLE].append(_found(split, index, scan.reason, scan.problem))
            if scan.damage:
                findings.defects[DAMAGED].append(_found(split, index, scan.damage))
            label = split.samples.labels[index]
            if np.ndim(label) == 0 and not 0 <= label < num_classes:
                about = f"label {label}; MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
                findings.defects[LABELS].append(_found(split, index, about))
            if scan.mode:
                findings.notes[MODES].append(_found(split, index, scan.mode))
            if scan.size != (0, 0) and min(scan.size) < image_size:
                findings.notes[SMALL].append(_found(split, index, f"{scan.size[0]} x {scan.size[1]}"))
    for copies in _copies(splits):
        _add_copies(findings, copies)
    _add_near(findings, splits)
    return findings


def _classes_of(split: Split, names: list[str]) -> Classes:
    labels = split.samples.labels
    unlabelled = int((labels.sum(1) == 0).sum()) if labels.ndim == 2 else None
    return Classes(split.title, _counts(split, names), len(labels), unlabelled)


def _found(split: Split, index: int, about: str, kind: str = "") -> Found:
    return Found(split.title, index, split.samples.name(index), about, kind)


def _class_names(splits: list[Split], num_classes: int) -> list[str]:
    """Class names of the data set, or else its labels from 0 to the largest valid one."""
    if splits[0].samples.classes is not None:
        return splits[0].samples.classes
    if splits[0].samples.labels.ndim == 2:
        return [str(label) for label in range(splits[0].samples.labels.shape[1])]
    labels = [label for split in splits for label in np.unique(split.samples.labels).tolist()]
    return [str(label) for label in range(max((label for label in labels if 0 <= label < num_classes), default=-1) + 1)]


def _counts(split: Split, names: list[str]) -> dict[str, int]:
    """Images per class: by name, with the label where classes share a name, and by label where it has no class."""
    times = Counter(names)
    titles = [name if times[name] == 1 else f"{name} (label {label})" for label, name in enumerate(names)]
    counts = dict.fromkeys(titles, 0)
    if split.samples.labels.ndim == 2:
        return dict(zip(titles, images_of_classes(split.samples.labels, len(names)).tolist(), strict=True))
    for label, count in zip(*np.unique(split.samples.labels, return_counts=True), strict=True):
        counts[titles[label] if 0 <= label < len(names) else f"label {label}"] = int(count)
    return counts


class _Copy(NamedTuple):
    split: Split
    number: int

    @property
    def label(self) -> str:
        """The name of the class, or of all of them, as in cat;dog; numbers where classes have no names."""
        label, classes = self.split.samples.labels[self.number], self.split.samples.classes
        numbers = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(label).tolist()
        names = [classes[one] if classes and 0 <= one < len(classes) else f"label {one}" for one in numbers]
        return ";".join(map(str, names)) or "no label"

    @property
    def name(self) -> str:
        return self.split.samples.name(self.number)

    def found(self, other: _Copy, alike: str = "the same bytes as") -> Found:
        """Finding of this image, which has the bytes of `other`, or nearly its pixels."""
        labels = "" if self.label == other.label else f", but {self.label} instead of {other.label}"
        return _found(self.split, self.number, f"{alike} {other.name}{_link(self.name, other.name)}{labels}")


def _link(name: str, other: str) -> str:
    try:
        if not os.path.samefile(name, other):
            return ""
    except (OSError, ValueError):  # not files, but images in a tar file or a table
        return ""
    if os.path.islink(name) or os.path.islink(other):
        return "; the same file by a symbolic link"
    if os.path.realpath(name) != os.path.realpath(other):
        return "; the same file by a hard link"
    return "; the same file by a folder that is a link"


def _copies(splits: list[Split]) -> Iterator[list[_Copy]]:
    """Groups of images with equal bytes, across all splits."""
    groups: dict[bytes, list[_Copy]] = {}
    for split in splits:
        for index, scan in enumerate(split.scans):
            if scan.digest:
                groups.setdefault(scan.digest, []).append(_Copy(split, index))
    return (group for group in groups.values() if len(group) > 1)


def _add_copies(findings: Findings, copies: list[_Copy]) -> None:
    """Conflicts list every copy, since no label is known to be right. Other findings spare one, in validation first."""
    if len({copy.label for copy in copies}) > 1:
        for copy in copies:
            other = next(one for one in copies if one.label != copy.label)
            findings.defects[CONFLICTS].append(copy.found(other))
        return
    by_split = [list(of_split) for _, of_split in itertools.groupby(copies, key=lambda copy: copy.split.title)]
    for first, *later in by_split:
        findings.defects[DUPLICATES] += [copy.found(first) for copy in later]
    if len(by_split) == 2:
        training, validation = by_split
        findings.defects[OVERLAP] += [copy.found(validation[0]) for copy in training]


def _add_near(findings: Findings, splits: list[Split]) -> None:
    """Images that are nearly the same, though not byte for byte; of byte-identical ones, one stands for all.

    Validation comes first, so that an image of the training split is reported as a copy of one in validation.
    """
    copies: list[_Copy] = []
    known: set[bytes] = set()
    for split in reversed(splits):
        for index, scan in enumerate(split.scans):
            if scan.thumbnail and scan.digest not in known:
                known.add(scan.digest)
                copies.append(_Copy(split, index))
    if not copies:
        return
    pixels = np.frombuffer(b"".join(copy.split.scans[copy.number].thumbnail for copy in copies), dtype=np.uint8)
    thumbnails = Thumbnails(pixels.reshape(len(copies), -1, SIDE, SIDE))
    findings.notes[FLAT_IMAGES] += [
        _found(copies[index].split, copies[index].number, "of one colour, as the model sees it")
        for index in np.flatnonzero(thumbnails.flat).tolist()
    ]
    reported: set[int] = set()
    for first, second in near_pairs(thumbnails, np.arange(len(copies))).tolist():
        if second in reported:
            continue
        reported.add(second)
        one, other = copies[first], copies[second]
        found = other.found(one, "nearly the same image as")
        if one.split is other.split:
            findings.notes[NEAR_DUPLICATES].append(found)
        else:
            findings.defects[NEAR_OVERLAP].append(found)
