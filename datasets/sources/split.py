"""A validation part for data sets that come without one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from datasets.sources.files import FileSamples, PathTable
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import key


def split(labels: np.ndarray, fraction: float, seed: int, purpose: str = "split") -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation part, each ascending.

    They depend on the arguments alone. Every class gives the same share, and keeps at least one image for training.
    """
    generator = np.random.Generator(np.random.Philox(key=key(seed, purpose)))
    _, sizes = np.unique(labels, return_counts=True)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    members = [generator.permutation(of_class) for of_class in by_class]
    exact = sizes * fraction
    counts = np.floor(exact).astype(int)
    # Rounded down there are too few; the classes that lost most to the rounding give one more.
    missing = math.ceil(round(len(labels) * fraction, 6)) - counts.sum()  # 70 * 0.1 is a little more than 7
    neediest = np.argsort(counts - exact, kind="stable")
    counts[neediest[counts[neediest] < sizes[neediest] - 1][:missing]] += 1
    if not counts.any():
        raise UserError(
            f"There are too few images to part them: {len(labels)} of {len(sizes)} classes, and each class keeps one "
            f"for training. Add images, or give the data set a validation part of its own."
        )
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def split_files(
    root: Path, paths: list[str], labels: np.ndarray, classes: list[str] | None, data: DataConfig, train: bool
) -> FileSamples:
    """One part of these files, by DATA.VAL_FRACTION and DATA.SPLIT_SEED."""
    chosen = split(labels, data.VAL_FRACTION, data.SPLIT_SEED)[0 if train else 1]
    return FileSamples(root, PathTable(paths[index] for index in chosen), labels[chosen], classes)
