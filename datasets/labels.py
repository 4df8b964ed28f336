"""Do the labels fit the classifier?"""

from __future__ import annotations

import logging

from utils.errors import UserError

log = logging.getLogger("vitamp")


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
