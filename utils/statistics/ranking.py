"""mAP and mean AUROC of images with several labels, the influence of each image on them, and their intervals (95 %).

The intervals are computed as those of macro F1 (`classes.py`). mAP, too, is biased if a class has few images.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.classes import unbiased_interval
from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, wilson_of_variance


class Ranking(NamedTuple):
    """mAP and mean AUROC of a model, as fractions, and what their intervals need."""

    precision: float
    """mAP, the mean average precision."""
    unbiased: float
    """mAP without its bias."""
    area: float
    """Mean AUROC."""
    of_precision: np.ndarray
    """Influence of each image on mAP."""
    of_area: np.ndarray
    """Influence of each image on the mean AUROC."""
    most: float
    """Largest effective number of images."""
    positives: np.ndarray
    """Number of positives of each class that also has negatives."""


def ranking_of(scores: np.ndarray, truth: np.ndarray) -> Ranking | None:
    """Compute mAP and mean AUROC; None if no class has both positives and negatives, or if a score is not a number.

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
    return Ranking(
        precision=(precision_sum + universal_classes) / classes,
        unbiased=(unbiased_sum + universal_classes) / classes,
        area=area_sum / len(usable_classes),
        of_precision=precision_influence / classes,
        of_area=area_influence / len(usable_classes),
        most=float((4 * usable_positives * (images - usable_positives) / images).sum()),
        positives=usable_positives,
    )


def ranking_intervals(
    scores: np.ndarray, truth: np.ndarray, groups: Groups = ()
) -> tuple[Interval | None, Interval | None]:
    """The intervals of mAP and of the mean AUROC in percent; see `ranking_of` for the parameters.

    That of mAP is None if classes have too few positives. Both are None if there is no AUROC.
    """
    ranking = ranking_of(scores, truth)
    if ranking is None:
        return None, None
    precision_interval = unbiased_interval(
        value=ranking.precision,
        unbiased=ranking.unbiased,
        variance=float((ranking.of_precision**2).sum()),
        most=ranking.most,
        images=ranking.positives,
        inflation=variance_inflation(ranking.of_precision, groups),
    )
    area_interval = wilson_of_variance(
        fraction=ranking.area,
        variance=float((ranking.of_area**2).sum()),
        most=ranking.most,
        inflation=variance_inflation(ranking.of_area, groups),
    )
    return precision_interval, area_interval


class Ranked(NamedTuple):
    """Images in the order of their scores for one class, the highest first; images of equal scores are one step."""

    positions: np.ndarray
    """Position of each image in this order."""
    is_positive: np.ndarray
    """Whether the image at each position has the label."""
    step: np.ndarray
    """Step of the image at each position."""
    new_positives: np.ndarray
    """Number of positives in each step."""
    found_positives: np.ndarray
    """Number of positives in each step and the steps before it."""
    seen_images: np.ndarray
    """Number of images in each step and the steps before it."""

    @classmethod
    def of(cls, scores: np.ndarray, truth: np.ndarray) -> Ranked:
        """Rank images by their score for a class. `truth`: whether each image has the label."""
        order = np.argsort(-scores, kind="stable")
        ranked_scores = scores[order]
        is_positive = truth[order]
        step_ends = np.flatnonzero(np.append(ranked_scores[1:] != ranked_scores[:-1], True))
        found_positives = np.cumsum(is_positive)[step_ends]
        return cls(
            positions=np.argsort(order),
            is_positive=is_positive,
            step=np.repeat(np.arange(len(step_ends)), np.diff(step_ends, prepend=-1)),
            new_positives=np.diff(found_positives, prepend=0),
            found_positives=found_positives,
            seen_images=step_ends + 1,
        )

    @property
    def positives(self) -> int:
        return int(self.found_positives[-1])

    @property
    def negatives(self) -> int:
        return len(self.is_positive) - self.positives

    def widened(self, influence: np.ndarray) -> np.ndarray:
        """Scale influences around their mean, in place, so that their variances are unbiased.

        Positives and negatives are scaled separately. The means may differ from 0, because the metric depends on how
        many images are positive.
        """
        for kind, size in ((self.is_positive, self.positives), (~self.is_positive, self.negatives)):
            mean = influence[kind].mean()
            influence[kind] = mean + (influence[kind] - mean) * np.sqrt(size / max(size - 1, 1))
        return influence


class ClassMetric(NamedTuple):
    """A metric of one class."""

    value: float
    unbiased: float
    """The value without its bias."""
    influence: np.ndarray
    """Influence of each image on the value."""


def average_precision(ranked: Ranked) -> ClassMetric:
    """Average precision, which is too high if positives are few, and an unbiased value of it.

    For the unbiased value, each positive is left out of its own precision, and the other positives count as many as all
    of them. The first positive, if no image has a higher score, takes the precision of the next one.
    """
    new = ranked.new_positives
    seen = ranked.seen_images
    positives = ranked.positives
    precision = ranked.found_positives / seen
    average = float((new * precision).sum()) / positives

    # Precision at each step without the positive itself; 1e-9 avoids a division by zero.
    other_positives = (ranked.found_positives - 1) * positives / max(positives - 1, 1)
    other_precision = other_positives / np.maximum(other_positives + seen - ranked.found_positives, 1e-9)
    first_steps = np.flatnonzero(new)[:2]  # the first two steps with positives
    if seen[first_steps[0]] == 1:
        other_precision[first_steps[0]] = other_precision[first_steps[1]] if len(first_steps) > 1 else average
    unbiased = float((new * other_precision).sum()) / positives

    # An image changes the precision at its own step and at all steps after it.
    gain_after = np.cumsum((new / seen)[::-1])[::-1]
    loss_after = np.cumsum((new * precision / seen)[::-1])[::-1]
    gain = ranked.is_positive * (precision - average + gain_after)[ranked.step]
    influence = (gain - loss_after[ranked.step]) / positives
    influence = ranked.widened(influence)
    influence *= 1 + 2 / positives  # In simulations, the unbiased value varies more by this factor.
    return ClassMetric(average, unbiased, influence[ranked.positions])


def area_under_curve(ranked: Ranked) -> ClassMetric:
    """AUROC, the probability that a positive has a higher score than a negative; it has no bias."""
    positives = ranked.positives
    negatives = ranked.negatives
    new_negatives = np.diff(ranked.seen_images, prepend=0) - ranked.new_positives
    # Half of the images with an equal score count as above, the other half as below.
    negatives_below = negatives - np.cumsum(new_negatives) + new_negatives / 2
    positives_above = ranked.found_positives - ranked.new_positives / 2
    area = float((positives_above * new_negatives).sum()) / (positives * negatives)
    influence = np.where(
        ranked.is_positive,
        (negatives_below[ranked.step] / negatives - area) / positives,
        (positives_above[ranked.step] / positives - area) / negatives,
    )
    return ClassMetric(area, area, ranked.widened(influence)[ranked.positions])
