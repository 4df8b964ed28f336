"""Findings about a data set whose images were all scanned."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from datasets.examine.copies import add_copies, finding_of_copy
from datasets.examine.findings import (
    DAMAGED,
    EMPTY_CLASSES,
    FEW,
    FLAT_IMAGES,
    LABELS,
    LESSER_SHORTCUTS,
    NEAR_CONFLICTS,
    NEAR_DUPLICATES,
    NEAR_OVERLAP,
    SHORTCUTS,
    TINY,
    UNREADABLE,
    UNVALIDATED,
    Findings,
    Image,
    Split,
)
from datasets.examine.headers import add_headers, add_sources
from datasets.examine.shortcuts import find_shortcuts
from tools.check_data.near import near_pairs
from tools.check_data.scan import thumbnails_of
from utils.config.data import DataConfig


def find_problems(splits: Sequence[Split], num_classes: int, data: DataConfig) -> Findings:
    """Return all defects of the scanned splits, and all notes on them. The training split comes first in `splits`."""
    samples_of = {split.title: split.samples for split in splits}
    findings = Findings.of(samples_of, data, unnamed="", num_classes=num_classes)

    # Findings about labels and classes. `Findings.of` has computed some; the report reads them from `by_kind`.
    for title, samples in samples_of.items():
        if samples.labels.ndim == 2:
            findings.unlabelled[title] = int((samples.labels.sum(1) == 0).sum())
    class_sizes = findings.classes.get("training", {})
    findings.by_kind[EMPTY_CLASSES] = [name for name, count in class_sizes.items() if not count]
    findings.by_kind[UNVALIDATED] = findings.unvalidated
    findings.by_kind[TINY] = [f"{name} ({count})" for name, count in class_sizes.items() if 0 < count < FEW]

    # Findings about single images, then about images in comparison with each other
    images = list(chain.from_iterable(split.images() for split in splits))
    for image in images:
        _add_defects(findings, image, num_classes)
    add_headers(findings, images, data)
    add_sources(findings, images)
    validation = [image for image in images if image.split.title == "validation"]
    findings.shortcuts = find_shortcuts(list(splits[0].images()), lambda: validation)
    for shortcut in findings.shortcuts:
        kind = SHORTCUTS if shortcut.nearly_all else LESSER_SHORTCUTS
        findings.by_kind[kind].append(f"{shortcut.sentence}. {shortcut.advice}.")
    add_copies(findings, images)
    _add_near(findings, splits)
    findings.related = _related(findings, list(splits[0].images()), validation)
    return findings


def _related(findings: Findings, training: Sequence[Image], validation: Sequence[Image]) -> list[int]:
    """Return the indices of the validation images with a relative in training: a copy, or an image of their group."""
    contents = {image.scan.same for image in training if image.scan.same}
    groups = {image.group for image in training if image.group}
    # A training image that is nearly the same as a validation image is reported as its copy.
    nearly_copied = {finding.copy_of for finding in findings.by_kind[NEAR_OVERLAP] if finding.split == "training"}
    return [
        image.index_in_split
        for image in validation
        if image.scan.same in contents or image.group in groups or image.name in nearly_copied
    ]


def _add_defects(findings: Findings, image: Image, num_classes: int) -> None:
    """Add the defects of one image: it is unreadable or damaged, or its label is out of range."""
    scan = image.scan
    label = image.split.samples.labels[image.index_in_split]
    if scan.problem:  # its kind in a word; the reason is the message about it
        findings.add(UNREADABLE, image, description=scan.reason, problem=scan.problem)
    if scan.damage:  # the decoder could read the image, but warned of damage
        findings.add(DAMAGED, image, description=scan.damage)
    is_one_label = np.ndim(label) == 0  # else it is a row of 0 and 1, which cannot be out of range
    if is_one_label and not 0 <= label < num_classes:
        allows = f"MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
        findings.add(LABELS, image, f"label {label}; {allows}")


def _add_near(findings: Findings, splits: Sequence[Split]) -> None:
    """Add the images that are nearly the same, though not pixel for pixel, and those almost of one colour.

    In a pair, the image that comes later is reported as a copy of the earlier one. The images of the last split come
    first here, so that a training image is reported as a copy of a validation image, not the other way round.
    """
    # Of images with equal pixels, only the first is compared.
    by_pixels = dict[bytes, Image]()
    for split in reversed(splits):
        for image in split.images():
            if image.scan.thumbnail:
                by_pixels.setdefault(image.scan.same, image)
    if not by_pixels:
        return
    images = list(by_pixels.values())
    thumbnails = thumbnails_of([image.scan for image in images])
    for index in np.flatnonzero(thumbnails.flat).tolist():
        findings.add(FLAT_IMAGES, images[index], "almost of one colour, as the model sees it")

    # A copy is reported once for each split that has an original, but with every label that contradicts its own.
    reported = set[tuple[int, str]]()
    for original_index, copy_index in near_pairs(thumbnails).tolist():
        original = images[original_index]
        copy = images[copy_index]
        kind = NEAR_OVERLAP
        if original.split is copy.split:
            kind = NEAR_DUPLICATES if original.label == copy.label else NEAR_CONFLICTS
        copy_and_split = copy_index, original.split.title
        if copy_and_split in reported and kind is not NEAR_CONFLICTS:
            continue
        reported.add(copy_and_split)
        findings.by_kind[kind].append(finding_of_copy(copy, original, "nearly the same image as"))
