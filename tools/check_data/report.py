"""Report of a data set check: as text, as JSON, and as a list for DATA.EXCLUDE."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

from datasets.damage.exclude import line_of
from tools.check_data.findings import (
    CONFLICTS,
    DAMAGED,
    DUPLICATES,
    FEW,
    FLAT_IMAGES,
    LABELS,
    MODES,
    NEAR_DUPLICATES,
    NEAR_OVERLAP,
    OVERLAP,
    SMALL,
    UNREADABLE,
    Classes,
    Findings,
    Found,
)
from utils.config.data import DataConfig

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


def to_exclude(findings: Findings, duplicates: bool, small: bool) -> list[Found]:
    """Images for the exclude list, each once.

    Duplicates are removed from the training split alone, so that results on the validation split stay comparable.
    """
    chosen = findings.defects[UNREADABLE] + findings.defects[DAMAGED]
    if duplicates:
        kinds = (OVERLAP, NEAR_OVERLAP, CONFLICTS, DUPLICATES)
        chosen += [found for kind in kinds for found in findings.defects[kind] if found.split == "training"]
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
    head = f"# Images to exclude (DATA.EXCLUDE), found by scripts/check_data.py on {today}"
    lines = [line_of(found.name, found.about, data) for found in chosen]
    return "\n".join([*([before] if before else []), head, *lines]) + "\n"
