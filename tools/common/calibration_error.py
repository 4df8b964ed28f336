"""Calibration error (ECE): how far a model's confidence is from its accuracy, and how far by chance alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.statistics.groups import design_effect

BINS = 15
"""Number of bins of the calibration error"""
DRAWS = 200
"""Number of times that labels are drawn, for the calibration error that chance alone gives"""


class Bin(NamedTuple):
    """Images of similar confidence. Confidence and accuracy are percent."""

    images: int
    confidence: float
    accuracy: float


class Chance(NamedTuple):
    """Calibration error (ECE) in percent that perfectly calibrated models have on as many images by chance.

    Their labels are drawn by their probabilities. Images of a group (DATA.GROUP) are right and wrong together as often
    as those of the model are, so there are fewer independent ones, and chance gives more.
    """

    images: int
    mean: float
    percentile_95: float

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor, groups: Sequence[str] = ()) -> Chance:
        """Simulate models that are as confident on each image.

        `confidence`: 0 to 1, one per image. `right`: whether the model is right there. `groups`: those of the images.
        """
        images = len(confidence)
        generator = torch.Generator().manual_seed(0)

        def drawn() -> Tensor:
            return torch.rand(images, generator=generator)

        # Images of a group share one draw if both are chosen to share. The fraction of pairs that do is set so that
        # the design effect of the simulated errors is that of the model's.
        group_of_image = torch.arange(images)
        shared_pairs = 0.0
        if len(set(groups)) not in (0, images):
            group_of_image = torch.from_numpy(np.unique(groups, return_inverse=True)[1])

            def design_effect_of(is_right: Tensor) -> float:
                return design_effect((is_right.double() - confidence.nan_to_num()).numpy(), groups)[0]

            if_all_share = [design_effect_of(drawn()[group_of_image] < confidence) for _ in range(DRAWS)]
            shared_pairs = min(1.0, (design_effect_of(right) - 1) / (sum(if_all_share) / DRAWS - 1))

        errors = list[float]()
        for _ in range(DRAWS):
            draw = drawn()
            if shared_pairs > 0:
                shares = drawn() < math.sqrt(shared_pairs)
                draw = drawn()[group_of_image].where(shares, draw)
            errors.append(calibration(confidence, draw < confidence)[0])
        by_chance = torch.tensor(errors, dtype=torch.float64)
        return cls(images, float(by_chance.mean()), float(by_chance.quantile(0.95)))

    def words(self, ece: float) -> str:
        """Say whether the calibration error `ece` is beyond chance; '' if it is NaN."""
        if not math.isfinite(ece):
            return ""
        verdict = "is more than chance explains" if ece > self.percentile_95 else "may be chance"
        return (
            f"The calibration error {verdict}: a perfectly calibrated model that is as sure has {self.mean:.2f} % on "
            f"average on {self.images:,} images, and up to {self.percentile_95:.2f} % in 95 of 100 cases."
        )


def calibration(confidence: Tensor, right: Tensor) -> tuple[float, list[Bin]]:
    """Compute the expected calibration error (ECE) in percent, and its bins of equal width.

    `confidence`: 0 to 1, one per image. `right`: whether the guess is right. The error is the mean over the images of
    the distance between accuracy and mean confidence in their bin.
    """
    # Rounding up puts a confidence on the edge of two bins into the lower one.
    bin_of_image = (confidence.nan_to_num() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)

    def sum_by_bin(values: Tensor) -> Tensor:
        return torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_of_image, values)

    images = sum_by_bin(torch.ones_like(confidence))
    confidences = sum_by_bin(confidence)
    hits = sum_by_bin(right.double())
    # Sums instead of means weight each bin by its number of images.
    ece = 100 * float((confidences - hits).abs().sum() / len(confidence))
    at_least_one = images.clamp(min=1)
    means = zip(images, 100 * confidences / at_least_one, 100 * hits / at_least_one, strict=True)
    return ece, [Bin(int(count), float(mean), float(accuracy)) for count, mean, accuracy in means]
