"""Iterative stratification: subsets of samples with several labels each, in which every label has its proportion.

The method is that of Sechidis, Tsoumakas and Vlahavas, "On the Stratification of Multi-Label Data", 2011. Unlike
theirs, subsets have exact sizes, and the result does not depend on the order of the label columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def stratified(labels: np.ndarray, sizes: Sequence[int], order: np.ndarray) -> np.ndarray:
    """The subset of each sample. `labels`: samples x classes, of zeros and ones; `order`: a random permutation."""
    columns = np.ascontiguousarray(labels[order].T)
    # The samples of a label decide which of two equally rare labels is first, so the order of columns does not.
    columns = columns[sorted(range(len(columns)), key=lambda label: columns[label].tobytes())]
    left, room = columns.sum(1, dtype=np.int64), list(sizes)
    wanted = np.outer(left, np.array(sizes) / len(labels)).tolist()
    placed = np.full(len(labels), -1)
    # The rarest label first: later, its samples would be where other labels need them.
    while (left > 0).any():
        rarest = int(np.where(left > 0, left, len(labels) + 1).argmin())
        for sample in np.flatnonzero((columns[rarest] > 0) & (placed < 0)).tolist():
            subset = _neediest(wanted[rarest], room)
            placed[sample] = subset
            room[subset] -= 1
            for label in columns[:, sample].nonzero()[0].tolist():
                wanted[label][subset] -= 1
                left[label] -= 1
    placed[placed < 0] = np.repeat(np.arange(len(room)), room)  # samples without a label
    subsets = np.empty_like(placed)
    subsets[order] = placed
    return subsets


def _neediest(wanted: list[float], room: list[int]) -> int:
    """The subset, of those with room, that lacks the most samples of a label; of equal ones, the one with most room."""
    return max((subset for subset, free in enumerate(room) if free), key=lambda subset: (wanted[subset], room[subset]))
