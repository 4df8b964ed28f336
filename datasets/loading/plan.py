"""The batches that a loader fetches next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from datasets.base import Key


class Plan:
    """Batch sampler of the loader. Keys contain the epoch, so loading processes need no state."""

    def __init__(self) -> None:
        self.begin(0, ())

    def begin(self, epoch: int, batches: Iterable[np.ndarray]) -> None:
        self._rest: Iterator[list[Key]] = ([(epoch, index) for index in batch.tolist()] for batch in batches)

    def __iter__(self) -> Iterator[list[Key]]:
        return self._rest
