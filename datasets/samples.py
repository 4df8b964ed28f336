"""What a source of encoded images gives: bytes by number, a label each, and an order to go through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

Encoded = bytes | np.ndarray
"""A file's bytes, or pixels (height x width x channels, uint8) that need no decoding."""

Stored = Literal["files", "tar files", "pixels"]
"""Images as files of their own, as encoded images in tar files, or as pixels that need no decoding."""


class Samples(ABC):
    """One part of a data set. Loading processes share it: it holds no open file, and no object a sample."""

    labels: np.ndarray
    """int64, one a sample"""
    classes: list[str] | None = None
    """Names of the classes in the order of their labels, where they are known."""
    stored: Stored = "files"
    remote = False
    """Read through a network, for which loading processes wait without taking a core."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The sample's image as it is stored. Raises OSError where it cannot be had."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What messages and lists of broken files call the sample; it leads a person to it."""

    def expect(self, indices: Sequence[int]) -> None:  # noqa: B027 - most sources have nothing to do
        """These are read next. A source that is far away may fetch them all at once."""

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The order of one epoch: every sample once."""
        return generator.permutation(len(self))
