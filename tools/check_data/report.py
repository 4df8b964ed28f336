"""Report of the findings about a data set: for the terminal, as JSON, and as a list of images to exclude."""

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from datasets.base import name_prefix
from datasets.examine.findings import (
    CONFLICTS,
    DAMAGED,
    DUPLICATES,
    NEAR_OVERLAP,
    OVERLAP,
    PIXELS,
    SMALL,
    UNREADABLE,
    Finding,
    Findings,
    Kind,
    Split,
)
from datasets.exclude import line_of, text_of
from engine.report.trust import doubts
from utils.config.data import DataConfig
from utils.log import log
from utils.program import started_as

SHOWN = 5
"""Lines of each kind of finding, and rows of the smallest and of the largest classes"""


def report_text(findings: Findings, data: DataConfig, advice: list[str]) -> str:
    """Return the report for the terminal: a summary, the advice, doubts, class sizes, and a few findings of each kind.

    Names of images are shortened by the path of the data set.
    """
    # Kind of finding -> findings of this kind: first the defects, then the notes.
    all_kinds = findings.of_kinds(defects=True) | findings.of_kinds(defects=False)
    by_kind = {kind: of_kind for kind, of_kind in all_kinds.items() if of_kind}
    summary = []
    for split, class_sizes in findings.classes.items():
        line = f"{split.capitalize()} split: {findings.images[split]:,} images in {len(class_sizes):,} classes"
        if split in findings.unlabelled:
            unlabelled = f"{findings.unlabelled[split]:,} images without a label"
            line += f", with {sum(class_sizes.values()):,} labels; {unlabelled}"
        summary.append(line)

    # If more than half of the images are small, one line says so, and the small images are not listed.
    small_images = len(by_kind.get(SMALL, ()))
    all_images = sum(findings.images.values())
    if small_images > all_images / 2:
        del by_kind[SMALL]
        summary.append(
            f"note: {small_images:,} of {all_images:,} images are {SMALL.heading}, which adds no detail (-image_size)"
        )

    summary += [f"{kind.title}: {_count_in_words(of_kind)}" for kind, of_kind in by_kind.items()]
    if findings.modes:
        modes = ", ".join(f"{mode} {count:,}" for mode, count in findings.modes.items())
        summary.append(f"note: colour modes: {modes}")
    trust = [f"  {doubt.words()}" for doubt in doubts(asdict(findings))]
    if trust:
        trust.insert(0, "How far an accuracy on the validation split can be trusted:")
    blocks = [summary, advice, trust, _class_table(findings.classes)]
    for kind, of_kind in by_kind.items():
        blocks.append([f"{kind.title}:", *_finding_lines(of_kind, name_prefix(data))])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _count_in_words(findings: Sequence[str | Finding]) -> str:
    """Count the findings of a kind, and those with another label or in other bytes, as in `7, 2 with another label`."""
    words = f"{len(findings):,}"
    images = [finding for finding in findings if isinstance(finding, Finding)]
    relabelled = sum(image.contradicts for image in images)
    if relabelled:
        words += f", {relabelled:,} with another label in another split"
    in_other_bytes = sum(image.kind == PIXELS for image in images)
    if in_other_bytes:
        words += f", {in_other_bytes:,} with the same pixels in other bytes"
    return words


def _class_table(classes: dict[str, dict[str, int]]) -> list[str]:
    """Return lines of a table of the images per class in each split, with the smallest and the largest classes.

    `classes`: title of each split -> name of each class -> number of images.
    """
    rows = []
    for name in dict.fromkeys(itertools.chain.from_iterable(classes.values())):
        rows.append(([class_sizes.get(name, 0) for class_sizes in classes.values()], name))
    rows.sort()
    shown = rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], *rows[-SHOWN:]]
    headings = " ".join(f"{split:>10}" for split in classes)
    lines = [f"Images per class, {len(shown)} of {len(rows)} classes:", f"  {headings}  class"]
    for counts, name in shown:
        columns = " ".join(f"{count:>10,}" for count in counts)
        lines.append(f"  {columns}  {name}")
    return lines


def _finding_lines(findings: Sequence[str | Finding], prefix: str) -> list[str]:
    """Return lines on the first findings of a kind, and how many more there are. `prefix` is cut off names.

    A pair of copies may be two findings, A as a copy of B and B as a copy of A. One line names both.
    """
    lines: dict[str | frozenset[str], str] = {}

    # Copies whose label differs in another split matter most, so they come first.
    for finding in sorted(findings, key=lambda finding: isinstance(finding, str) or not finding.contradicts):
        if isinstance(finding, str):
            lines[finding] = f"    {finding}"
            continue
        pair = frozenset({finding.name, finding.copy_of})
        description = finding.description.replace(finding.copy_of, finding.copy_of.removeprefix(prefix))
        lines.setdefault(pair, f"    {finding.name.removeprefix(prefix)}: {description}")
    shown = list(lines.values())[:SHOWN]
    if len(lines) > SHOWN:
        shown.append(f"    ... and {len(lines) - SHOWN:,} more; -json FILE lists all")
    return shown


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the content of the -json file: `clean` (no defects), class sizes, and all findings by their kind."""
    content: dict[str, Any] = {"clean": findings.clean, "classes": findings.classes}
    if findings.unlabelled:
        content["images_without_label"] = findings.unlabelled
    kinds = {"defects": findings.of_kinds(defects=True), "notes": findings.of_kinds(defects=False)}
    for key, by_kind in kinds.items():
        content[key] = {kind.name: list(map(_finding_as_json, of_kind)) for kind, of_kind in by_kind.items()}
    content["shortcuts"] = list(map(asdict, findings.shortcuts))
    return content


def _finding_as_json(finding: str | Finding) -> Any:
    """Return a string as it is, and a finding about an image as a dictionary."""
    if isinstance(finding, str):
        return finding
    entry = {"part": finding.split, "name": finding.name, "about": finding.description}
    return {**entry, "kind": finding.kind} if finding.kind else entry


class Excluded(NamedTuple):
    """List of images to exclude, with a summary of it."""

    content: str
    """Text of the file"""
    summary: str
    """How many images are excluded and why, one line per split and reason"""
    images: int
    """Number of excluded images"""


REASONS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged",
    OVERLAP: "also in another split, byte for byte",
    NEAR_OVERLAP: "nearly the same as one of another split",
    CONFLICTS: "copies with different labels, of which none is known to be right",
    DUPLICATES: "duplicates",
}
"""Kinds of defects whose images are excluded -> the reason, in the summary. The first kind that an image has counts."""


def exclude_list(findings: Findings, splits: list[Split], data: DataConfig, near: bool) -> Excluded:
    """List images for DATA.EXCLUDE. `near`: also training images that are nearly the same as one of another split.

    Copies are removed from the training split alone, so that results on the other splits stay comparable.
    Lines of the current DATA.EXCLUDE stay, since those images were not checked.
    Images with storage errors are comments, because the storage may return later.
    """
    images_to_exclude = _images_to_exclude(findings, splits, near)
    lines = []
    counts = Counter[tuple[str, Kind, bool]]()  # by split, kind of defect, and whether it is a copy in other bytes
    for kind_of_defect, image in images_to_exclude:
        line = line_of(image.name, image.description, data)
        if image.kind == "storage":
            line = f"# {line}"
        else:
            in_other_bytes = image.kind == PIXELS
            counts[image.split, kind_of_defect, in_other_bytes] += 1
        lines.append(line)
    storage_errors = len(images_to_exclude) - counts.total()
    if storage_errors:
        log.warning(
            "Images not excluded, because of storage errors: %d. Check again when the storage is back.", storage_errors
        )
    summary = []
    for (split, kind_of_defect, in_other_bytes), count in counts.items():
        reason = REASONS[kind_of_defect]
        if in_other_bytes:
            reason = f"{reason.removesuffix(', byte for byte')} (the same pixels in other bytes)"
        summary.append(f"  {count:>7,} {split} images: {reason}")
    return Excluded(text_of_list(lines, data), "\n".join(summary), counts.total())


def _images_to_exclude(findings: Findings, splits: Sequence[Split], near: bool) -> list[tuple[Kind, Finding]]:
    """Return the images to exclude, each once, with its first kind of defect.

    Unreadable and damaged images are excluded from all splits, copies only from training. `near`: also exclude training
    images that are nearly the same as one of another split.
    """
    chosen: dict[tuple[str, str], tuple[Kind, Finding]] = {}
    images_of_other_splits = itertools.chain.from_iterable(split.images() for split in splits[1:])
    names_in_other_splits = {image.name for image in images_of_other_splits}
    for kind in REASONS:
        if kind == NEAR_OVERLAP and not near:
            continue
        is_broken = kind in (UNREADABLE, DAMAGED)
        for image in findings.by_kind.get(kind, ()):
            in_training = image.split == "training"
            # A table may list one file twice, in one split or in two. A line in the exclude list names the file, so it
            # would remove both.
            twice_in_split = image.name == image.copy_of
            in_two_splits = in_training and image.name in names_in_other_splits
            if (twice_in_split or in_two_splits) and not is_broken:
                log.warning("%s: is listed twice; correct the table, which DATA.EXCLUDE cannot.", image.name)
            elif is_broken or in_training:
                chosen.setdefault((image.split, image.name), (kind, image))
    return list(chosen.values())


def text_of_list(lines: list[str], data: DataConfig) -> str:
    """Return the text of an exclude list: the lines of the list in use, if there is one, a heading, and new lines."""
    lines_in_use = text_of(data).rstrip("\n")
    today = datetime.date.today().isoformat()
    heading = f"# Images to exclude (DATA.EXCLUDE), found by {started_as('scripts/check_data.py')} on {today}"
    before = [lines_in_use] if lines_in_use else []
    return "\n".join([*before, heading, *lines, ""])
