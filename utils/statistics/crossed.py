"""Noise of a difference between two contenders for other seeds and other images: seeds crossed with images."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from utils.statistics.differences import LIKE_THESE, MOST_ROUNDS, POWER, Difference, bonferroni_level, half_width
from utils.statistics.groups import Groups, design_effect
from utils.statistics.paired import variance_of_mean

FEW = 4
"""Degrees of freedom below which the seeds' variance is not that of pairs alone"""
HIDDEN = 0.2
"""Fraction of `by_both` that is added to it"""
# Assumed before anything is measured
DISAGREE = 0.2
"""Fraction of images on which runs of two contenders disagree about right or wrong"""
BY_SEED = 0.5
"""How much of that another seed would change"""


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

    def half_width(self, *levels: float) -> float:
        """Half the width of the interval: the squares of those of images and of seeds, added up.

        Few seeds estimate their variance badly, so `by_both`, which many images estimate well, belongs to the images.
        It belongs to the seeds as far as whole runs shift: a shift may be larger than it looks.
        """
        shift = max(self.by_seed - self.by_both, 0.0)
        with_seeds = self.by_both * shift / self.by_seed if shift else 0.0
        of_images = max(self.by_image, self.by_both) - with_seeds
        of_seeds = half_width(math.sqrt(shift + with_seeds), self.freedom, *levels) if shift else 0.0
        return math.hypot(half_width(math.sqrt(of_images), max(self.groups - 1, 1), *levels), of_seeds)

    def planned(self, seeds: int, times_images: float = 1.0) -> Noise:
        """That of as many seeds, and so many times the images."""
        shift = max(self.by_seed - self.by_both, 0.0) * self.seeds
        both = self.by_both * self.seeds / times_images
        of_images = max(self.by_image - self.by_both, 0.0) / times_images
        return Noise(
            seeds=seeds,
            images=round(self.images * times_images),
            by_seed=(shift + both) / seeds,
            by_image=of_images + both / seeds,
            by_both=both / seeds,
            freedom=self.freedom * (seeds - 1) / (self.seeds - 1),
            groups=self.groups * times_images,
        )


def noise_of(ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = ()) -> Noise:
    """`ours`, `theirs`: seeds x images, what each adds to the mean of the metric. `groups`: of the images.

    `every`: contenders x seeds, the metric of all contenders, these two among them: seeds are few, and more runs say
    more of their variance.
    """
    apart = ours - theirs
    seeds, images = apart.shape
    effect, number = design_effect(apart.mean(0), groups)
    by_image = variance_of_mean(apart.mean(0)) * effect
    if seeds == 1:
        return Noise(1, images, by_seed=0.0, by_image=by_image, by_both=0.0, freedom=0.0, groups=number)
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


def crossed_interval(
    value: float, ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = (), comparisons: int = 1
) -> Difference:
    """The interval of a difference for other seeds and other images: see `noise_of`. `value`: the difference itself."""
    noise = noise_of(ours, theirs, every, groups)
    level = bonferroni_level(comparisons)
    found = Difference.around(value, noise.half_width(level), noise.seeds)
    found = replace(found, holds_for=LIKE_THESE)
    if found.seen or noise.seeds == 1:
        return found
    for seeds in range(noise.seeds + 1, MOST_ROUNDS + 1):
        if noise.planned(seeds).half_width(level, POWER) < abs(value):
            return replace(found, runs_needed=seeds)
    for times in range(2, MOST_ROUNDS):
        if noise.planned(noise.seeds, times).half_width(level, POWER) < abs(value):
            return replace(found, images_needed=times)
    return found


def assumed_noise(seeds: int, images: int) -> Noise:
    """Of the difference of two accuracies in percent."""
    of_one = 100**2 * DISAGREE / images
    both = of_one * BY_SEED / seeds
    by_image = of_one * (1 - BY_SEED) + both
    return Noise(seeds, images, by_seed=both, by_image=by_image, by_both=both, freedom=0.0, groups=images)
