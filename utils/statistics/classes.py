"""Intervals (95 %) of balanced accuracy and macro F1, which are means over classes, and the influence of each image.

The influence of an image is the derivative of the metric with respect to the weight of this image (the influence
function; Hampel 1974). The variance of the metric is the sum of the squared influences (the infinitesimal jackknife;
Jaeckel 1972). In macro F1, this includes that other images would be of other classes, because F1 depends on how
frequent a class is. The interval is Wilson's, with an effective number of images (`wilson_of_variance`).

Macro F1 is biased if a class has few images; its interval is around the value without the bias. A bootstrap would
contain the true value too rarely: if all images of a class are right, no sample of them has an error.

If images are in groups (DATA.GROUP), the variance is multiplied by the design effect of the influences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, images_of_mean, wilson_of_variance
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
    def f1_denominators(self) -> np.ndarray:
        """The denominator of each class's F1: images of the class plus predictions of the class."""
        return self.images + self.predicted

    @property
    def f1(self) -> np.ndarray:
        """F1 of each class; 0 for a class without images and predictions."""
        return 2 * self.right / np.maximum(self.f1_denominators, 1)

    @property
    def too_few(self) -> bool:
        """Whether one of two classes has too few images for an interval of their mean."""
        return len(self.images) == 2 and int(self.images.min()) < FEWEST_OF_TWO


def balanced_accuracy_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """The contribution of each image to balanced accuracy in percent: the mean of the result is the metric.

    labels, guesses: label and prediction of each image
    """
    counts = Counts.of(labels, guesses)
    recalls = counts.right / np.maximum(counts.images, 1)
    # The recall of a class is a mean over its images, so an image's influence on it is (right - recall) / images.
    influence = ((labels == guesses) - recalls[labels]) / counts.images[labels]
    return _pseudo_values(recalls[counts.images > 0], influence, labels, counts.images)


def macro_f1_by_image(labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """The contribution of each image to macro F1 in percent: the mean of the result is the metric.

    labels, guesses: label and prediction of each image
    """
    counts = Counts.of(labels, guesses)
    denominators = counts.f1_denominators
    f1 = counts.f1
    # F1 = 2 * right / (images + predicted). Its derivative by the denominator: one more image, or prediction, of a
    # class lowers its F1 by this much.
    loss = f1 / np.maximum(denominators, 1)
    # A right image adds 2 to the numerator of its class's F1, and 2 to the denominator: the image and its prediction.
    # A mistake adds 1 to two denominators: as an image to that of its class, as a prediction to that of the other.
    if_right = 2 / denominators[labels] - 2 * loss[labels]
    if_wrong = -loss[labels] - loss[guesses]
    influence = np.where(labels == guesses, if_right, if_wrong)
    return _pseudo_values(f1[denominators > 0], influence, labels, counts.images)


def _pseudo_values(
    class_values: np.ndarray, influence: np.ndarray, labels: np.ndarray, images: np.ndarray
) -> np.ndarray:
    """Return the pseudo-value of each image in percent: the mean over classes, plus n times its influence on this mean.

    Influences add up to 0. So the mean of the pseudo-values is the metric, and their variance, divided by the number n
    of images, is the variance of the metric, as for a plain mean over images.

    class_values: the metric of each class that counts in the mean, as a fraction
    influence: of each image on the sum over the classes, as a fraction; changed in place
    labels: the class of each image
    images: number of images of each class
    """
    mean_over_classes = float(class_values.mean())
    influence *= np.sqrt(images / np.maximum(images - 1, 1))[labels]  # Bessel's correction within each class
    return 100 * (mean_over_classes + len(labels) * influence / len(class_values))


def likely_recalls(right: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Estimate the true recall of each class, for its variance: ADDED imagined images pull it towards the mean recall.

    Without them, a class whose images are all right would have no variance. Agresti and Coull (1998) count half of the
    imagined images as right. Here, the fraction of them that counts as right is the mean recall. With one half, the
    errors of many classes would add up to an interval that is too wide.

    right: number of right images of each class
    images: number of images of each class
    """
    # The mean recall itself is estimated with one half: ADDED imagined classes, half of them right.
    mean_recall = float((right / np.maximum(images, 1)).sum() + ADDED / 2) / (np.count_nonzero(images) + ADDED)
    return (right + ADDED * mean_recall) / (images + ADDED)


def balanced_accuracy_interval(
    labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()
) -> Interval | None:
    """Return the interval of balanced accuracy (the mean recall over classes), in percent.

    None if there are only two classes, and one of them has fewer than FEWEST_OF_TWO images.

    labels, guesses: label and prediction of each image
    classes: number of classes
    groups: the group of each image; empty if images are not in groups
    """
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    present = counts.images > 0
    images = counts.images[present]
    right = counts.right[present]
    balanced_accuracy = float((right / images).mean())
    # The recall of a class is a binomial fraction, of variance p * (1 - p) / n. The mean of C independent recalls has
    # the sum of their variances, divided by C**2.
    recalls = likely_recalls(right, images)
    variance = float((recalls * (1 - recalls) / images).sum()) / len(images) ** 2
    inflation = variance_inflation(balanced_accuracy_by_image(labels, guesses), groups)
    return wilson_of_variance(
        balanced_accuracy,
        variance,
        most_images=int(images.sum()),
        images_at_limit=images_of_mean(images),
        inflation=inflation,
    )


def macro_f1_interval(labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()) -> Interval | None:
    """Return the interval of macro F1 (the mean F1 over classes), in percent, by the delta method.

    None if a class has too few images, or if the interval is wider than WIDEST. See `balanced_accuracy_interval` for
    the parameters.
    """
    counts = Counts.of(labels, guesses, classes)
    if counts.too_few:
        return None
    right = counts.right
    images = counts.images
    classes_in_mean = int((counts.f1_denominators > 0).sum())
    denominators = np.maximum(counts.f1_denominators, 1)
    f1 = counts.f1

    # Influence of an image on the mean over classes, by the derivatives of F1 = 2 * right / (images + predicted).
    loss = f1 / denominators / classes_in_mean  # One more image, or prediction, of a class lowers the mean by this.
    if_right = 2 / denominators / classes_in_mean - 2 * loss  # of a right image, per class
    if_wrong = np.where(labels == guesses, 0.0, -loss[labels] - loss[guesses])  # of each image that is a mistake

    # Variance of macro F1: the sum of squared influences. Right images and mistakes count as often as each is likely.
    wrong = images - right
    mean_wrong_square = np.bincount(labels, if_wrong**2, minlength=classes) / np.maximum(wrong, 1)
    # In a class without mistakes, a mistake would lower at least the F1 of this class.
    likely_wrong_square = np.where(wrong > 0, mean_wrong_square, loss**2)
    recalls = likely_recalls(right, images)
    variances = images * (recalls * if_right**2 + (1 - recalls) * likely_wrong_square)
    freedom = max(len(labels) - classes_in_mean, 1)  # for Bessel's correction, n / (n - classes)

    # Bias by a Taylor expansion: F1 = 2 * J / (1 + J), where J = right / union is a binomial fraction. F1 is concave in
    # J, so it is too low by -F1''(J) / 2 * Var(J), where Var(J) = J * (1 - J) / (union - 1). In terms of F1:
    union = counts.f1_denominators - right
    bias = f1 * (1 - f1) / denominators * union / np.maximum(union - 1, 1)
    interval = unbiased_interval(
        value=float(f1.sum()) / classes_in_mean,
        unbiased=float((f1 + bias).sum()) / classes_in_mean,
        variance=float(variances.sum()) * len(labels) / freedom,
        most_images=len(labels),
        images_at_limit=images_of_mean(images[images > 0]),
        class_images=images[images > 0],
        inflation=variance_inflation(macro_f1_by_image(labels, guesses), groups),
    )
    if interval is None or interval.high - interval.low > WIDEST:
        return None
    return interval


def unbiased_interval(
    value: float,
    unbiased: float,
    variance: float,
    most_images: float,
    images_at_limit: float,
    class_images: np.ndarray,
    inflation: float,
) -> Interval | None:
    """Return the interval of a biased metric, in percent, around its unbiased value; None if images are too few.

    value, unbiased: the metric, and the metric without its bias, as fractions
    variance: of the metric as a fraction, for independent images
    most_images, images_at_limit: effective numbers of images, as for `wilson_of_variance`
    class_images: number of images of each class; for several labels, number of its positives
    inflation: the factor by which the variance grows because images are in groups (see `variance_inflation`)
    """
    interval = wilson_of_variance(unbiased, variance, most_images, images_at_limit, inflation)
    # A single image shows no variance within its class, and so not how large the bias is.
    is_bias_uncertain = (class_images == 1).mean() > MOST_SINGLE
    # The bias, in percentage points, must be less than half the width, so that the interval contains the value.
    bias = 100 * abs(unbiased - value)
    is_value_outside = 2 * bias > interval.high - interval.low
    return None if is_bias_uncertain or is_value_outside else interval


BY_CLASS = {
    BALANCED: (balanced_accuracy_interval, balanced_accuracy_by_image),
    MACRO_F1: (macro_f1_interval, macro_f1_by_image),
}
"""Metric that is a mean over classes -> the function for its interval, and that for each image's contribution."""
