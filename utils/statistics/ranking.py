"""mAP and mean AUROC of images with several labels, the influence of each image on them, and their intervals (95 %).

The intervals are computed as those of macro F1 (`classes.py`). mAP, too, is biased if a class has few images.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.classes import unbiased_interval
from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, images_of_mean, wilson_of_variance


class Ranking(NamedTuple):
    """mAP and mean AUROC of a model, as fractions, and what their intervals need."""

    precision: float
    """mAP, the mean average precision."""
    unbiased: float
    """mAP without its bias."""
    area: float
    """Mean AUROC."""
    precision_influence: np.ndarray
    """Influence of each image on mAP; the squares add up to the variance of mAP."""
    area_influence: np.ndarray
    """Influence of each image on the mean AUROC; the squares add up to its variance."""
    most_images: float
    """Largest effective number of images."""
    images_at_limit: float
    """Their effective number if the model makes no mistake."""
    positives: np.ndarray
    """Number of positives of each class that also has negatives."""


def ranking_of(scores: np.ndarray, truth: np.ndarray) -> Ranking | None:
    """Compute mAP, the mean AUROC, and the influence of each image on both.

    The influence of an image on a metric is the derivative of the metric with respect to the weight of the image. The
    result is None if no class has both positives and negatives, or if a score is NaN.

    scores: array of images x classes, the model's score for each class
    truth: array of images x classes, whether the image has this label
    """
    images = len(truth)
    positives = truth.sum(0)
    usable_classes = np.flatnonzero((positives > 0) & (positives < images))
    if not len(usable_classes) or np.isnan(scores).any():
        return None
    precision_sum = unbiased_sum = area_sum = 0.0
    precision_influence = np.zeros(images)
    area_influence = np.zeros(images)
    for label in usable_classes:
        ranked = Ranked.of(scores[:, label], truth[:, label])
        class_precision = average_precision(ranked)
        precision_sum += class_precision.value
        unbiased_sum += class_precision.unbiased
        precision_influence += class_precision.influence
        class_area = area_under_curve(ranked)
        area_sum += class_area.value
        area_influence += class_area.influence

    # A class that every image has counts in mAP, with an average precision of 1, but has no AUROC.
    universal_classes = int((positives == images).sum())
    classes = len(usable_classes) + universal_classes
    usable_positives = positives[usable_classes]
    # A class with P positives and N negatives tells as much as images of which half are positive, of the number
    # 4 * P * N / (P + N), twice the harmonic mean of P and N.
    effective_images = 4 * usable_positives * (images - usable_positives) / images
    return Ranking(
        precision=(precision_sum + universal_classes) / classes,
        unbiased=(unbiased_sum + universal_classes) / classes,
        area=area_sum / len(usable_classes),
        precision_influence=precision_influence / classes,
        area_influence=area_influence / len(usable_classes),
        most_images=float(effective_images.sum()),
        images_at_limit=images_of_mean(effective_images),
        positives=usable_positives,
    )


def ranking_intervals(
    scores: np.ndarray, truth: np.ndarray, groups: Groups = ()
) -> tuple[Interval | None, Interval | None]:
    """Return the intervals of mAP and of the mean AUROC, in percent.

    The interval of mAP is None if classes have too few positives. Both are None if there is no AUROC. The variance of a
    metric is the sum of the squared influences of the images on it (the infinitesimal jackknife; Jaeckel 1972).

    scores: array of images x classes, the model's score for each class
    truth: array of images x classes, whether the image has this label
    groups: the group of each image; empty if images are not in groups
    """
    ranking = ranking_of(scores, truth)
    if ranking is None:
        return None, None
    # mAP is biased if positives are few; AUROC is not.
    precision_interval = unbiased_interval(
        value=ranking.precision,
        unbiased=ranking.unbiased,
        variance=float((ranking.precision_influence**2).sum()),
        most_images=ranking.most_images,
        images_at_limit=ranking.images_at_limit,
        class_images=ranking.positives,
        inflation=variance_inflation(ranking.precision_influence, groups),
    )
    area_interval = wilson_of_variance(
        fraction=ranking.area,
        variance=float((ranking.area_influence**2).sum()),
        most_images=ranking.most_images,
        images_at_limit=ranking.images_at_limit,
        inflation=variance_inflation(ranking.area_influence, groups),
    )
    return precision_interval, area_interval


class Ranked(NamedTuple):
    """Images in the order of their scores for one class, the highest first; images of equal scores are one step."""

    rank_of_image: np.ndarray
    """Rank of each image, from 0; an array over the images in their original order."""
    is_positive: np.ndarray
    """Whether the image at each rank has the label."""
    step_of_rank: np.ndarray
    """Step of the image at each rank."""
    new_positives: np.ndarray
    """Number of positives in each step."""
    positives_so_far: np.ndarray
    """Number of positives in each step and the steps before it."""
    images_so_far: np.ndarray
    """Number of images in each step and the steps before it."""

    @classmethod
    def of(cls, scores: np.ndarray, truth: np.ndarray) -> Ranked:
        """Rank images by their score for one class, the highest first; images of equal scores are one step.

        scores: the score of each image
        truth: whether each image has the label of this class
        """
        order = np.argsort(-scores, kind="stable")
        ranked_scores = scores[order]
        is_positive = truth[order]
        is_step_end = np.append(ranked_scores[1:] != ranked_scores[:-1], True)
        step_ends = np.flatnonzero(is_step_end)  # rank of the last image of each step
        step_sizes = np.diff(step_ends, prepend=-1)
        positives_so_far = np.cumsum(is_positive)[step_ends]
        return cls(
            rank_of_image=np.argsort(order),  # the inverse of `order`
            is_positive=is_positive,
            step_of_rank=np.repeat(np.arange(len(step_ends)), step_sizes),
            new_positives=np.diff(positives_so_far, prepend=0),
            positives_so_far=positives_so_far,
            images_so_far=step_ends + 1,
        )

    @property
    def positives(self) -> int:
        return int(self.positives_so_far[-1])

    @property
    def negatives(self) -> int:
        return len(self.is_positive) - self.positives

    def with_bessel_correction(self, influence: np.ndarray) -> np.ndarray:
        """Return influences, one per rank, multiplied so that their squares add up to an unbiased variance.

        Bessel's correction multiplies the variance by n / (n - 1). It is made separately for positives and negatives,
        around the mean of each. The mean of the positives may differ from 0, because the metric depends on how many
        images are positive. `influence` is changed in place.
        """
        for kind, size in ((self.is_positive, self.positives), (~self.is_positive, self.negatives)):
            mean = influence[kind].mean()
            influence[kind] = mean + (influence[kind] - mean) * np.sqrt(size / max(size - 1, 1))
        return influence


class ClassMetric(NamedTuple):
    """A metric of one class, as a fraction."""

    value: float
    unbiased: float
    """The value without its bias."""
    influence: np.ndarray
    """Influence of each image on the value: its derivative with respect to the weight of the image."""


def average_precision(ranked: Ranked) -> ClassMetric:
    """Compute the average precision (AP) of a class, its value without bias, and the influence of each image on it.

    The images of equal scores are one step k of the ranking. With R_k positives among the N_k images up to step k, the
    precision is R_k / N_k, and AP is the mean of the precision over the positives. AP is too high if positives are few,
    because each positive counts in its own precision. The unbiased value leaves it out.
    """
    new = ranked.new_positives
    positives_so_far = ranked.positives_so_far  # R_k
    images_so_far = ranked.images_so_far  # N_k
    positives = ranked.positives
    precision = positives_so_far / images_so_far
    average = float((new * precision).sum()) / positives

    # The precision at a positive without this positive itself: the others, R_k - 1, are scaled up by P / (P - 1), so
    # that they stand for all P positives. 1e-9 avoids a division by zero.
    other_positives = (positives_so_far - 1) * positives / max(positives - 1, 1)
    other_images = other_positives + images_so_far - positives_so_far
    other_precision = other_positives / np.maximum(other_images, 1e-9)
    # A positive with the highest score of all has no image left for its precision: it takes that of the next positive.
    steps_with_positives = np.flatnonzero(new)
    first_step = steps_with_positives[0]
    if images_so_far[first_step] == 1:
        has_next = len(steps_with_positives) > 1
        other_precision[first_step] = other_precision[steps_with_positives[1]] if has_next else average
    unbiased = float((new * other_precision).sum()) / positives

    # Derivative of AP = (sum over k of new_k * R_k / N_k) / P by the weight of an image at step s, times P:
    # - any image raises N_k of all k >= s: minus the sum over k >= s of new_k * R_k / N_k**2;
    # - a positive also raises new_s, P, and R_k of all k >= s: precision_s - AP + the sum over k >= s of new_k / N_k.
    later_gains = np.cumsum((new / images_so_far)[::-1])[::-1]
    later_losses = np.cumsum((new * precision / images_so_far)[::-1])[::-1]
    gain = ranked.is_positive * (precision - average + later_gains)[ranked.step_of_rank]
    influence = (gain - later_losses[ranked.step_of_rank]) / positives
    influence = ranked.with_bessel_correction(influence)
    influence *= 1 + 2 / positives  # In simulations, the unbiased value varies more by this factor.
    return ClassMetric(average, unbiased, influence[ranked.rank_of_image])


def area_under_curve(ranked: Ranked) -> ClassMetric:
    """Compute the AUROC of a class, and the influence of each image on it.

    AUROC is the probability that a positive has a higher score than a negative (the Mann-Whitney statistic, U / (P *
    N)). It has no bias. The influences are the components of DeLong, DeLong and Clarke-Pearson (1988).
    """
    positives = ranked.positives
    negatives = ranked.negatives
    new_negatives = np.diff(ranked.images_so_far, prepend=0) - ranked.new_positives
    # For each step, the negatives of lower score and the positives of higher score; of an equal score, half count.
    negatives_below = negatives - np.cumsum(new_negatives) + new_negatives / 2
    positives_above = ranked.positives_so_far - ranked.new_positives / 2
    area = float((positives_above * new_negatives).sum()) / (positives * negatives)
    # AUROC is the mean over the positives of the fraction of negatives below, and the mean over the negatives of the
    # fraction of positives above. The influence on a mean is the deviation from it, divided by the number of values.
    influence = np.where(
        ranked.is_positive,
        (negatives_below[ranked.step_of_rank] / negatives - area) / positives,
        (positives_above[ranked.step_of_rank] / positives - area) / negatives,
    )
    influence = ranked.with_bessel_correction(influence)
    return ClassMetric(value=area, unbiased=area, influence=influence[ranked.rank_of_image])
