"""Metrics of one label per image that weigh all classes alike, from three counts per class.

The counts are whole numbers, so they are exact with any batches and any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class ClassCounts(NamedTuple):
    """One number per class."""

    right: list[int]
    """Images of the class that are predicted as it"""
    labelled: list[int]
    """Images of the class"""
    predicted: list[int]
    """Images that are predicted as the class"""

    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have images, as a fraction; scikit-learn's `balanced_accuracy_score`."""
        return _mean(right / images for right, images, _ in zip(*self, strict=True) if images)

    def macro_f1(self) -> float:
        """Mean F1 over the classes that have images or are predicted; scikit-learn's `f1_score(average="macro")`.

        A class that is predicted but has no image counts with an F1 of 0.
        """
        return _mean(
            2 * right / (images + predicted)
            for right, images, predicted in zip(*self, strict=True)
            if images or predicted
        )


def _mean(values: Iterable[float]) -> float:
    """Correctly rounded, so that ranks on different processors get the same bits and agree on the best validation."""
    found = list(values)
    return math.fsum(found) / len(found) if found else math.nan
