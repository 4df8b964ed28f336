"""Do the labels fit the classifier?"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from utils.errors import UserError

log = logging.getLogger("vitamp")

ANY_LABEL = 2**63
"""Instead of a number of classes: no label is checked, for tools that look for wrong ones. Beyond what int64 holds."""


def check_label(label: int, num_classes: int, where: str) -> None:
    """`where` opens the sentence."""
    least = -ANY_LABEL if num_classes == ANY_LABEL else 0
    if not least <= label < num_classes:
        raise UserError(
            f"{where}: label {label} does not fit MODEL.NUM_CLASSES {num_classes}: "
            f"labels go from {least} to {num_classes - 1}. Correct the line or set -num_classes."
        )


def check_class_count(classes: int, num_classes: int, owner: str) -> None:
    """More classes than the classifier has is an error. `owner` opens the sentence."""
    if classes > num_classes:
        raise UserError(
            f"{owner} has {classes} classes, but MODEL.NUM_CLASSES is {num_classes}. Set -num_classes {classes}."
        )


def tell_spare_classes(classes: int, num_classes: int, owner: str) -> None:
    """Fewer is allowed (a pretrained classifier is often kept whole) but worth a word."""
    if classes < num_classes:
        log.info("%s has %d classes; %d of MODEL.NUM_CLASSES stay unused.", owner, classes, num_classes - classes)


def tell_empty_classes(labels: np.ndarray, classes: Sequence[object], owner: str) -> None:
    """A class without an image is never learned: often a sign that images are missing. `classes` are their names."""
    missing = np.flatnonzero(np.bincount(labels, minlength=len(classes))[: len(classes)] == 0)
    if len(missing):
        first = classes[missing[0]]
        log.warning(
            "%s has no image for %d of its %d classes, %s among them.", owner, len(missing), len(classes), first
        )
