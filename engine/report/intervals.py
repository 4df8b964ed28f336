"""Intervals (95 %): of metrics, and of the difference of two models on the same images.

Of metrics that are no share of the images (balanced accuracy, macro F1, AUROC, mAP), they are Wilson intervals with an
effective number of images: as many as would give a share of the images the variance that the metric has, the sum of the
squared influences of the images. Which classes they are of is chance too: it changes macro F1 and mAP, which depend on
how frequent a class is. Both are also biased where a class has few images; their interval is around the value without
the bias. A bootstrap covers too rarely there: if all images of a class are right, it knows no other outcome.

Where images are in groups (DATA.GROUP), the variance is larger by one factor, the design effect of the influences.
"""

import math
from collections.abc import Sequence

import numpy as np

from utils.text import Interval, Z, wilson
from vitamp.metrics import BALANCED, MACRO_F1, TOP1, Metric

Groups = Sequence[str] | np.ndarray
"""Of each image; empty: it is in none"""
ADDED = 2
"""Images that are added to each class for its variance, which is never 0 then (Agresti and Coull)"""
MOST_SINGLE = 0.1
"""Fraction of classes with a single image, above which too many others may have none for an interval"""
FEWEST_OF_TWO = 4
"""Of two classes, one with fewer images has too much weight for an interval of their mean"""
UNKNOWN = 0.5
"""How alike images of a group are taken to be, if none differs; less, the more do"""
WIDEST = 60
"""Percentage points; an interval of macro F1 that is wider says nothing"""
WHOLE = 100.0
"""What an image adds to a metric in percent, times their number, if it becomes right"""


def paired_interval(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> tuple[float, float, float]:
    """By how much the second is right less often, and the ends of the interval (Agresti and Min, 2005)."""
    from scipy.special import ndtri  # a moment to import

    lost, won = int((first & ~second).sum()), int((second & ~first).sum())
    times = times_the_variance(first.astype(float) - second, groups)
    count, one, other = len(first) / times + 2, lost / times + 0.5, won / times + 0.5
    middle = (one - other) / count
    reach = float(ndtri(0.975)) * math.sqrt((one + other - count * middle**2) / count**2)
    return (lost - won) / len(first), middle - reach, middle + reach


def equally_right(first: np.ndarray, second: np.ndarray, groups: Groups = ()) -> float:
    """p-value of McNemar's exact test that two models are right equally often."""
    from scipy.special import betainc  # a moment to import

    times = times_the_variance(first.astype(float) - second, groups)
    lost = int((first & ~second).sum()) / times
    won = int((second & ~first).sum()) / times
    if not lost + won:
        return 1.0
    # Chance of as few as the fewer, by the binomial distribution; groups make their number a fraction.
    return min(1.0, 2 * float(betainc(max(lost, won), min(lost, won) + 1, 0.5)))


def variance_of_mean(apart: np.ndarray) -> float:
    """Of the mean difference of two models. `apart`: what each image adds to it, in percent."""
    # Two made-up images, one for each side, as Bonett and Price (2012) do: few images that differ are no certainty.
    # Their size is a mean that large differences dominate: that of rare images in which a class has all its weight.
    squares = apart**2
    total = float(squares.sum())
    size = float((squares**2).sum()) / total if total > 0 else 0.0
    # Of whole images if none differs; less, the more do, as those of several seeds differ in part.
    different = total / size if size > 0 else 0.0
    size = math.sqrt(size + max(WHOLE**2 - size, 0.0) / (1 + different))
    return float(np.append(apart, [size, -size]).var(ddof=1)) / len(apart)


def of_each_image(metric: Metric, labels: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """What each image adds to top-1, balanced accuracy or macro F1, in percent."""
    if metric is TOP1:
        return 100.0 * (labels == guesses)
    classes, hits = int(max(labels.max(), guesses.max())) + 1, labels == guesses
    right, images = (np.bincount(each, minlength=classes) for each in (labels[hits], labels))
    if metric is BALANCED:
        of_class, known = right / np.maximum(images, 1), images > 0
        influence = (hits - of_class[labels]) / images[labels]
    else:
        sizes = images + np.bincount(guesses, minlength=classes)
        of_class, known = 2 * right / np.maximum(sizes, 1), sizes > 0
        pull = of_class / np.maximum(sizes, 1)  # of another image or prediction of the class
        influence = np.where(hits, 2 / sizes[labels] - 2 * pull[labels], -pull[labels] - pull[guesses])
    influence *= np.sqrt(images / np.maximum(images - 1, 1))[labels]  # as an unbiased variance is larger
    return 100 * (float(of_class[known].mean()) + len(labels) * influence / np.count_nonzero(known))


def design_effect(values: np.ndarray, groups: Groups) -> tuple[float, float]:
    """How many times larger the variance of their mean is than that of independent images; effective number of groups.

    The larger of two: by the intraclass correlation of one-way analysis of variance, and by the sums over the groups
    (cluster-robust variance). The first overlooks one large group among single images, the second that few groups may
    agree by chance.
    """
    _, of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    images, number = len(of), len(sizes)
    if number in (0, images):
        return 1.0, len(values)
    values = values.astype(float) - values[0]  # equal ones are 0, without errors of rounding
    mean, size = np.bincount(of, values) / sizes, float((sizes**2).sum()) / images
    between = float((sizes * (mean - values.mean()) ** 2).sum()) / max(number - 1, 1)
    within = float(((values - mean[of]) ** 2).sum()) / (images - number)
    total = between + ((images - size) / max(number - 1, 1) - 1) * within
    alike = (between - within) / total if total > 0 else 0.0
    # How alike they are is unknown if all are equal or of one group, and hardly known by one mistake.
    apart = values - values.mean()
    squares = apart**2
    if number < 2 or not squares.any():
        return 1 + (size - 1) * max(alike, UNKNOWN), images / size
    different = float(squares.sum() ** 2 / (squares**2).sum())
    alike = max(alike, UNKNOWN / (1 + different))
    of_sums = float((np.bincount(of, apart) ** 2).sum() / squares.sum()) * number / (number - 1)
    return max(1 + (size - 1) * alike, of_sums), images / size


def times_the_variance(values: np.ndarray, groups: Groups) -> float:
    """How many times larger it is for an interval. `values`: of each image, or its influence on a metric.

    Few groups know the variance badly: Student's t, by their number, takes the place of the normal distribution.
    """
    effect, number = design_effect(values, groups)
    if number == len(values):
        return 1.0
    from scipy.stats import t  # a second to import

    return effect * (float(t.ppf(0.975, max(number - 1, 1))) / Z) ** 2


def independent_images(values: np.ndarray, groups: Groups) -> float:
    """How many independent images tell as much of the mean as these do, which are in groups."""
    return len(values) / times_the_variance(values, groups)


def difference_interval(percents: tuple[float, float], images: Sequence[float], z: float = Z) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares of different images, in percentage points."""
    (ours, theirs), (one, other) = percents, (wilson(*each, z) for each in zip(percents, images, strict=True))
    low = ours - theirs - math.hypot(ours - one.low, other.high - theirs)
    return low, ours - theirs + math.hypot(one.high - ours, theirs - other.low)


def too_few(images: np.ndarray) -> bool:
    """Whether one of two classes has too few images for an interval of their mean. `images`: of each class."""
    return len(images) == 2 and int(images.min()) < FEWEST_OF_TWO


def likely_recalls(right: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Recalls of the classes, with images added that are as often right as the mean class.

    If half of those added were right, errors of many classes would add up to an interval that is too wide.
    """
    usual = float((right / np.maximum(images, 1)).sum() + ADDED / 2) / (np.count_nonzero(images) + ADDED)
    return (right + ADDED * usual) / (images + ADDED)


def balanced_accuracy_interval(
    labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()
) -> Interval | None:
    images = np.bincount(labels, minlength=classes)
    if too_few(images):
        return None
    present = images > 0
    images, right = images[present], np.bincount(labels[labels == guesses], minlength=classes)[present]
    sure = likely_recalls(right, images)
    variance = float((sure * (1 - sure) / images).sum()) / len(images) ** 2
    times = times_the_variance(of_each_image(BALANCED, labels, guesses), groups)
    return of_variance(float((right / images).mean()), variance, int(images.sum()), times)


def macro_f1_interval(labels: np.ndarray, guesses: np.ndarray, classes: int, groups: Groups = ()) -> Interval | None:
    """The influence of an image depends on its class and on whether, or for which class, it is mistaken."""
    hit = labels == guesses
    images, right = np.bincount(labels, minlength=classes), np.bincount(labels[hit], minlength=classes)
    if too_few(images):
        return None
    of_either = images + np.bincount(guesses, minlength=classes)
    counted = int((of_either > 0).sum())
    sizes = np.maximum(of_either, 1)
    f1 = 2 * right / sizes
    pull = f1 / sizes / counted  # that another image or prediction of the class has on the mean
    if_right = 2 / sizes / counted - 2 * pull
    influence = np.where(hit, 0.0, -pull[labels] - pull[guesses])
    wrong = images - right
    squares = np.bincount(labels, influence**2, minlength=classes) / np.maximum(wrong, 1)
    sure = likely_recalls(right, images)
    variance = images * (sure * if_right**2 + (1 - sure) * np.where(wrong > 0, squares, pull**2))
    either = of_either - right  # F1 is a concave function of right / either, so by its second order it is too low by:
    bias = f1 * (1 - f1) / sizes * either / np.maximum(either - 1, 1)
    value, unbiased = (float(each.sum()) / counted for each in (f1, f1 + bias))
    freedom = max(len(labels) - counted, 1)  # as an unbiased variance is larger
    times = times_the_variance(of_each_image(MACRO_F1, labels, guesses), groups)
    spread = float(variance.sum()) * len(labels) / freedom
    found = around(value, unbiased, spread, len(labels), images[images > 0], times)
    return None if found is None or found.high - found.low > WIDEST else found


def around(
    value: float, unbiased: float, variance: float, most: float, images: np.ndarray, times: float
) -> Interval | None:
    """None where classes have too few `images`: the bias is uncertain, or puts the value outside the interval."""
    found = of_variance(unbiased, variance, most, times)
    few = (images == 1).mean() > MOST_SINGLE or 200 * abs(unbiased - value) > found.high - found.low
    return None if few else found


def of_variance(fraction: float, variance: float, most: float, times: float) -> Interval:
    """`most`: largest effective number of images, used where no image had another outcome.

    `times`: of `times_the_variance`.
    """
    of_one = fraction * (1 - fraction)
    return wilson(100 * fraction, (min(most, of_one / variance) if variance > 0 and of_one > 0 else most) / times)
