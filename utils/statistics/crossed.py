"""Interval of a difference between two contenders for other seeds and other images: seeds crossed with images."""

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
"""Degrees of freedom below which the variance of the seeds is estimated from single runs, too, not only from pairs."""
HIDDEN = 0.2
"""Fraction of `by_both` that is added to the variance of the seeds, which may hide in it."""
# Assumed before anything is measured
DISAGREE = 0.2
"""Fraction of images that a run of one of two contenders predicts right and a run of the other predicts wrong."""
BY_SEED = 0.5
"""Fraction of these disagreements that another seed would change."""


class Noise(NamedTuple):
    """Variance of a mean difference, divided by its causes: two-way random effects, seeds crossed with images."""

    seeds: int
    images: int
    by_seed: float
    """Variance of the means of seeds, which includes `by_both`."""
    by_image: float
    """Variance of the means of images, which includes `by_both`, too."""
    by_both: float
    """Variance that neither the seed nor the image explains alone."""
    freedom: float
    """Degrees of freedom of `by_seed`."""
    groups: float
    """Effective number of groups of images; the number of images if they are not in groups."""

    def half_width(self, *levels: float) -> float:
        """Half the width of the interval of the difference, by Student's quantiles of these levels.

        The half widths by images and by seeds are added as squares. Few seeds estimate their variance badly. So
        `by_both`, which many images estimate well, counts with the images. But as far as seeds shift whole runs, it
        counts with the seeds, because a shift may be larger than it looks.
        """
        seed_shift = max(self.by_seed - self.by_both, 0.0)
        if seed_shift:
            both_with_seeds = self.by_both * seed_shift / self.by_seed
            seeds_half = half_width(math.sqrt(seed_shift + both_with_seeds), self.freedom, *levels)
        else:
            both_with_seeds = 0.0
            seeds_half = 0.0
        image_variance = max(self.by_image, self.by_both) - both_with_seeds
        images_half = half_width(math.sqrt(image_variance), max(self.groups - 1, 1), *levels)
        return math.hypot(images_half, seeds_half)

    def planned(self, seeds: int, times_images: float = 1.0) -> Noise:
        """The noise to expect with this number of seeds, and with `times_images` times the images."""
        # Variances of a single seed. That of whole runs does not depend on the number of images.
        seed_shift = max(self.by_seed - self.by_both, 0.0) * self.seeds
        both = self.by_both * self.seeds / times_images
        by_image_alone = max(self.by_image - self.by_both, 0.0) / times_images
        return Noise(
            seeds=seeds,
            images=round(self.images * times_images),
            by_seed=(seed_shift + both) / seeds,
            by_image=by_image_alone + both / seeds,
            by_both=both / seeds,
            freedom=self.freedom * (seeds - 1) / (self.seeds - 1),
            groups=self.groups * times_images,
        )


def noise_of(ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = ()) -> Noise:
    """Estimate the noise of the mean difference between two contenders.

    ours, theirs: arrays of seeds x images, the contribution of each image to the metric
    every: array of contenders x seeds, the metric of all contenders, these two included. Seeds are few, and more runs
        tell more about their variance.
    groups: the group of each image
    """
    differences = ours - theirs
    seeds, images = differences.shape
    effect, number_of_groups = design_effect(differences.mean(0), groups)
    by_image = variance_of_mean(differences.mean(0)) * effect
    if seeds == 1:
        return Noise(1, images, by_seed=0.0, by_image=by_image, by_both=0.0, freedom=0.0, groups=number_of_groups)

    seed_means = differences.mean(1, keepdims=True)
    residuals = differences - seed_means - differences.mean(0) + differences.mean()
    by_both = float((residuals**2).sum()) / (seeds - 1) / (images - 1) / seeds / images
    by_both *= statistics.fmean(design_effect(seed_residuals, groups)[0] for seed_residuals in residuals)

    # The variance of the seeds is the larger of two: that of this difference, and that of the runs of all contenders,
    # of which a difference has two.
    run_residuals = every - every.mean(0) - every.mean(1, keepdims=True) + every.mean()
    freedom = (len(every) - 1.0) * (seeds - 1)
    by_seed = max(float(seed_means.var(ddof=1)), 2 * float((run_residuals**2).sum()) / freedom) / seeds
    # The fewer runs there are, the more often a shift by the seed hides behind `by_both`.
    hidden = HIDDEN * by_both / math.sqrt(freedom)
    if freedom < FEW:
        # So few differences can agree by chance. The variance of each contender's own runs tells more (Welch).
        run_variances = every.var(1, ddof=1) / seeds
        by_seed = max(by_seed, 2 * float(run_variances.mean()))
        if run_variances.any():
            freedom = (seeds - 1) * float(run_variances.sum() ** 2 / (run_variances**2).sum())
    return Noise(seeds, images, by_seed + hidden, by_image, by_both, freedom, number_of_groups)


def crossed_interval(
    value: float, ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = (), comparisons: int = 1
) -> Difference:
    """The interval of a difference for other seeds and other images, and how many of them would show it if needed.

    value: the difference itself
    comparisons: number of comparisons for which the interval is corrected
    See `noise_of` for the other parameters.
    """
    noise = noise_of(ours, theirs, every, groups)
    level = bonferroni_level(comparisons)
    difference = Difference.around(value, noise.half_width(level), noise.seeds)
    difference = replace(difference, holds_for=LIKE_THESE)
    if difference.seen or noise.seeds == 1:
        return difference
    for seeds in range(noise.seeds + 1, MOST_ROUNDS + 1):
        if noise.planned(seeds).half_width(level, POWER) < abs(value):
            return replace(difference, runs_needed=seeds)
    for times_images in range(2, MOST_ROUNDS):
        if noise.planned(noise.seeds, times_images).half_width(level, POWER) < abs(value):
            return replace(difference, images_needed=times_images)
    return difference


def assumed_noise(seeds: int, images: int) -> Noise:
    """The noise to assume before anything is measured, of the difference of two accuracies in percent."""
    one_run = 100**2 * DISAGREE / images
    both = one_run * BY_SEED / seeds
    by_image = one_run * (1 - BY_SEED) + both
    return Noise(seeds, images, by_seed=both, by_image=by_image, by_both=both, freedom=0.0, groups=images)
