"""Noise of the difference of two means, over seeds, folds or images: Student's intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from utils.statistics.groups import Groups, design_effect
from utils.statistics.proportions import Interval, newcombe

CONFIDENCE = 0.95
POWER = 0.8
"""Chance with which so many seeds, as are named, would show a difference of the size that was found."""
MOST_ROUNDS = 50
"""Beyond so many seeds or folds it is not said how many would show a difference: nobody trains them."""
# Of which images a difference speaks
LIKE_THESE = "images like these"
THESE_ALONE = "these images alone"


@dataclass(frozen=True)
class Difference:
    """Difference of a contender from the baseline, over pairs of runs with the same seed or fold."""

    value: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval, corrected for the number of comparisons; None with a single pair."""
    runs: int
    """Number of pairs."""
    seen: bool = False
    """Whether it is larger than the noise."""
    runs_needed: int | None = None
    """So many pairs would probably show a difference of this size; None if it is seen, if too many, or of folds."""
    images_needed: float | None = None
    """So many times the validation images would, where no number of seeds does."""
    holds_for: str | None = None
    """LIKE_THESE or THESE_ALONE; None of speed and memory."""

    @classmethod
    def around(cls, value: float, half: float, runs: int) -> Difference:
        """`half`: half the width of its interval."""
        low = value - half
        high = value + half
        return cls(value, low, high, runs, seen=not low <= 0 <= high)

    def as_ratio(self) -> Difference:
        """Of a difference of logarithms."""
        low = None if self.low is None else math.exp(self.low)
        high = None if self.high is None else math.exp(self.high)
        return Difference(math.exp(self.value), low, high, self.runs, self.seen)


def bonferroni_level(comparisons: int) -> float:
    """Of the quantile at each end of an interval, corrected for the number of comparisons."""
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def half_width(error: float, freedom: float, *levels: float) -> float:
    """Student's quantiles of these levels, added up, times the standard error."""
    from scipy.special import stdtrit  # a moment to import

    return sum(float(stdtrit(freedom, level)) for level in levels) * error


def student_interval(values: Sequence[float], comparisons: int, grain: float = 0.0, overlap: float = 0.0) -> Difference:
    """Student's interval of the mean of `values`. `grain`: the resolution of the metric, a lower bound of the noise.

    `overlap`: validation images per training image of folds. Folds share most of their training images, so their
    values vary too little; Nadeau and Bengio (2003) correct for that by adding this ratio to the variance of the mean.
    """
    mean = statistics.fmean(values)
    runs = len(values)
    if runs < 2:
        return Difference(mean, None, None, runs)
    # Standard deviation of the difference of two values rounded to the grain.
    spread = math.hypot(statistics.stdev(values), grain / math.sqrt(6))
    level = bonferroni_level(comparisons)
    half = half_width(spread * math.sqrt(1 / runs + overlap), runs - 1, level)
    found = Difference.around(mean, half, runs)
    if found.seen or overlap:
        return found
    for more in range(runs + 1, MOST_ROUNDS + 1):
        if half_width(spread / math.sqrt(more), more - 1, level, POWER) < abs(mean):
            return replace(found, runs_needed=more)
    return found


def student_interval_of_images(values: np.ndarray, groups: Groups = ()) -> Difference:
    """Student's interval of the mean of a value per image. `groups`: of the images."""
    effect, number = design_effect(values, groups)
    error = math.sqrt(float(values.var(ddof=1)) * effect / len(values))
    half = half_width(error, max(number - 1, 1), bonferroni_level(1))
    return Difference.around(float(values.mean()), half, len(values))


def pooled_interval(
    ours: Sequence[float], theirs: Sequence[float], every: Iterable[Sequence[float]], comparisons: int
) -> Difference:
    """Of the difference of two means, where the noise is that of all contenders around their means.

    `every`: the values of each contender, these two among them.
    """
    value = statistics.fmean(ours) - statistics.fmean(theirs)
    runs = min(len(ours), len(theirs))
    freedom = 0
    squares = list[float]()
    for values in filter(None, every):
        mean = statistics.fmean(values)
        squares += [(one - mean) ** 2 for one in values]
        freedom += len(values) - 1
    if not freedom:
        return Difference(value, None, None, runs)
    error = math.sqrt(sum(squares) / freedom * (1 / len(ours) + 1 / len(theirs)))
    return Difference.around(value, half_width(error, freedom, bonferroni_level(comparisons)), runs)


def of_different_images(percents: tuple[float, float], images: int, comparisons: int = 1) -> Interval:
    """As if the images of the two were different ones, which makes the interval wider than that of the same images."""
    z = statistics.NormalDist().inv_cdf(bonferroni_level(comparisons))
    return newcombe(percents, (images, images), z)
