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
"""Fraction of `by_both` that is added to the variance by seeds, which may be larger than it looks."""
# Assumed before anything is measured
DISAGREE = 0.2
"""Fraction of images that a run of one of two contenders predicts right and a run of the other predicts wrong."""
BY_SEED = 0.5
"""Fraction of these disagreements that another seed would change."""


class Noise(NamedTuple):
    """Variance of a mean difference, divided by its causes: two-way random effects, seeds crossed with images.

    With variance components v_seed, v_image and v_both of a single seed and image, S seeds and I images, the mean has
    the variance v_seed / S + v_image / I + v_both / (S * I).
    """

    seeds: int
    images: int
    by_seed: float
    """v_seed / S + v_both / (S * I), which the means of the seeds show: it includes `by_both`."""
    by_image: float
    """v_image / I + v_both / (S * I), which the means of the images show: it includes `by_both`, too."""
    by_both: float
    """v_both / (S * I), which neither the seed nor the image explains alone."""
    freedom: float
    """Degrees of freedom of `by_seed`."""
    groups: float
    """Effective number of groups of images; the number of images if they are not in groups."""

    def half_width(self, *levels: float) -> float:
        """Return half the width of the interval of the mean difference, by Student's quantiles of these levels.

        `by_seed` and `by_image` are the variances of the mean difference as seeds and as images show them. Both include
        `by_both`, the variance that neither explains alone, which must count once. It counts with the images, because
        many images estimate a variance well, and few seeds badly. But if seeds also shift whole runs, a fraction of it
        counts with the seeds, because such a shift may be larger than it looks: the fraction of `by_seed` that is the
        shift. The half widths by seeds and by images have their own degrees of freedom, and are added as squares.

        levels: that of the interval; for the difference that would probably be seen, also that of its probability
        """
        seed_shift = max(self.by_seed - self.by_both, 0.0)
        if seed_shift:
            shift_fraction_of_both = self.by_both * seed_shift / self.by_seed
            seeds_half = half_width(math.sqrt(seed_shift + shift_fraction_of_both), self.freedom, *levels)
        else:
            shift_fraction_of_both = 0.0
            seeds_half = 0.0
        image_variance = max(self.by_image, self.by_both) - shift_fraction_of_both
        image_freedom = max(self.groups - 1, 1)
        images_half = half_width(math.sqrt(image_variance), image_freedom, *levels)
        return math.hypot(images_half, seeds_half)

    def planned(self, seeds: int, times_images: float = 1.0) -> Noise:
        """Predict the noise of a mean difference over other numbers of seeds and images.

        With S seeds, I images and variance components v, `by_seed` is v_seed / S + v_both / (S * I), `by_image` is
        v_image / I + v_both / (S * I), and `by_both` is v_both / (S * I).

        seeds: the new number of seeds
        times_images: factor by which the images, and their groups, become more
        """
        seed_shift = max(self.by_seed - self.by_both, 0.0) * self.seeds  # v_seed
        both = self.by_both * self.seeds / times_images  # v_both / I, for the new number of images
        image_alone = max(self.by_image - self.by_both, 0.0) / times_images  # v_image / I, too
        return Noise(
            seeds=seeds,
            images=round(self.images * times_images),
            by_seed=(seed_shift + both) / seeds,
            by_image=image_alone + both / seeds,
            by_both=both / seeds,
            freedom=self.freedom * (seeds - 1) / (self.seeds - 1),  # proportional to seeds - 1
            groups=self.groups * times_images,
        )


def noise_of(ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = ()) -> Noise:
    """Estimate the variances of the mean difference between two contenders, by a two-way analysis of variance.

    Seeds are crossed with images: each seed has one difference per image (random effects, one value per cell; see
    Searle, Casella and McCulloch, Variance Components, 1992).

    ours, theirs: arrays of seeds x images, the contribution of each image to the metric, in percent
    every: array of contenders x seeds, the metric of each run of all contenders, these two included. Seeds are few, and
        more runs tell more about their variance.
    groups: the group of each image; empty if images are not in groups
    """
    differences = ours - theirs
    seeds, images = differences.shape
    image_means = differences.mean(0)
    effect, effective_groups = design_effect(image_means, groups)
    by_image = variance_of_mean(image_means) * effect
    if seeds == 1:
        return Noise(1, images, by_seed=0.0, by_image=by_image, by_both=0.0, freedom=0.0, groups=effective_groups)

    # Interaction of seeds and images: its mean square, divided by the number of values in the mean
    seed_means = differences.mean(1, keepdims=True)
    residuals = differences - seed_means - image_means + differences.mean()
    by_both = float((residuals**2).sum()) / (seeds - 1) / (images - 1) / seeds / images
    by_both *= statistics.fmean(design_effect(seed_residuals, groups)[0] for seed_residuals in residuals)

    # Variance by seeds: the larger of two estimates. The first is from this difference. The second is from the runs of
    # all contenders, without the means of seeds and contenders; a difference has twice the variance of a run.
    difference_variance = float(seed_means.var(ddof=1))
    run_residuals = every - every.mean(0) - every.mean(1, keepdims=True) + every.mean()
    freedom = (len(every) - 1.0) * (seeds - 1)
    by_seed = max(difference_variance, 2 * float((run_residuals**2).sum()) / freedom) / seeds
    # Seeds may shift whole runs although the estimates show no more than `by_both`; more often so with few runs.
    hidden = HIDDEN * by_both / math.sqrt(freedom)
    if freedom < FEW:
        # So few differences can agree by chance. So there is a third estimate, as in Welch's test: from the variance of
        # each contender around its own mean, with the degrees of freedom by Welch and Satterthwaite,
        # (sum of v)**2 / sum of (v**2 / (seeds - 1)).
        run_variances = every.var(1, ddof=1) / seeds  # v of each contender's mean
        by_seed = max(by_seed, 2 * float(run_variances.mean()))
        if run_variances.any():
            freedom = (seeds - 1) * float(run_variances.sum() ** 2 / (run_variances**2).sum())
    return Noise(
        seeds=seeds,
        images=images,
        by_seed=by_seed + hidden,
        by_image=by_image,
        by_both=by_both,
        freedom=freedom,
        groups=effective_groups,
    )


def crossed_interval(
    value: float, ours: np.ndarray, theirs: np.ndarray, every: np.ndarray, groups: Groups = (), comparisons: int = 1
) -> Difference:
    """Return a difference with its 95 % interval, which holds for other seeds and other images.

    If the difference is within the noise, the result also has the number of seeds that would probably show it or, if
    even MOST_ROUNDS seeds would not, the factor by which more images would (none if that is MOST_ROUNDS or above).

    value: the difference between the two contenders
    comparisons: number of comparisons for which the interval is corrected
    See `noise_of` for the other parameters.
    """
    noise = noise_of(ours, theirs, every, groups)
    level = bonferroni_level(comparisons)
    difference = Difference.around(value, noise.half_width(level), noise.seeds)
    difference = replace(difference, holds_for=LIKE_THESE)
    if difference.seen or noise.seeds == 1:  # A single seed shows no variance by seeds.
        return difference

    # With POWER as a second level, the half width is the difference that would probably be seen.
    for seeds in range(noise.seeds + 1, MOST_ROUNDS + 1):
        if noise.planned(seeds).half_width(level, POWER) < abs(value):
            return replace(difference, runs_needed=seeds)
    for times_images in range(2, MOST_ROUNDS):
        if noise.planned(noise.seeds, times_images).half_width(level, POWER) < abs(value):
            return replace(difference, images_needed=times_images)
    return difference


def assumed_noise(seeds: int, images: int) -> Noise:
    """Return the noise to assume, before anything is measured, of the difference of two accuracies in percent."""
    # In one run, an image's difference is 0, or +-100 points where the contenders disagree: a variance of 100**2 *
    # DISAGREE, which is divided by the number of images for their mean.
    one_run = 100**2 * DISAGREE / images
    by_both = one_run * BY_SEED / seeds
    by_image = one_run * (1 - BY_SEED) + by_both
    return Noise(seeds, images, by_seed=by_both, by_image=by_image, by_both=by_both, freedom=0.0, groups=images)
