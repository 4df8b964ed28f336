"""DATA.SAMPLER balanced: an order in which each class is equally frequent."""

from __future__ import annotations

import numpy as np

from datasets.base import ImageDataset
from datasets.labels import members_of_classes
from utils.errors import UserError


class BalancedOrder:
    """Draws as many samples as there are, equally many of each class that has any.

    All images of a class are drawn before one is drawn again. Copy c of sample i is i + c * samples, so that
    `variants.Repeated` augments each copy differently. Drawing equally many, instead of leaving the class of every
    sample to chance, spares rare classes the noise of chance.
    """

    def __init__(self, labels: np.ndarray) -> None:
        self._members = members_of_classes(labels)
        self._samples = len(labels)
        self.classes = len(self._members)
        self.least = self._samples // max(self.classes, 1)
        """Samples of each class per epoch; some classes get one more, in every epoch others."""
        self._more = self._samples % max(self.classes, 1)
        most, smallest = self.least + (self._more > 0), min(map(len, self._members), default=1)
        self.copies = max(1, -(-most // smallest))
        """Most copies of a sample in an epoch."""

    def __call__(self, generator: np.random.Generator) -> np.ndarray:
        counts = np.full(self.classes, self.least)
        counts[generator.permutation(self.classes)[: self._more]] += 1
        drawn = []
        for members, count in zip(self._members, counts, strict=True):
            rounds = range(-(-count // len(members)))
            copies = [generator.permutation(members) + self._samples * copy for copy in rounds]
            drawn.append(np.concatenate(copies)[:count])
        return generator.permutation(np.concatenate(drawn))

    def words(self) -> str:
        """For the banner of a run."""
        each = f"{self.least:,}" + (f" or {self.least + 1:,}" if self._more else "")
        repeated = f", each image at most {self.copies} times" if self.copies > 1 else ""
        return f"sampler balanced: {each} images of each of {self.classes} classes per epoch{repeated}"


def balanced_order(dataset: ImageDataset, name: str) -> BalancedOrder:
    """The balanced order of a training split. `name`: DATA.DATASET."""
    labels = dataset.sample_labels()
    if labels is None:
        raise UserError(
            f"DATA.SAMPLER balanced: the data set {name} is read as a stream, so the labels of its images are not "
            "known when an epoch begins. Use DATA.SAMPLER=shuffle."
        )
    return BalancedOrder(labels)
