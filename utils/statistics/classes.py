"""Balanced accuracy and macro F1, means over classes: what each image adds to them, and their intervals (95 %).

The intervals are Wilson's, with an effective number of images (`wilson_of_variance`) by the sum of the squared
influences of the images. Which classes they are of is chance too: it changes macro F1, which depends on how frequent a
class is. That is also biased where a class has few images; its interval is around the value without the bias. A
bootstrap covers too rarely there: if all images of a class are right, it knows no other outcome.

Where images are in groups (DATA.GROUP), the variance is larger by one factor, the design effect of the influences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, wilson_of_variance
from vitamp.metrics import BALANCED, MACRO_F1

ADDED = 2
"""Images that are added to each class for its variance, which is never 0 then (Agresti and Coull)"""
MOST_SINGLE = 0.1
"""Fraction of classes with a single image, above which too many others may have none for an interval"""
FEWEST_OF_TWO = 4
"""Of two classes, one with fewer images has too much weight for an interval of their mean"""
WIDEST = 60
"""Percentage points; an interval of macro F1 that is wider says nothing"""


class Counts(NamedTuple):
    """Images of each class."""

    right: np.ndarray
    images: np.ndarray
    predicted: np.ndarray

    @classmethod
    def of(cls, labels: np.ndarray, guesses: np.ndarray, classes: int | None = None) -> Counts:
        if classes is None:
            classes = int(max(labels.max(), guesses.max())) + 1
        return cls(
            right=np.bincount(labels[labels == guesses], minlength=classes),
            images=np.bincount(labels, minlength=classes),
            predicted=np.bincount(guesses, minlength=classes),
        )

    @property
    def of_either(self) -> np.ndarray:
        """Images and predictions of the class."""
        return self.images + self.predicted

    @property
    def f1(self) -> np.ndarray:
        return 2 * self.right / np.maximum(self.of_either, 1)

    @property
    def too_few(self) -> bool:
        """Whether one of two classes has too few images for an interval of their mean."""
        return len(self.images) == 2 and int(self.images.min()) < FEWEST_OF_TWO


def balanced_accuracy_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """What each image adds to it, in percent: their mean is the metric."""
    counts = Counts.of(labels, guesses)
    recalls = counts.right / np.maximum(counts.images, 1)
    influence = ((labels == guesses) - recalls[labels]) / counts.images[labels]
    return _by_image(recalls[counts.images > 0], influence, labels, counts.images)


def macro_f1_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """What each image adds to it, in percent: their mean is the metric."""
    counts = Counts.of(labels, guesses)
    sizes = counts.of_either
    f1 = counts.f1
    pull = f1 / np.maximum(sizes, 1)  # of another image or prediction of the class
    influence = np.where(labels == guesses, 2 / sizes[labels] - 2 * pull[labels], -pull[labels] - pull[guesses])
    return _by_image(f1[sizes > 0], influence, labels, counts.images)


def _by_image(of_known: np.ndarray, influence: np.ndarray, labels: np.ndarray, images: np.ndarray) -> np.ndarray:
    """`of_known`: the metric of each class that counts in the mean. `images`: of each class."""
    influence *= np.sqrt(images / np.maximum(images - 1, 1))[labels]  # as an unbiased variance is larger
    return 100 * (float(of_known.mean()) + len(labels) * influence / len(of_known))


def likely_recalls(right: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Recalls of the classes, with images added that are as often right as the mean class.

    If half of those added were right, errors of many classes would add up to an interval that is too wide.
    """
    usual = float((right / np.maximum(images, 1)).sum() + ADDED / 2) / (np.count_nonzero(images) + ADDED)
    return (right + ADDED * usual) / (images + ADDED)


def balanced_accuracy_interval(
    labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()
) -> Interval | None:
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    present = counts.images > 0
    images = counts.images[present]
    right = counts.right[present]
    sure = likely_recalls(right, images)
    variance = float((sure * (1 - sure) / images).sum()) / len(images) ** 2
    inflation = variance_inflation(balanced_accuracy_by_image(labels, guesses), groups)
    return wilson_of_variance(float((right / images).mean()), variance, int(images.sum()), inflation)


def macro_f1_interval(labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()) -> Interval | None:
    """The influence of an image depends on its class and on whether, or for which class, it is mistaken."""
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    right, images, _ = counts
    classes_known = int((counts.of_either > 0).sum())
    sizes = np.maximum(counts.of_either, 1)
    f1 = counts.f1
    pull = f1 / sizes / classes_known  # that another image or prediction of the class has on the mean
    if_right = 2 / sizes / classes_known - 2 * pull
    influence = np.where(labels == guesses, 0.0, -pull[labels] - pull[guesses])
    wrong = images - right
    squares = np.bincount(labels, influence**2, minlength=classes) / np.maximum(wrong, 1)
    sure = likely_recalls(right, images)
    of_classes = images * (sure * if_right**2 + (1 - sure) * np.where(wrong > 0, squares, pull**2))
    freedom = max(len(labels) - classes_known, 1)  # as an unbiased variance is larger
    either = counts.of_either - right
    # F1 is a concave function of right / either, so by its second order it is too low by:
    bias = f1 * (1 - f1) / sizes * either / np.maximum(either - 1, 1)
    found = unbiased_interval(
        value=float(f1.sum()) / classes_known,
        unbiased=float((f1 + bias).sum()) / classes_known,
        variance=float(of_classes.sum()) * len(labels) / freedom,
        most=len(labels),
        images=images[images > 0],
        inflation=variance_inflation(macro_f1_by_image(labels, guesses), groups),
    )
    if found is None or found.high - found.low > WIDEST:
        return None
    return found


def unbiased_interval(
    value: float, unbiased: float, variance: float, most: float, images: np.ndarray, inflation: float
) -> Interval | None:
    """None where classes have too few `images`: the bias is uncertain, or puts the value outside the interval."""
    found = wilson_of_variance(unbiased, variance, most, inflation)
    uncertain = (images == 1).mean() > MOST_SINGLE
    outside = 200 * abs(unbiased - value) > found.high - found.low
    return None if uncertain or outside else found


BY_CLASS = {
    BALANCED: (balanced_accuracy_interval, balanced_accuracy_by_image),
    MACRO_F1: (macro_f1_interval, macro_f1_by_image),
}
"""Means over classes -> interval, and what each image adds to them"""
