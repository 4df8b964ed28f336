"""Which samples an update sees, and which process works on them.

An epoch is one permutation of the samples, cut into micro-batches of `batch_size`; `accum * world` of them in a row
are the global window of one update. The cut knows nothing of ranks, so another number of processes with the same
global batch meets the same micro-batches under the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from datasets.base import ImageDataset
from utils.errors import UserError
from utils.seeding import key


class Share(NamedTuple):
    """One micro-batch of one process."""

    number: int
    """Its place in the global window: what the random numbers drawn on it depend on."""
    indices: np.ndarray
    weight: float
    """Multiplies the mean loss, so that the sum over processes is the mean over the window's micro-batches."""


class EpochOrder:
    """The windows of an epoch as one process sees them."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        accum: int,
        rank: int,
        world: int,
        seed: int,
        drop_last: bool,
        copies: int = 1,
        shuffled: Callable[[np.random.Generator], np.ndarray] | None = None,
    ) -> None:
        """`shuffled` gives the order of an epoch: all samples once. Left out, any permutation is as good as another."""
        self.samples, self.batch_size, self.accum, self.copies = samples, batch_size, accum, copies
        self.rank, self.world, self.seed = rank, world, seed
        self._shuffled = shuffled or (lambda generator: generator.permutation(samples))
        self._micro_batches = samples // batch_size if drop_last else -(-samples // batch_size)
        if not self._micro_batches:
            raise UserError(_too_large(samples, batch_size))
        self._per_window = accum * world
        self.updates = -(-self._micro_batches // self._per_window)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[Share, ...]]:
        """One item an update, from update `start` (counted from 0) to the end of the epoch."""
        permutation = self.permutation(epoch)
        for update in range(start, self.updates):
            yield self._window(permutation, update * self._per_window)

    def permutation(self, epoch: int) -> np.ndarray:
        """The samples in the order of that epoch."""
        generator = np.random.Generator(np.random.Philox(key=key(self.seed, "order", epoch)))
        return self._with_copies(self._shuffled(generator))

    def _with_copies(self, permutation: np.ndarray) -> np.ndarray:
        """Each sample `copies` times in a row, as many as there were; copy c of sample i is i + c * samples."""
        if self.copies == 1:
            return permutation
        places = np.arange(self.samples)
        return permutation[places // self.copies] + places % self.copies * self.samples

    def _window(self, permutation: np.ndarray, first: int) -> tuple[Share, ...]:
        def indices(number: int) -> np.ndarray:
            begin = (first + number) * self.batch_size
            return permutation[begin : begin + self.batch_size]

        real = min(self._per_window, self._micro_batches - first)
        each, more = divmod(real, self.world)
        begin = self.rank * each + min(self.rank, more)
        end = begin + each + (self.rank < more)
        shares = [Share(v, indices(v), 1 / real) for v in range(begin, end)]
        if more and self.rank >= more:
            # All processes must run equally often, or the exchange of gradients waits for ever: a pass of weight 0.
            shares.append(Share(real + self.rank - more, indices(0), 0.0))
        return tuple(shares)


def identity_of(dataset: ImageDataset, order: EpochOrder) -> dict[str, int | str]:
    """Alike on all processes, and wherever the data set lies."""
    # Where images are left out (DATA.EXCLUDE), the order depends on which.
    digest = hashlib.sha256(order.permutation(1).tobytes())
    if samples := dataset.single_images():
        digest.update(samples.labels.tobytes())
    return {"number": order.samples, "updates": order.updates, "order": digest.hexdigest()}


def validation_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """The samples rank, rank + world, ... in batches of one shape, equally many on every process; -1 is padding.

    `batch_size` is the greatest size; where less gives as many batches with less padding, it is less.
    """
    longest = -(-samples // world)
    batches = -(-longest // batch_size)
    size = -(-longest // batches) if batches else 0
    padded = np.full(batches * size, -1, dtype=np.int64)
    mine = np.arange(rank, samples, world)
    padded[: len(mine)] = mine
    return list(padded.reshape(batches, size)) if batches else []


def _too_large(samples: int, batch_size: int) -> str:
    if not samples:
        return "The training set is empty: DATA.DATASET and DATA.DATA_PATH must name one with images."
    return (
        f"DATA.BATCH_SIZE is {batch_size}, but the training set has only {samples} images: not one full batch. "
        f"Set it to {samples} or less, or keep batches that are not full with DATA.DROP_LAST=false."
    )
