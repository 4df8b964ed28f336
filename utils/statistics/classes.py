"""Intervals (95 %) of balanced accuracy and macro F1, which are means over classes, and the influence of each image.

The intervals are Wilson's, with an effective number of images (`wilson_of_variance`). The variance of the metric is the
sum of the squared influences of the images. In macro F1, this includes that other images would be of other classes,
because F1 depends on how frequent a class is.

Macro F1 is biased if a class has few images; its interval is around the value without the bias. A bootstrap would
contain the true value too rarely: if all images of a class are right, no sample of them has an error.

If images are in groups (DATA.GROUP), the variance is multiplied by the design effect of the influences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, wilson_of_variance
from vitamp.metrics import BALANCED, MACRO_F1

ADDED = 2
"""Images that are added to each class for its variance, which is never 0 then (Agresti and Coull)."""
MOST_SINGLE = 0.1
"""There is no interval if more than this fraction of the classes has a single image: others may have none by chance."""
FEWEST_OF_TWO = 4
"""With two classes, there is no interval if one has fewer images: each of them has too much weight in the mean."""
WIDEST = 60
"""Percentage points; an interval of macro F1 that is wider is useless, and not returned."""


class Counts(NamedTuple):
    """Numbers of images, each an array with one number per class."""

    right: np.ndarray
    """Images of the class that are predicted as this class."""
    images: np.ndarray
    """Images of the class."""
    predicted: np.ndarray
    """Images of any class that are predicted as this class."""

    @classmethod
    def of(cls, labels: np.ndarray, guesses: np.ndarray, classes: int | None = None) -> Counts:
        """Count the images of each class from the labels and predictions of all images.

        classes: number of classes; None: up to the highest that occurs
        """
        if classes is None:
            classes = int(max(labels.max(), guesses.max())) + 1
        return cls(
            right=np.bincount(labels[labels == guesses], minlength=classes),
            images=np.bincount(labels, minlength=classes),
            predicted=np.bincount(guesses, minlength=classes),
        )

    @property
    def of_either(self) -> np.ndarray:
        """Images of the class plus predictions of the class, the denominator of F1."""
        return self.images + self.predicted

    @property
    def f1(self) -> np.ndarray:
        """F1 of each class; 0 for a class without images and predictions."""
        return 2 * self.right / np.maximum(self.of_either, 1)

    @property
    def too_few(self) -> bool:
        """Whether one of two classes has too few images for an interval of their mean."""
        return len(self.images) == 2 and int(self.images.min()) < FEWEST_OF_TWO


def balanced_accuracy_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """The contribution of each image to balanced accuracy in percent: the mean of the result is the metric."""
    counts = Counts.of(labels, guesses)
    recalls = counts.right / np.maximum(counts.images, 1)
    influence = ((labels == guesses) - recalls[labels]) / counts.images[labels]
    return _by_image(recalls[counts.images > 0], influence, labels, counts.images)


def macro_f1_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """The contribution of each image to macro F1 in percent: the mean of the result is the metric."""
    counts = Counts.of(labels, guesses)
    denominators = counts.of_either
    f1 = counts.f1
    # One more image, or prediction, of a class lowers its F1 by this much.
    loss = f1 / np.maximum(denominators, 1)
    # A right image adds 2 to the numerator of its class. A mistake lowers the F1 of two classes.
    if_right = 2 / denominators[labels] - 2 * loss[labels]
    if_wrong = -loss[labels] - loss[guesses]
    influence = np.where(labels == guesses, if_right, if_wrong)
    return _by_image(f1[denominators > 0], influence, labels, counts.images)


def _by_image(class_values: np.ndarray, influence: np.ndarray, labels: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Convert the influence of each image on its class to its contribution to the mean over classes, in percent.

    class_values: the metric of each class that counts in the mean
    influence: of each image; changed in place
    images: number of images of each class
    """
    influence *= np.sqrt(images / np.maximum(images - 1, 1))[labels]  # This makes the variance unbiased.
    return 100 * (float(class_values.mean()) + len(labels) * influence / len(class_values))


def likely_recalls(right: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Recalls of the classes, each with ADDED more images, which are as often right as those of the mean class.

    If half of the added images were right, as Agresti and Coull assume, the errors of many classes would add up to an
    interval that is too wide.
    """
    mean_recall = float((right / np.maximum(images, 1)).sum() + ADDED / 2) / (np.count_nonzero(images) + ADDED)
    return (right + ADDED * mean_recall) / (images + ADDED)


def balanced_accuracy_interval(
    labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()
) -> Interval | None:
    """The interval of balanced accuracy in percent; None if one of two classes has too few images.

    labels, guesses: label and prediction of each image
    classes: number of classes
    """
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    present = counts.images > 0
    images = counts.images[present]
    right = counts.right[present]
    recalls = likely_recalls(right, images)
    variance = float((recalls * (1 - recalls) / images).sum()) / len(images) ** 2
    inflation = variance_inflation(balanced_accuracy_by_image(labels, guesses), groups)
    return wilson_of_variance(float((right / images).mean()), variance, int(images.sum()), inflation)


def macro_f1_interval(labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()) -> Interval | None:
    """The interval of macro F1 in percent; None if images are too few, or the interval is wider than WIDEST.

    The influence of an image on macro F1 depends on its class and on whether, and for which class, it is mistaken. See
    `balanced_accuracy_interval` for the parameters.
    """
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    right, images, _ = counts
    classes_in_mean = int((counts.of_either > 0).sum())
    denominators = np.maximum(counts.of_either, 1)
    f1 = counts.f1

    # Variance of the mean: squared influences of right images, and of mistakes, as often as either is likely.
    loss = f1 / denominators / classes_in_mean  # One more image, or prediction, of a class lowers the mean by this.
    if_right = 2 / denominators / classes_in_mean - 2 * loss
    if_wrong = np.where(labels == guesses, 0.0, -loss[labels] - loss[guesses])
    wrong = images - right
    wrong_squares = np.bincount(labels, if_wrong**2, minlength=classes) / np.maximum(wrong, 1)
    recalls = likely_recalls(right, images)
    variances = images * (recalls * if_right**2 + (1 - recalls) * np.where(wrong > 0, wrong_squares, loss**2))
    freedom = max(len(labels) - classes_in_mean, 1)  # This makes the variance unbiased.

    # F1 is a concave function of right / union. So, by its second order, it is too low by `bias`.
    union = counts.of_either - right
    bias = f1 * (1 - f1) / denominators * union / np.maximum(union - 1, 1)
    interval = unbiased_interval(
        value=float(f1.sum()) / classes_in_mean,
        unbiased=float((f1 + bias).sum()) / classes_in_mean,
        variance=float(variances.sum()) * len(labels) / freedom,
        most=len(labels),
        images=images[images > 0],
        inflation=variance_inflation(macro_f1_by_image(labels, guesses), groups),
    )
    if interval is None or interval.high - interval.low > WIDEST:
        return None
    return interval


def unbiased_interval(
    value: float, unbiased: float, variance: float, most: float, images: np.ndarray, inflation: float
) -> Interval | None:
    """The interval of a biased metric, around its unbiased value; None if classes have too few images.

    value, unbiased: the metric, and the metric without its bias, as fractions
    most: largest effective number of images
    images: number of images of each class
    inflation: of `variance_inflation`
    """
    interval = wilson_of_variance(unbiased, variance, most, inflation)
    is_bias_uncertain = (images == 1).mean() > MOST_SINGLE
    # The bias, in percentage points, must be less than half the width, so that the interval contains the value.
    bias = 100 * abs(unbiased - value)
    is_value_outside = 2 * bias > interval.high - interval.low
    return None if is_bias_uncertain or is_value_outside else interval


BY_CLASS = {
    BALANCED: (balanced_accuracy_interval, balanced_accuracy_by_image),
    MACRO_F1: (macro_f1_interval, macro_f1_by_image),
}
"""Metric that is a mean over classes -> the function for its interval, and that for each image's contribution."""
