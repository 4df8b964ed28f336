"""Defects and notes of a data set, from the scans of its images, and their report."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.exclude import line_of, name_prefix
from datasets.labels import images_of_classes
from tools.check_data.scan import SIDE, Split, Thumbnails, near_pairs
from utils.config.data import DataConfig
from utils.program import started_as


class Found(NamedTuple):
    """One image with a defect or a note."""

    split: str
    name: str
    about: str
    kind: str = ""
    """Kind of problem of an unreadable image"""
    copy_of: str = ""
    """Name of the image that it is a copy of"""


@dataclass
class Findings:
    """Defects, which spoil training or its metrics, and notes, which do not."""

    classes: dict[str, dict[str, int]]
    """Images per class, by split"""
    images: dict[str, int]
    """By split"""
    unlabelled: dict[str, int]
    """Images without a label, by split; empty where every image has exactly one"""
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


class _Image(NamedTuple):
    split: Split
    number: int

    @property
    def label(self) -> str:
        """The name of the class, or of all of them, as in cat;dog; numbers where classes have no names."""
        label, classes = self.split.samples.labels[self.number], self.split.samples.classes
        numbers = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(label).tolist()
        names = [classes[one] if classes and 0 <= one < len(classes) else f"label {one}" for one in numbers]
        return ";".join(map(str, names)) or "no label"

    def found(self, about: str, kind: str = "", copy_of: str = "") -> Found:
        return Found(self.split.title, self.split.samples.name(self.number), about, kind, copy_of)

    def copy_of(self, other: _Image, alike: str = "the same bytes as") -> Found:
        """Finding of this image, which has the bytes of `other`, or nearly its pixels."""
        labels = "" if self.label == other.label else f", but {self.label} instead of {other.label}"
        name = other.split.samples.name(other.number)
        return self.found(f"{alike} {name}{labels}", copy_of=name)


def find_problems(splits: list[Split], num_classes: int, image_size: int) -> Findings:
    """Findings of all splits, of which training comes first."""
    counts = _counts(splits, num_classes)
    rows = {split.title: split.samples.labels for split in splits if split.samples.labels.ndim == 2}
    unlabelled = {title: int((labels.sum(1) == 0).sum()) for title, labels in rows.items()}
    findings = Findings(counts, {split.title: len(split.samples) for split in splits}, unlabelled)
    of_training, of_validation = (counts.get(title, {}) for title in ("training", "validation"))
    findings.empty = [name for name, count in of_training.items() if not count]
    findings.unvalidated = [name for name, count in of_validation.items() if not count and name not in findings.empty]
    findings.tiny = [f"{name} ({count})" for name, count in of_training.items() if 0 < count < FEW]
    copies: dict[bytes, list[_Image]] = {}
    for split in splits:
        for index, scan in enumerate(split.scans):
            image = _Image(split, index)
            if scan.problem:
                findings.defects[UNREADABLE].append(image.found(scan.reason, scan.problem))
            if scan.damage:
                findings.defects[DAMAGED].append(image.found(scan.damage))
            label = split.samples.labels[index]
            if np.ndim(label) == 0 and not 0 <= label < num_classes:
                about = f"label {label}; MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
                findings.defects[LABELS].append(image.found(about))
            if scan.mode:
                findings.notes[MODES].append(image.found(scan.mode))
            if scan.size != (0, 0) and min(scan.size) < image_size:
                findings.notes[SMALL].append(image.found(f"{scan.size[0]} x {scan.size[1]}"))
            if scan.digest:
                copies.setdefault(scan.digest, []).append(image)
    for images in copies.values():
        if len(images) > 1:
            _add_copies(findings, images)
    _add_near(findings, splits)
    return findings


def _counts(splits: list[Split], num_classes: int) -> dict[str, dict[str, int]]:
    """Images per class, by split: by name, with the label where classes share one, and by label where it has no class.

    Without names, the labels from 0 to the largest valid one are the names.
    """
    first = splits[0].samples
    several, names = first.labels.ndim == 2, first.classes
    if names is None:
        labels = np.unique(np.concatenate([split.samples.labels for split in splits]))
        largest = labels[(labels >= 0) & (labels < num_classes)].max(initial=-1)
        names = [str(label) for label in range(first.labels.shape[1] if several else int(largest) + 1)]
    times = Counter(names)
    titles = [name if times[name] == 1 else f"{name} (label {label})" for label, name in enumerate(names)]
    counts = {split.title: dict.fromkeys(titles, 0) for split in splits}
    for split in splits:
        if several:
            of_class = images_of_classes(split.samples.labels, len(names)).tolist()
            counts[split.title] = dict(zip(titles, of_class, strict=True))
            continue
        for label, count in zip(*np.unique(split.samples.labels, return_counts=True), strict=True):
            counts[split.title][titles[label] if 0 <= label < len(names) else f"label {label}"] = int(count)
    return counts


def _add_copies(findings: Findings, copies: list[_Image]) -> None:
    """Conflicts list every copy, since no label is known to be right. Other findings spare one, in validation first."""
    if len({copy.label for copy in copies}) > 1:
        for copy in copies:
            other = next(one for one in copies if one.label != copy.label)
            findings.defects[CONFLICTS].append(copy.copy_of(other))
        return
    by_split = [list(of_split) for _, of_split in itertools.groupby(copies, key=lambda copy: copy.split.title)]
    for first, *later in by_split:
        findings.defects[DUPLICATES] += [copy.copy_of(first) for copy in later]
    if len(by_split) == 2:
        training, validation = by_split
        findings.defects[OVERLAP] += [copy.copy_of(validation[0]) for copy in training]


def _add_near(findings: Findings, splits: list[Split]) -> None:
    """Images that are nearly the same, though not byte for byte; of byte-identical ones, one stands for all.

    Validation comes first, so that an image of the training split is reported as a copy of one in validation.
    """
    by_digest: dict[bytes, _Image] = {}
    for split in reversed(splits):
        for index, scan in enumerate(split.scans):
            if scan.thumbnail:
                by_digest.setdefault(scan.digest, _Image(split, index))
    if not by_digest:
        return
    images = list(by_digest.values())
    pixels = np.frombuffer(b"".join(one.split.scans[one.number].thumbnail for one in images), dtype=np.uint8)
    sides = np.array([min(one.split.scans[one.number].size) for one in images])
    thumbnails = Thumbnails(pixels.reshape(len(images), -1, SIDE, SIDE), sides)
    for index in np.flatnonzero(thumbnails.flat).tolist():
        findings.notes[FLAT_IMAGES].append(images[index].found("of one colour, as the model sees it"))
    reported: set[int] = set()
    for first, second in near_pairs(thumbnails).tolist():
        if second in reported:
            continue
        reported.add(second)
        one, other = images[first], images[second]
        found = other.copy_of(one, "nearly the same image as")
        if one.split is other.split:
            findings.notes[NEAR_DUPLICATES].append(found)
        else:
            findings.defects[NEAR_OVERLAP].append(found)


SHOWN = 5
"""Lines of each kind of finding; twice as many of the table of classes"""
HEADINGS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged, although they can be read",
    LABELS: "labels out of range",
    CONFLICTS: "the same bytes with different labels",
    DUPLICATES: "duplicates within a split",
    OVERLAP: "in the training and in the validation split",
    NEAR_OVERLAP: "nearly the same in the training and in the validation split (encoded again, resized)",
    NEAR_DUPLICATES: "nearly the same within a split",
    FLAT_IMAGES: "of one colour; if they should not be, see DATA.BACKGROUND",
    MODES: "stored in another colour mode; converted when read (transparent images by DATA.BACKGROUND)",
    SMALL: "smaller than IMAGE_SIZE; enlarged when read",
}


def text(findings: Findings, data: DataConfig, advice: list[str]) -> str:
    """Report for the terminal: numbers, the `advice`, then SHOWN lines of each kind, with names below DATA_PATH."""
    kinds: dict[str, Sequence[str | Found]] = {"DEFECT: classes without training images": findings.empty}
    kinds |= {f"DEFECT: {HEADINGS[kind]}": found for kind, found in findings.defects.items()}
    kinds["note: classes without validation images"] = findings.unvalidated
    kinds[f"note: classes with fewer than {FEW} training images"] = findings.tiny
    kinds |= {f"note: {HEADINGS[kind]}": found for kind, found in findings.notes.items()}
    summary = []
    for split, counts in findings.classes.items():
        summary.append(f"{split.capitalize()} split: {findings.images[split]:,} images in {len(counts):,} classes")
        if split in findings.unlabelled:
            without = f"{findings.unlabelled[split]:,} images without a label"
            summary[-1] += f", with {sum(counts.values()):,} labels; {without}"
    summary += [f"{heading}: {len(found):,}" for heading, found in kinds.items() if found]
    if modes := Counter(found.about for found in findings.notes.get(MODES, ())):
        summary.append(f"note: colour modes: {', '.join(f'{mode} {count:,}' for mode, count in modes.items())}")
    blocks = [summary, advice, _table(findings.classes)]
    blocks += [[f"{heading}:", *_lines(found, name_prefix(data))] for heading, found in kinds.items() if found]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _table(classes: dict[str, dict[str, int]]) -> list[str]:
    """Images per class of each split, of the smallest and the largest classes."""
    names = list(dict.fromkeys(itertools.chain(*classes.values())))
    rows = sorted(([of_split.get(name, 0) for of_split in classes.values()], name) for name in names)
    shown = rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], *rows[-SHOWN:]]
    lines = [f"  {' '.join(f'{count:>9,}' for count in counts)}  {name}" for counts, name in shown]
    return [f"Images per class ({', '.join(classes)}), {len(shown)} of {len(rows)} classes:", *lines]


def _lines(found: Sequence[str | Found], prefix: str) -> list[str]:
    """Lines of one kind of finding. Of two copies, each may be listed for -json and -fix; here one line names both."""
    lines: dict[str | frozenset[str], str] = {}
    for one in found:
        if isinstance(one, str):
            lines[one] = f"    {one}"
            continue
        about = one.about.replace(one.copy_of, one.copy_of.removeprefix(prefix))
        lines.setdefault(frozenset({one.name, one.copy_of}), f"    {one.name.removeprefix(prefix)}: {about}")
    more = [f"    ... and {len(lines) - SHOWN:,} more; -json FILE lists all"] if len(lines) > SHOWN else []
    return [*lines.values()][:SHOWN] + more


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
        "classes": findings.classes,
        **({"images_without_label": findings.unlabelled} if findings.unlabelled else {}),
        "defects": {"empty_classes": findings.empty, **listed(findings.defects)},
        "notes": {
            "classes_without_validation_images": findings.unvalidated,
            "tiny_classes": findings.tiny,
            **listed(findings.notes),
        },
    }


REASONS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged",
    OVERLAP: "also in validation, byte for byte",
    NEAR_OVERLAP: "nearly the same as an image in validation",
    CONFLICTS: "copies with different labels, of which none is known to be right",
    DUPLICATES: "duplicates",
}
"""Defects whose images the exclude list has"""


def exclude_list(findings: Findings, data: DataConfig, near: bool) -> tuple[str, str, int]:
    """Content of the exclude list; what it removes and why, one line per split and reason; and how many images.

    Images that are nearly the same as one in validation are removed if `near`. Duplicates are removed from the training
    split alone, so that results on the validation split stay comparable.
    Lines of the current DATA.EXCLUDE stay, since those images were not checked.
    """
    chosen: dict[tuple[str, str], tuple[str, Found]] = {}
    for kind in (kind for kind in REASONS if near or kind != NEAR_OVERLAP):
        for found in findings.defects.get(kind, ()):
            if kind in (UNREADABLE, DAMAGED) or found.split == "training":
                chosen.setdefault((found.split, found.name), (kind, found))
    before = Path(data.EXCLUDE).expanduser().read_text(encoding="utf-8-sig").rstrip("\n") if data.EXCLUDE else ""
    today = datetime.date.today().isoformat()
    head = f"# Images to exclude (DATA.EXCLUDE), found by {started_as('scripts/check_data.py')} on {today}"
    lines = [line_of(found.name, found.about, data) for _, found in chosen.values()]
    counts = Counter((found.split, kind) for kind, found in chosen.values())
    words = [f"  {count:>7,} {split} images: {REASONS[kind]}" for (split, kind), count in counts.items()]
    return "\n".join([*([before] if before else []), head, *lines]) + "\n", "\n".join(words), len(chosen)
