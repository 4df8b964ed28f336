"""mAP and the mean AUROC of several labels per image, the influence of each image on them, and their intervals (95 %).

The intervals are made as those of macro F1 (`classes.py`); mAP is biased where a class has few images, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.statistics.classes import unbiased_interval
from utils.statistics.groups import Groups, variance_inflation
from utils.statistics.proportions import Interval, wilson_of_variance


class Ranking(NamedTuple):
    """mAP and the mean AUROC as fractions."""

    precision: float
    unbiased: float
    """mAP without its bias"""
    area: float
    of_precision: np.ndarray
    of_area: np.ndarray
    """Influence of each image on mAP and on the mean AUROC"""
    most: float
    """Largest effective number of images"""
    positives: np.ndarray
    """Of each class that has negatives, too"""


def ranking_of(scores: np.ndarray, truth: np.ndarray) -> Ranking | None:
    """None if no class has positives and negatives. Both: images x classes."""
    images = len(truth)
    positives = truth.sum(0)
    usable = np.flatnonzero((positives > 0) & (positives < images))
    if not len(usable) or np.isnan(scores).any():
        return None
    precision = unbiased = area = 0.0
    on_precision = np.zeros(images)
    on_area = np.zeros(images)
    for label in usable:
        ranked = Ranked.of(scores[:, label], truth[:, label])
        of_class = average_precision(ranked)
        precision += of_class.value
        unbiased += of_class.unbiased
        on_precision += of_class.influence
        of_class = area_under_curve(ranked)
        area += of_class.value
        on_area += of_class.influence
    always = int((positives == images).sum())  # classes of every image: an average precision of 1, and no AUROC
    classes = len(usable) + always
    positives = positives[usable]
    return Ranking(
        precision=(precision + always) / classes,
        unbiased=(unbiased + always) / classes,
        area=area / len(usable),
        of_precision=on_precision / classes,
        of_area=on_area / len(usable),
        most=float((4 * positives * (images - positives) / images).sum()),
        positives=positives,
    )


def ranking_intervals(
    scores: np.ndarray, truth: np.ndarray, groups: Groups = ()
) -> tuple[Interval | None, Interval | None]:
    """Of mAP and of the mean AUROC; None where classes have too few positives for mAP."""
    found = ranking_of(scores, truth)
    if found is None:
        return None, None
    of_map = unbiased_interval(
        value=found.precision,
        unbiased=found.unbiased,
        variance=float((found.of_precision**2).sum()),
        most=found.most,
        images=found.positives,
        inflation=variance_inflation(found.of_precision, groups),
    )
    of_auroc = wilson_of_variance(
        fraction=found.area,
        variance=float((found.of_area**2).sum()),
        most=found.most,
        inflation=variance_inflation(found.of_area, groups),
    )
    return of_map, of_auroc


class Ranked(NamedTuple):
    """Images in the order of their scores of one class, the highest first; equal scores are one step."""

    back: np.ndarray
    """Index of each image in this order"""
    hit: np.ndarray
    """Whether it is a positive, in this order, as `step`"""
    step: np.ndarray
    new: np.ndarray
    """Positives of each step"""
    found: np.ndarray
    """Positives of a step and of those before it"""
    seen: np.ndarray
    """Images of these"""

    @classmethod
    def of(cls, scores: np.ndarray, truth: np.ndarray) -> Ranked:
        order = np.argsort(-scores, kind="stable")
        ranked = scores[order]
        hit = truth[order]
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        found = np.cumsum(hit)[last]
        return cls(
            back=np.argsort(order),
            hit=hit,
            step=np.repeat(np.arange(len(last)), np.diff(last, prepend=-1)),
            new=np.diff(found, prepend=0),
            found=found,
            seen=last + 1,
        )

    @property
    def positives(self) -> int:
        return int(self.found[-1])

    @property
    def negatives(self) -> int:
        return len(self.hit) - self.positives

    def widened(self, influence: np.ndarray) -> np.ndarray:
        """As far from its mean among positives and among negatives as makes their variances unbiased."""
        for kind, size in ((self.hit, self.positives), (~self.hit, self.negatives)):
            mean = influence[kind].mean()  # not 0 if the value depends on how many are of this kind
            influence[kind] = mean + (influence[kind] - mean) * np.sqrt(size / max(size - 1, 1))
        return influence


class OfClass(NamedTuple):
    value: float
    unbiased: float
    influence: np.ndarray
    """Of each image on the value"""


def average_precision(ranked: Ranked) -> OfClass:
    """The unbiased value leaves each positive out of its own precision, and counts the others for all.

    With few positives, average precision is too high. A positive above all others takes the precision of the next one.
    """
    new = ranked.new
    seen = ranked.seen
    positives = ranked.positives
    precision = ranked.found / seen
    average = float((new * precision).sum()) / positives
    others = (ranked.found - 1) * positives / max(positives - 1, 1)
    others = others / np.maximum(others + seen - ranked.found, 1e-9)
    tops = np.flatnonzero(new)[:2]
    if seen[tops[0]] == 1:
        others[tops[0]] = others[tops[1]] if len(tops) > 1 else average
    after = np.cumsum((new / seen)[::-1])[::-1]
    weighted = np.cumsum((new * precision / seen)[::-1])[::-1]
    influence = (ranked.hit * (precision - average + after)[ranked.step] - weighted[ranked.step]) / positives
    influence = ranked.widened(influence)
    influence *= 1 + 2 / positives  # in simulations, the unbiased value varies so much more
    return OfClass(average, float((new * others).sum()) / positives, influence[ranked.back])


def area_under_curve(ranked: Ranked) -> OfClass:
    """AUROC, which has no bias."""
    positives = ranked.positives
    negatives = ranked.negatives
    wrong = np.diff(ranked.seen, prepend=0) - ranked.new
    beaten = negatives - np.cumsum(wrong) + wrong / 2  # negatives below, and half of the equal ones
    above = ranked.found - ranked.new / 2
    area = float((above * wrong).sum()) / (positives * negatives)
    influence = np.where(
        ranked.hit,
        (beaten[ranked.step] / negatives - area) / positives,
        (above[ranked.step] / positives - area) / negatives,
    )
    return OfClass(area, area, ranked.widened(influence)[ranked.back])
