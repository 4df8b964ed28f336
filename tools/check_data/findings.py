"""Defects and notes of a data set, from the scans of its images, and their report."""

from __future__ import annotations

import datetime
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.damage import line_of
from datasets.labels import images_of_classes
from tools.check_data.scan import SIDE, Split, Thumbnails, near_pairs
from utils.config.data import DataConfig
from utils.program import started_as


class Found(NamedTuple):
    """One image with a defect or a note."""

    split: str
    number: int
    name: str
    about: str
    kind: str = ""
    """Kind of problem of an unreadable image, or LINK"""


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
LINK = "link"
"""Kind of a conflict that a symbolic link made; -fix excludes it from both splits"""
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


def _place(name: str) -> tuple[str, int]:
    """The file of an image without symbolic links, and the number of links on the way to it."""
    return os.path.realpath(name), sum(map(os.path.islink, (name, *map(str, Path(name).parents))))


def _copies(splits: list[Split]) -> Iterator[list[_Copy]]:
    """Groups of images with equal bytes, across all splits."""
    groups: dict[bytes, list[_Copy]] = {}
    for split in splits:
        for index, scan in enumerate(split.scans):
            if scan.digest:
                groups.setdefault(scan.digest, []).append(_Copy(split, index))
    return (group for group in groups.values() if len(group) > 1)


def _add_copies(findings: Findings, copies: list[_Copy]) -> None:
    """Conflicts list every copy, since no label is known to be right. Other findings spare one, in validation first.

    A file with several labels because of symbolic links to it, or to its folder, keeps the label of its own place.
    """
    placed = [(copy, *_place(copy.name)) for copy in copies]
    own = {file: (copy, links) for copy, file, links in sorted(placed, key=lambda one: -one[2])}
    linked = [(copy, file) for copy, file, links in placed if links > own[file][1]]
    if linked and len({copy.label for copy in copies}) > 1:
        findings.defects[CONFLICTS] += [copy.found(own[file][0])._replace(kind=LINK) for copy, file in linked]
        copies = [copy for copy, file, links in placed if links == own[file][1]]
    else:
        placed.sort(key=lambda one: (one[0].split.title, one[2]))
        copies = [copy for copy, _, _ in placed]
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


SHOWN = 10
TABLE = 40
HEADINGS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged, although they can be read",
    LABELS: "labels out of range",
    CONFLICTS: "the same bytes with different labels",
    DUPLICATES: "duplicates within a split",
    OVERLAP: "in the training and in the validation split",
    NEAR_OVERLAP: "nearly the same in the training and in the validation split (encoded again, resized, brighter)",
    NEAR_DUPLICATES: "nearly the same within a split",
    FLAT_IMAGES: "of one colour; if they should not be, see DATA.BACKGROUND",
    MODES: "stored in another colour mode; converted when read (transparent images by DATA.BACKGROUND)",
    SMALL: "smaller than IMAGE_SIZE; enlarged when read",
}


def text(findings: Findings) -> str:
    """Report for the terminal: images per class, then defects and notes, SHOWN of each kind."""
    blocks = [_table(classes) for classes in findings.classes]
    if findings.empty:
        blocks.append(f"DEFECT: classes without training images: {_named(findings.empty)}")
    blocks += [_listing("DEFECT: ", kind, found) for kind, found in findings.defects.items() if found]
    if findings.unvalidated:
        blocks.append(f"note: classes without validation images: {_named(findings.unvalidated)}")
    if findings.tiny:
        blocks.append(f"note: classes with fewer than {FEW} training images: {_named(findings.tiny)}")
    blocks += [_listing("note: ", kind, found) for kind, found in findings.notes.items() if found]
    return "\n\n".join(blocks)


def _named(classes: list[str]) -> str:
    """Number and first names of classes."""
    return f"{len(classes)}\n    {', '.join(classes[:SHOWN])}{', ...' if len(classes) > SHOWN else ''}"


def _table(classes: Classes) -> str:
    counts = classes.counts
    lines = [f"{classes.split} split: {classes.images:,} images in {len(counts):,} classes"]
    if classes.unlabelled is not None:
        lines[0] += f", with {sum(counts.values()):,} labels; {classes.unlabelled:,} images without a label"
    lines[0] = lines[0][:1].upper() + lines[0][1:]
    shown = sorted(counts.items(), key=lambda item: item[1])
    if len(shown) > TABLE:
        lines.append(f"  the {SHOWN} smallest and the {SHOWN} largest:")
        shown = [*shown[:SHOWN], *shown[-SHOWN:]]
    lines += [f"  {count:>9,}  {name}{'' if count else '  (empty)'}" for name, count in shown]
    return "\n".join(lines)


def _listing(mark: str, kind: str, found: list[Found]) -> str:
    lines = [f"{mark}{HEADINGS[kind]}: {len(found):,}"]
    if kind == MODES:
        lines[0] += (
            " (" + ", ".join(f"{count:,} {mode}" for mode, count in Counter(f.about for f in found).items()) + ")"
        )
    lines += [f"    {one.name}: {one.about}" for one in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"    ... and {len(found) - SHOWN:,} more; -json FILE lists all")
    return "\n".join(lines)


def as_json(findings: Findings) -> dict[str, Any]:
    """Content of the -json file."""

    def listed(kinds: dict[str, list[Found]]) -> dict[str, Any]:
        return {
            kind.replace(" ", "_").lower(): [
                {"part": f.split, "name": f.name, "about": f.about, **({"kind": f.kind} if f.kind else {})}
                for f in found
            ]
            for kind, found in kinds.items()
        }

    return {
        "clean": findings.clean,
        "classes": {classes.split: classes.counts for classes in findings.classes},
        **({"images_without_label": unlabelled} if (unlabelled := _unlabelled(findings)) else {}),
        "defects": {"empty_classes": findings.empty, **listed(findings.defects)},
        "notes": {
            "classes_without_validation_images": findings.unvalidated,
            "tiny_classes": findings.tiny,
            **listed(findings.notes),
        },
    }


def _unlabelled(findings: Findings) -> dict[str, int]:
    """By split; empty where every image has one label."""
    return {one.split: one.unlabelled for one in findings.classes if one.unlabelled is not None}


def to_exclude(findings: Findings, small: bool) -> list[Found]:
    """Images for the exclude list, each once.

    Duplicates are removed from the training split alone, so that results on the validation split stay comparable.
    """
    chosen = findings.defects[UNREADABLE] + findings.defects[DAMAGED]
    for kind in (OVERLAP, NEAR_OVERLAP, CONFLICTS, DUPLICATES):
        chosen += [found for found in findings.defects[kind] if found.split == "training" or found.kind == LINK]
    if small:
        chosen += findings.notes[SMALL]
    return list({(found.split, found.number): found for found in reversed(chosen)}.values())[::-1]


def excluded_words(chosen: list[Found], findings: Findings) -> str:
    """What the list removes and why, one line per split and reason."""
    reasons = {
        UNREADABLE: "cannot be read",
        DAMAGED: "damaged",
        OVERLAP: "also in validation, byte for byte",
        NEAR_OVERLAP: "nearly the same as an image in validation",
        CONFLICTS: "copies with different labels, of which none is known to be right",
        DUPLICATES: "duplicates",
        SMALL: "smaller than IMAGE_SIZE",
    }
    counts: Counter[tuple[str, str]] = Counter()
    listed = {
        kind: {(f.split, f.number) for f in {**findings.defects, **findings.notes}.get(kind, [])} for kind in reasons
    }
    for found in chosen:
        kind = next(kind for kind, places in listed.items() if (found.split, found.number) in places)
        counts[found.split, kind] += 1
    return "\n".join(f"  {count:>7,} {split} images: {reasons[kind]}" for (split, kind), count in counts.items())


def exclude_list(chosen: list[Found], data: DataConfig) -> str:
    """Content of the exclude list. Lines of the current DATA.EXCLUDE stay, since those images were not checked."""
    before = Path(data.EXCLUDE).expanduser().read_text(encoding="utf-8-sig").rstrip("\n") if data.EXCLUDE else ""
    today = datetime.date.today().isoformat()
    head = f"# Images to exclude (DATA.EXCLUDE), found by {started_as('scripts/check_data.py')} on {today}"
    lines = [line_of(found.name, found.about, data) for found in chosen]
    return "\n".join([*([before] if before else []), head, *lines]) + "\n"
