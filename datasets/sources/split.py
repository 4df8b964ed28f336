"""Splits by name, and splitting a data set that has no validation split of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from datasets.sources.files import FileList, FileSamples
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.seeding import key


def split_named_in(name: str, validation_names: Iterable[str]) -> str | None:
    """The word in a file or folder name that names a split: `train` or one of `validation_names`."""
    match = re.search(rf"(?<![a-z])(train|{'|'.join(validation_names)})(?![a-z])", name.lower())
    return match[1] if match else None


def split(labels: np.ndarray, fraction: float, seed: int, purpose: str = "split") -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending; they depend on the arguments alone.

    The split is stratified: each class gives the same fraction, and keeps at least one image for training.
    """
    generator = np.random.Generator(np.random.Philox(key=key(seed, purpose)))
    _, sizes = np.unique(labels, return_counts=True)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    members = [generator.permutation(of_class) for of_class in by_class]
    exact = sizes * fraction
    counts = np.floor(exact).astype(int)
    # Rounding down gives too few; the classes with the largest remainders give one more each.
    missing = math.ceil(round(len(labels) * fraction, 6)) - counts.sum()  # 70 * 0.1 is a little more than 7
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[counts[by_remainder] < sizes[by_remainder] - 1][:missing]] += 1
    if not counts.any():
        raise UserError(
            f"There are too few images for a validation split: {len(labels)} of {len(sizes)} classes, and each class "
            "keeps one for training. Add images, or a validation split."
        )
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def split_files(files: FileList, data: DataConfig, train: bool) -> FileSamples:
    """One split of these files, by DATA.VAL_FRACTION and DATA.SPLIT_SEED."""
    chosen = split(files.labels, data.VAL_FRACTION, data.SPLIT_SEED)[0 if train else 1]
    return files._replace(paths=[files.paths[index] for index in chosen], labels=files.labels[chosen]).samples()
