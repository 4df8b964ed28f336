"""95 % intervals of metrics that are no share of the images: balanced accuracy, macro F1, AUROC, mAP.

All are Wilson intervals with an effective number of images: as many as would give a share of the images the variance
that the metric has. The variance is the sum of the squared influences of the images on the metric. A bootstrap that is
stratified by class covers too rarely where a class has few images: if all of them are right, it knows no other outcome.
"""

from __future__ import annotations

import numpy as np

from utils.intervals import Interval, wilson

ADDED = 1
"""Right and wrong images that are added to each class for its variance, which is never 0 then (Agresti and Coull)"""


def balanced_accuracy_interval(labels: np.ndarray, guesses: np.ndarray, classes: int) -> Interval:
    images = np.bincount(labels, minlength=classes)
    present = images > 0
    images, right = images[present], np.bincount(labels[labels == guesses], minlength=classes)[present]
    sure = (right + ADDED) / (images + 2 * ADDED)
    variance = float((sure * (1 - sure) / images).sum()) / len(images) ** 2
    return _of_variance(float((right / images).mean()), variance, int(images.sum()))


def macro_f1_interval(labels: np.ndarray, guesses: np.ndarray, classes: int) -> Interval:
    """The influence of an image depends on its class and on whether, or for which class, it is mistaken."""
    hit = labels == guesses
    images, right = np.bincount(labels, minlength=classes), np.bincount(labels[hit], minlength=classes)
    of_either = images + np.bincount(guesses, minlength=classes)
    counted = int((of_either > 0).sum())
    sizes = np.maximum(of_either, 1)
    f1 = 2 * right / sizes
    pull = f1 / sizes / counted  # that another image or prediction of the class has on the mean
    if_right = 2 / sizes / counted - 2 * pull
    influence = np.where(hit, 0.0, -pull[labels] - pull[guesses])
    wrong = images - right
    if_wrong = np.bincount(labels, influence, minlength=classes) / np.maximum(wrong, 1)
    spread = np.bincount(labels, np.where(hit, 0.0, influence - if_wrong[labels]) ** 2, minlength=classes)
    spread /= np.maximum(wrong, 1)
    if_wrong = np.where(wrong > 0, if_wrong, -pull)
    sure = (right + ADDED) / (images + 2 * ADDED)
    variance = images * (sure * (1 - sure) * (if_right - if_wrong) ** 2 + (1 - sure) * spread)
    return _of_variance(float(f1.sum()) / counted, float(variance.sum()), len(labels))


def ranking_intervals(scores: np.ndarray, truth: np.ndarray) -> tuple[Interval | None, Interval | None]:
    """Of mAP and of the mean AUROC; None where no class has positives and negatives. Both arguments: N x C."""
    positives, images = truth.sum(0), len(truth)
    usable = np.flatnonzero((positives > 0) & (positives < images))
    if not len(usable) or np.isnan(scores).any():
        return None, None
    sums = np.zeros(3)  # of average precision, the same without its bias, and AUROC
    on_precision, on_area = np.zeros(images), np.zeros(images)
    most = 0.0
    for label in usable:
        values, of_precision, of_area = _influences(scores[:, label], truth[:, label])
        sums += values
        on_precision += of_precision
        on_area += of_area
        most += 4 * positives[label] * (images - positives[label]) / images
    precision, unbiased, area = sums / len(usable)
    variances = [float((influence**2).sum()) / len(usable) ** 2 for influence in (on_precision, on_area)]
    plain, lower = (_of_variance(float(value), variances[0], most) for value in (precision, unbiased))
    of_map = Interval(min(plain.low, lower.low), max(plain.high, lower.high))
    return of_map, _of_variance(float(area), variances[1], most)


def _influences(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three values of a class, and the influence of each image on average precision and on AUROC.

    The second value leaves each positive out of its own precision: with few positives, average precision is too high,
    because the first one above all others has a precision of 1.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hit = scores[order], truth[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # equal scores are one group
    group = np.repeat(np.arange(len(last)), np.diff(last, prepend=-1))
    found, seen = np.cumsum(hit)[last], last + 1
    positives, images = int(found[-1]), len(truth)
    negatives = images - positives
    new = np.diff(found, prepend=0)
    new_wrong = np.diff(seen, prepend=0) - new
    precision = found / seen
    average = float((new * precision).sum()) / positives
    others = np.where(seen > 1, (found - 1) / np.maximum(seen - 1, 1), average)
    after, weighted = (np.cumsum((new * x / seen)[::-1])[::-1] for x in (np.ones(len(last)), precision))
    on_precision = (hit * (precision - average + after)[group] - weighted[group]) / positives
    beaten = negatives - np.cumsum(new_wrong) + new_wrong / 2  # negatives below, and half of the equal ones
    above = found - new / 2
    area = float((above * new_wrong).sum()) / (positives * negatives)
    on_area = np.where(
        hit, (beaten[group] / negatives - area) / positives, (above[group] / positives - area) / negatives
    )
    for kind, size in ((hit, positives), (~hit, negatives)):
        on_precision[kind] -= on_precision[kind].mean()
        for influence in (on_precision, on_area):
            influence[kind] *= np.sqrt(size / max(size - 1, 1))  # as an unbiased variance is larger
    back = np.argsort(order)
    values = np.array([average, float((new * others).sum()) / positives, area])
    return values, on_precision[back], on_area[back]


def _of_variance(fraction: float, variance: float, most: float) -> Interval:
    """`most`: largest effective number of images, used where no image had another outcome."""
    of_one = fraction * (1 - fraction)
    return wilson(100 * fraction, min(most, of_one / variance) if variance > 0 and of_one > 0 else most)
