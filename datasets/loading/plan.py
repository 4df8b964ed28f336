"""Queue of batches to fetch, and of those that were requested but have not arrived."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from datasets.base import Key


class Plan:
    """Batch sampler of the loader. Keys contain the epoch, so loading processes need no state.

    It keeps requested batches until they arrive, so that they can be requested again after a loading process dies.
    """

    def __init__(self) -> None:
        self.begin(0, ())

    def begin(self, epoch: int, batches: Iterable[np.ndarray]) -> None:
        self._rest: Iterator[list[Key]] = ([(epoch, index) for index in batch.tolist()] for batch in batches)
        self._in_flight: deque[list[Key]] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        return self

    def __next__(self) -> list[Key]:
        keys = next(self._rest)
        self._in_flight.append(keys)
        return keys

    def mark_received(self) -> None:
        """Note that the oldest requested batch has arrived."""
        self._in_flight.popleft()

    def requeue(self) -> None:
        """Request all batches again that have not arrived."""
        self._rest, self._in_flight = itertools.chain(self._in_flight, self._rest), deque()
