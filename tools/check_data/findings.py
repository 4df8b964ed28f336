"""What is found in a data set of which every image was scanned."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from datasets.examine.copies import add_copies, as_copy
from datasets.examine.findings import (
    DAMAGED,
    EMPTY_CLASSES,
    FEW,
    FLAT_IMAGES,
    LABELS,
    NEAR_CONFLICTS,
    NEAR_DUPLICATES,
    NEAR_OVERLAP,
    TINY,
    UNREADABLE,
    UNVALIDATED,
    Findings,
    Image,
    Split,
)
from datasets.examine.headers import add_headers, add_sources
from tools.check_data.near import near_pairs
from tools.check_data.scan import thumbnails_of
from utils.config.data import DataConfig


def find_problems(splits: Sequence[Split], num_classes: int, data: DataConfig) -> Findings:
    """Findings of all splits, of which training comes first."""
    samples = {split.title: split.samples for split in splits}
    findings = Findings.of(samples, data, unnamed="", num_classes=num_classes)
    for title, of in samples.items():
        if of.labels.ndim == 2:
            findings.unlabelled[title] = int((of.labels.sum(1) == 0).sum())
    of_training = findings.classes.get("training", {})
    findings.found[EMPTY_CLASSES] = [name for name, count in of_training.items() if not count]
    findings.found[UNVALIDATED] = findings.unvalidated
    findings.found[TINY] = [f"{name} ({count})" for name, count in of_training.items() if 0 < count < FEW]
    images = list(chain.from_iterable(split.images() for split in splits))
    for image in images:
        _add_defects(findings, image, num_classes)
    add_headers(findings, images, data)
    add_sources(findings, images, data)
    add_copies(findings, images)
    _add_near(findings, splits)
    return findings


def _add_defects(findings: Findings, image: Image, num_classes: int) -> None:
    """What is wrong with an image alone."""
    scan = image.scan
    label = image.split.samples.labels[image.number]
    if scan.problem:
        findings.add(UNREADABLE, image, scan.reason, scan.problem)
    if scan.damage:
        findings.add(DAMAGED, image, scan.damage)
    if np.ndim(label) == 0 and not 0 <= label < num_classes:
        allows = f"MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
        findings.add(LABELS, image, f"label {label}; {allows}")


def _add_near(findings: Findings, splits: Sequence[Split]) -> None:
    """Images that are nearly the same, though not pixel for pixel; of identical ones, one stands for all.

    The last split comes first, so that an image of the training split is reported as a copy of one in validation.
    """
    by_digest = dict[bytes, Image]()
    for split in reversed(splits):
        for image in split.images():
            if image.scan.thumbnail:
                by_digest.setdefault(image.scan.same, image)
    if not by_digest:
        return
    images = list(by_digest.values())
    thumbnails = thumbnails_of([image.scan for image in images])
    for index in np.flatnonzero(thumbnails.flat).tolist():
        findings.add(FLAT_IMAGES, images[index], "almost of one colour, as the model sees it")
    reported = set[tuple[int, str]]()
    for first, second in near_pairs(thumbnails).tolist():
        one = images[first]
        other = images[second]
        kind = NEAR_OVERLAP
        if one.split is other.split:
            kind = NEAR_DUPLICATES if one.label == other.label else NEAR_CONFLICTS
        once = second, one.split.title
        if once in reported and kind is not NEAR_CONFLICTS:  # once for each split
            continue
        reported.add(once)
        findings.found[kind].append(as_copy(other, one, "nearly the same image as"))
