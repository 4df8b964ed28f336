"""Noise of a difference between two contenders: over seeds or folds, and over the images too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.report.intervals import Groups, design_effect, variance_of_mean

CONFIDENCE = 0.95
POWER = 0.8
"""Chance with which so many seeds, as are named, would show a difference of the size that was found."""
MOST_ROUNDS = 50
"""Beyond so many seeds or folds it is not said how many would show a difference: nobody trains them."""
FEW, HIDDEN = 4, 0.2
"""Degrees of freedom below which the seeds' variance is not that of pairs alone; fraction of `by_both` added to it"""
LIKE_THESE, THESE_ALONE = "images like these", "these images alone"
"""Of which images a difference speaks"""


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


def interval(values: Sequence[float], comparisons: int, grain: float = 0.0, overlap: float = 0.0) -> Difference:
    """Student's interval of the mean of `values`. `grain`: the resolution of the metric, a lower bound of the noise.

    `overlap`: validation images per training image of folds. Folds share most of their training images, so their
    values vary too little; Nadeau and Bengio (2003) correct for that by adding this ratio to the variance of the mean.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, None, None, len(values))
    # Standard deviation of the difference of two values rounded to the grain.
    spread = math.hypot(statistics.stdev(values), grain / math.sqrt(6))
    level = level_of(comparisons)
    reach = students(spread * math.sqrt(1 / len(values) + overlap), len(values) - 1, level)
    low, high = mean - reach, mean + reach
    seen = not low <= 0 <= high
    more = () if seen or overlap else range(len(values) + 1, MOST_ROUNDS + 1)
    needed = (n for n in more if students(spread / math.sqrt(n), n - 1, level, POWER) < abs(mean))
    return Difference(mean, low, high, len(values), seen, next(needed, None))


def interval_of_images(values: np.ndarray, groups: Groups = ()) -> Difference:
    """Student's interval of the mean of a value per image. `groups`: of the images."""
    mean = float(values.mean())
    times, number = design_effect(values, groups)
    error = math.sqrt(float(values.var(ddof=1)) * times / len(values))
    reach = students(error, max(number - 1, 1), level_of(1))
    low, high = mean - reach, mean + reach
    return Difference(mean, low, high, len(values), seen=not low <= 0 <= high)


def level_of(comparisons: int) -> float:
    """Of the quantile at each end of an interval, corrected for the number of comparisons."""
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def students(error: float, freedom: float, *levels: float) -> float:
    """Student's quantiles of these levels, added up, times the standard error."""
    from scipy.special import stdtrit  # a moment to import

    return sum(float(stdtrit(freedom, level)) for level in levels) * error


class Noise(NamedTuple):
    """Variance of a mean difference by its causes: two-way random effects, seeds crossed with images."""

    seeds: int
    images: int
    by_seed: float
    """Of the means of seeds; it has `by_both` in it"""
    by_image: float
    """Of the means of images; it has `by_both` in it, too"""
    by_both: float
    """Of what neither a seed nor an image explains alone"""
    freedom: float
    """Degrees of freedom of `by_seed`"""
    groups: float
    """Effective number of groups of images, or of images"""

    def reach(self, *levels: float) -> float:
        """Half the width of the interval: the squares of the reaches of images and of seeds, added up.

        Few seeds estimate their variance badly, so `by_both`, which many images estimate well, belongs to the images.
        It belongs to the seeds as far as whole runs shift: a shift may be larger than it looks.
        """
        shift = max(self.by_seed - self.by_both, 0.0)
        with_seeds = self.by_both * shift / self.by_seed if shift else 0.0
        of_images = max(self.by_image, self.by_both) - with_seeds
        of_seeds = students(math.sqrt(shift + with_seeds), self.freedom, *levels) if shift else 0.0
        return math.hypot(students(math.sqrt(of_images), max(self.groups - 1, 1), *levels), of_seeds)

    def planned(self, seeds: int, times_images: float = 1.0) -> Noise:
        """That of as many seeds, and so many times the images."""
        shift, both = max(self.by_seed - self.by_both, 0.0) * self.seeds, self.by_both * self.seeds / times_images
        of_images = max(self.by_image - self.by_both, 0.0) / times_images
        by_seed, by_image = (shift + both) / seeds, of_images + both / seeds
        images, freedom = round(self.images * times_images), self.freedom * (seeds - 1) / (self.seeds - 1)
        return Noise(seeds, images, by_seed, by_image, both / seeds, freedom, self.groups * times_images)


def noise_of(ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = ()) -> Noise:
    """`ours`, `theirs`: seeds x images, what each adds to the mean of the metric. `groups`: of the images.

    `every`: contenders x seeds, the metric of all contenders, these two among them: seeds are few, and more runs say
    more of their variance.
    """
    apart = ours - theirs
    seeds, images = apart.shape
    times, number = design_effect(apart.mean(0), groups)
    by_image = variance_of_mean(apart.mean(0)) * times
    if seeds == 1:
        return Noise(1, images, 0.0, by_image, 0.0, 0.0, number)
    rows = apart.mean(1, keepdims=True)
    rest = apart - rows - apart.mean(0) + apart.mean()
    by_both = float((rest**2).sum()) / (seeds - 1) / (images - 1) / seeds / images
    by_both *= statistics.fmean(design_effect(of_seed, groups)[0] for of_seed in rest)
    of_runs = every - every.mean(0) - every.mean(1, keepdims=True) + every.mean()
    freedom = (len(every) - 1.0) * (seeds - 1)
    by_seed = max(float(rows.var(ddof=1)), 2 * float((of_runs**2).sum()) / freedom) / seeds
    # The fewer, the more often a shift hides behind `by_both`.
    hidden = HIDDEN * by_both / math.sqrt(freedom)
    if freedom < FEW:
        # So few can agree by chance. The spread of each contender's own runs says more (Welch).
        own = every.var(1, ddof=1) / seeds
        by_seed = max(by_seed, 2 * float(own.mean()))
        freedom = (seeds - 1) * float(own.sum() ** 2 / (own**2).sum()) if own.any() else freedom
    return Noise(seeds, images, by_seed + hidden, by_image, by_both, freedom, number)


def over_images(
    value: float, ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = (), comparisons: int = 1
) -> Difference:
    """The interval of a difference for other seeds and other images: see `noise_of`. `value`: the difference itself."""
    noise, level = noise_of(ours, theirs, every, groups), level_of(comparisons)
    reach = noise.reach(level)
    low, high = value - reach, value + reach
    found = Difference(value, low, high, noise.seeds, not low <= 0 <= high, holds_for=LIKE_THESE)
    if found.seen or noise.seeds == 1:
        return found

    def first(plans: Iterable[tuple[int, Noise]]) -> int | None:
        return next((number for number, plan in plans if plan.reach(level, POWER) < abs(value)), None)

    seeds = first((each, noise.planned(each)) for each in range(noise.seeds + 1, MOST_ROUNDS + 1))
    times = None if seeds else first((each, noise.planned(noise.seeds, each)) for each in range(2, MOST_ROUNDS))
    return replace(found, runs_needed=seeds, images_needed=times)


DISAGREE, BY_SEED = 0.2, 0.5
"""Assumed before anything is measured: fraction of images on which runs of two contenders disagree about right or
wrong, and how much of that another seed would change."""


def assumed_noise(seeds: int, images: int) -> Noise:
    """Of the difference of two accuracies in percent."""
    of_one = 100**2 * DISAGREE / images
    both = of_one * BY_SEED / seeds
    return Noise(seeds, images, both, of_one * (1 - BY_SEED) + both, both, 0.0, images)
