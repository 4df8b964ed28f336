"""Student's intervals of the difference of two means over seeds, folds or images."""

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
"""Probability with which the suggested number of seeds would show a difference of the size that was found."""
MOST_ROUNDS = 50
"""Largest number of seeds or folds to suggest; nobody trains more."""
# The images for which a difference holds
LIKE_THESE = "images like these"
THESE_ALONE = "these images alone"


@dataclass(frozen=True)
class Difference:
    """Difference of a contender from the baseline, with its interval, over pairs of runs of the same seed or fold."""

    value: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval, corrected for the number of comparisons; None with a single pair."""
    runs: int
    """Number of pairs."""
    seen: bool = False
    """Whether it is larger than the noise: 0 is outside the interval."""
    runs_needed: int | None = None
    """Number of pairs that would probably show a difference of this size.

    None if it is seen already, if more than MOST_ROUNDS would be needed, and for folds.
    """
    images_needed: float | None = None
    """Factor by which more validation images would probably show it; None unless no number of seeds would."""
    holds_for: str | None = None
    """LIKE_THESE or THESE_ALONE; None for differences in speed and memory."""

    @classmethod
    def around(cls, value: float, half_width: float, runs: int) -> Difference:
        """Make a Difference whose interval extends `half_width` to both sides of its value."""
        low = value - half_width
        high = value + half_width
        return cls(value, low, high, runs, seen=not low <= 0 <= high)

    def as_ratio(self) -> Difference:
        """Convert a difference of logarithms to the ratio of the two values."""
        low = None if self.low is None else math.exp(self.low)
        high = None if self.high is None else math.exp(self.high)
        return Difference(math.exp(self.value), low, high, self.runs, self.seen)


def bonferroni_level(comparisons: int) -> float:
    """Return the level of the quantile at the upper end of a 95 % interval, corrected for the number of comparisons.

    A single comparison has 0.975: each end of its interval leaves out 2.5 %. Bonferroni's correction divides these.
    """
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def half_width(error: float, freedom: float, *levels: float) -> float:
    """Return half the width of Student's interval: the standard error times Student's quantile of a level.

    With a second level, such as POWER, the quantiles are added. The result is then the smallest difference
    that would be seen with this probability.

    error: standard error of the estimate
    freedom: degrees of freedom of the standard error
    levels: the level of the interval's upper end, such as 0.975; then perhaps the probability of seeing a difference
    """
    from scipy.special import stdtrit  # It takes a moment to import.

    return sum(float(stdtrit(freedom, level)) for level in levels) * error


def student_interval(values: Sequence[float], comparisons: int, grain: float = 0.0, overlap: float = 0.0) -> Difference:
    """Return the mean of paired differences, with Student's interval (the interval of the paired t-test).

    If 0 is in the interval, the result also has the number of pairs that would probably show the difference.

    values: the difference of each pair of runs; a single pair has no interval
    comparisons: number of comparisons for which the interval is corrected
    grain: resolution of the metric, by which values vary at least
    overlap: for folds, validation images per training image; 0 for runs with different seeds. Folds share most of their
        training images, so that their values vary too little. The correction by Nadeau and Bengio (2003) adds this
        ratio to the 1 / runs by which the variance is multiplied.
    """
    mean = statistics.fmean(values)
    runs = len(values)
    if runs < 2:
        return Difference(mean, None, None, runs)

    # The difference of two values that are rounded to the grain has a standard deviation of grain / sqrt(6).
    deviation = math.hypot(statistics.stdev(values), grain / math.sqrt(6))
    level = bonferroni_level(comparisons)
    standard_error = deviation * math.sqrt(1 / runs + overlap)
    half = half_width(standard_error, runs - 1, level)
    difference = Difference.around(mean, half, runs)
    if difference.seen or overlap:  # More folds would overlap, too: no number of them is suggested.
        return difference

    for more_runs in range(runs + 1, MOST_ROUNDS + 1):
        planned_error = deviation / math.sqrt(more_runs)
        # With POWER as a second level, the half width is the difference that would probably be seen.
        if half_width(planned_error, more_runs - 1, level, POWER) < abs(mean):
            return replace(difference, runs_needed=more_runs)
    return difference


def student_interval_of_images(values: np.ndarray, groups: Groups = ()) -> Difference:
    """Return the mean of a value per image, with Student's interval; images may be in groups."""
    effect, effective_groups = design_effect(values, groups)
    standard_error = math.sqrt(float(values.var(ddof=1)) * effect / len(values))
    half = half_width(standard_error, max(effective_groups - 1, 1), bonferroni_level(1))
    return Difference.around(float(values.mean()), half, len(values))


def pooled_interval(
    ours: Sequence[float], theirs: Sequence[float], every: Iterable[Sequence[float]], comparisons: int
) -> Difference:
    """Return the difference of two means, with Student's interval by the pooled variance of all contenders.

    The pooled variance (mean square within contenders) is the sum of squared deviations of the values from the mean of
    their contender, divided by the degrees of freedom. The result has no interval if each contender has a single value.

    ours, theirs: the values of the contender and of the baseline, which need not be pairs
    every: the values of all contenders, these two included
    comparisons: number of comparisons for which the interval is corrected
    """
    value = statistics.fmean(ours) - statistics.fmean(theirs)
    runs = min(len(ours), len(theirs))
    freedom = 0
    squares = list[float]()
    for contender_values in filter(None, every):
        mean = statistics.fmean(contender_values)
        squares += [(contender_value - mean) ** 2 for contender_value in contender_values]
        freedom += len(contender_values) - 1
    if freedom == 0:
        return Difference(value, None, None, runs)
    pooled_variance = sum(squares) / freedom
    standard_error = math.sqrt(pooled_variance * (1 / len(ours) + 1 / len(theirs)))
    half = half_width(standard_error, freedom, bonferroni_level(comparisons))
    return Difference.around(value, half, runs)


def of_different_images(percents: tuple[float, float], images: int, comparisons: int = 1) -> Interval:
    """Return the interval of the difference of two percentages, as if each were of images of its own.

    It is wider than the interval for the same images, for which the result for each image must be known.
    """
    z = statistics.NormalDist().inv_cdf(bonferroni_level(comparisons))
    return newcombe(percents, (images, images), z)
