"""What is to be fetched next, and what was asked for but has not come yet."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from datasets.base import Key


class Plan:
    """The batch sampler: tells loading processes the epoch with every index, so that they need no state.

    What was handed out stays known until it has come back, for the case that it never does.
    """

    def __init__(self) -> None:
        self.begin(0, ())

    def begin(self, epoch: int, batches: Iterable[np.ndarray]) -> None:
        self._rest: Iterator[list[Key]] = ([(epoch, index) for index in batch.tolist()] for batch in batches)
        self._out: deque[list[Key]] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        return self

    def __next__(self) -> list[Key]:
        keys = next(self._rest)
        self._out.append(keys)
        return keys

    def received(self) -> None:
        """The first of those that were out has come back."""
        self._out.popleft()

    def again(self) -> None:
        """Nothing of what is out will come back: it is handed out once more."""
        self._rest, self._out = itertools.chain(self._out, self._rest), deque()
