"""Report of what is found in a data set: for the terminal, as JSON, and as a list of images to exclude."""

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
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
    Findings,
    Found,
    Kind,
    Split,
)
from datasets.exclude import line_of, text_of
from utils.config.data import DataConfig
from utils.log import log
from utils.program import started_as

SHOWN = 5
"""Lines of each kind of finding; twice as many of the table of classes"""


def text(findings: Findings, data: DataConfig, advice: list[str]) -> str:
    """Report for the terminal: numbers, the `advice`, then SHOWN lines of each kind, with names below DATA_PATH."""
    kinds = findings.of_kinds(defects=True) | findings.of_kinds(defects=False)
    kinds = {kind: found for kind, found in kinds.items() if found}
    summary = []
    for split, counts in findings.classes.items():
        line = f"{split.capitalize()} split: {findings.images[split]:,} images in {len(counts):,} classes"
        if split in findings.unlabelled:
            without = f"{findings.unlabelled[split]:,} images without a label"
            line += f", with {sum(counts.values()):,} labels; {without}"
        summary.append(line)
    small = len(kinds.get(SMALL, ()))
    images = sum(findings.images.values())
    if 2 * small > images:  # a size of the data set, not of some images
        del kinds[SMALL]
        summary.append(f"note: {small:,} of {images:,} images are {SMALL.heading}, which adds no detail")
    summary += [f"{kind.title}: {_counted(found)}" for kind, found in kinds.items()]
    if findings.modes:
        modes = ", ".join(f"{mode} {count:,}" for mode, count in findings.modes.items())
        summary.append(f"note: colour modes: {modes}")
    blocks = [summary, advice, _table(findings.classes)]
    for kind, found in kinds.items():
        blocks.append([f"{kind.title}:", *_lines(found, name_prefix(data))])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _counted(found: Sequence[str | Found]) -> str:
    """Number of findings of a kind, and of those among them that matter more or less than the others."""
    words = f"{len(found):,}"
    images = [one for one in found if isinstance(one, Found)]
    other = sum(one.contradicts for one in images)
    if other:
        words += f", {other:,} with another label in another split"
    pixels = sum(one.kind == PIXELS for one in images)
    if pixels:
        words += f", {pixels:,} with the same pixels in other bytes"
    return words


def _table(classes: dict[str, dict[str, int]]) -> list[str]:
    """Images per class of each split, of the smallest and the largest classes."""
    rows = []
    for name in dict.fromkeys(itertools.chain.from_iterable(classes.values())):
        rows.append(([of_split.get(name, 0) for of_split in classes.values()], name))
    rows.sort()
    shown = rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], *rows[-SHOWN:]]
    lines = [f"Images per class ({', '.join(classes)}), {len(shown)} of {len(rows)} classes:"]
    for counts, name in shown:
        columns = " ".join(f"{count:>9,}" for count in counts)
        lines.append(f"  {columns}  {name}")
    return lines


def _lines(found: Sequence[str | Found], prefix: str) -> list[str]:
    """Lines of one kind of finding. Of two copies, each may be listed for -json and -fix; here one line names both."""
    lines: dict[str | frozenset[str], str] = {}
    for one in sorted(found, key=lambda one: isinstance(one, str) or not one.contradicts):  # those first
        if isinstance(one, str):
            lines[one] = f"    {one}"
            continue
        about = one.about.replace(one.copy_of, one.copy_of.removeprefix(prefix))
        lines.setdefault(frozenset({one.name, one.copy_of}), f"    {one.name.removeprefix(prefix)}: {about}")
    shown = list(lines.values())[:SHOWN]
    if len(lines) > SHOWN:
        shown.append(f"    ... and {len(lines) - SHOWN:,} more; -json FILE lists all")
    return shown


def as_json(findings: Findings) -> dict[str, Any]:
    """Content of the -json file."""
    content: dict[str, Any] = {"clean": findings.clean, "classes": findings.classes}
    if findings.unlabelled:
        content["images_without_label"] = findings.unlabelled
    for name, defects in (("defects", True), ("notes", False)):
        kinds = findings.of_kinds(defects)
        content[name] = {kind.name: list(map(_in_json, found)) for kind, found in kinds.items()}
    return content


def _in_json(one: str | Found) -> Any:
    if isinstance(one, str):
        return one
    about = {"part": one.split, "name": one.name, "about": one.about}
    return {**about, "kind": one.kind} if one.kind else about


class Excluded(NamedTuple):
    """The exclude list, and what it removes."""

    content: str
    words: str
    """How many images, and why: a line per split and reason"""
    images: int


REASONS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged",
    OVERLAP: "also in another split, byte for byte",
    NEAR_OVERLAP: "nearly the same as one of another split",
    CONFLICTS: "copies with different labels, of which none is known to be right",
    DUPLICATES: "duplicates",
}
"""Defects whose images the exclude list has"""


def exclude_list(findings: Findings, splits: list[Split], data: DataConfig, near: bool) -> Excluded:
    """List images for DATA.EXCLUDE; those that are nearly the same as one of another split if `near`.

    Copies are removed from the training split alone, so that results on the other splits stay comparable.
    Lines of the current DATA.EXCLUDE stay, since those images were not checked.
    Images with storage errors are comments, because the storage may return later.
    """
    chosen = _chosen(findings, splits, near)
    lines = []
    counts = Counter[tuple[str, Kind, bool]]()
    for kind, found in chosen:
        line = line_of(found.name, found.about, data)
        if found.kind == "storage":
            line = f"# {line}"
        else:
            counts[found.split, kind, found.kind == PIXELS] += 1
        lines.append(line)
    lost = len(chosen) - counts.total()
    if lost:
        log.warning("Images not excluded, because of storage errors: %d. Check again when the storage is back.", lost)
    words = []
    for (split, kind, by_pixels), count in counts.items():
        reason = REASONS[kind]
        if by_pixels:
            reason = f"{reason.removesuffix(', byte for byte')} (the same pixels in other bytes)"
        words.append(f"  {count:>7,} {split} images: {reason}")
    return Excluded(text_of_list(lines, data), "\n".join(words), counts.total())


def _chosen(findings: Findings, splits: Sequence[Split], near: bool) -> list[tuple[Kind, Found]]:
    """Images to exclude, each once, with the first kind of defect that it has."""
    chosen: dict[tuple[str, str], tuple[Kind, Found]] = {}
    others = itertools.chain.from_iterable(split.images() for split in splits[1:])
    validating = {image.name for image in others}
    for kind in REASONS:
        if kind == NEAR_OVERLAP and not near:
            continue
        for found in findings.found.get(kind, ()):
            intact = kind not in (UNREADABLE, DAMAGED)
            twice = found.name == found.copy_of or (found.split == "training" and found.name in validating)
            if intact and twice:  # a line would remove both
                log.warning("%s: is listed twice; correct the table, which DATA.EXCLUDE cannot.", found.name)
            elif not intact or found.split == "training":
                chosen.setdefault((found.split, found.name), (kind, found))
    return list(chosen.values())


def text_of_list(lines: list[str], data: DataConfig) -> str:
    """Content of a list of images to exclude, after the lines of the one in use."""
    before = text_of(data).rstrip("\n")
    today = datetime.date.today().isoformat()
    head = f"# Images to exclude (DATA.EXCLUDE), found by {started_as('scripts/check_data.py')} on {today}"
    kept = [before] if before else []
    return "\n".join([*kept, head, *lines, ""])
