"""Splits: named by files and folders, or made by a fraction of each class of a data set that comes without."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from datasets.base import TITLES, Part, part_of
from datasets.labels import members_of_classes
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import key

MOST_NAMED = 5
TRAIN, TEST = "train", "test"
VALIDATION_NAMES = ("val", "valid", "validation", "dev")
"""Names of a validation split, in all kinds of data sets. The first that exists is read."""
SPLIT_NAMES = (TRAIN, *VALIDATION_NAMES, TEST)


def named_parts(names: Sequence[str], where: object, read: Part = "val") -> dict[Part, str]:
    """Which of the names that `where` has is which split. They are in the order of SPLIT_NAMES. `read`: to evaluate."""
    parts: dict[Part, str] = {"train": TRAIN} if TRAIN in names else {}
    validation = [name for name in names if name not in (TRAIN, TEST)]
    if validation:
        parts["val"] = validation[0]
    elif TEST in names:
        parts["val"] = TEST
        if TRAIN in names and read == "val":
            warn_once(
                f"{where}: the split test is used for validation, because no other split is read for it. It "
                "then chooses the best checkpoint, so accuracy on it is a little too high for a test result."
            )
    if len(validation) > 1:
        warn_once(f"{where}: {validation[0]} is the validation split; {', '.join(validation[1:])} not read.")
    if TEST in names:
        parts["test"] = TEST
    return parts


def parts_in_files(root: Path, data: DataConfig, file_name: Callable[[str], str]) -> dict[Part, str]:
    """The files in `root` that are splits. `file_name`: of a split, from its name."""
    parts = named_parts(
        [name for name in SPLIT_NAMES if (root / file_name(name)).is_file()], root, part_of(data, False)
    )
    return {part: file_name(name) for part, name in parts.items()}


def split_named_in(name: str, names: Iterable[str] = SPLIT_NAMES) -> str | None:
    """The word in a file or folder name that names a split."""
    match = re.search(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", name.lower())
    return match[1] if match else None


def warn_of_skipped(root: str, files: Sequence[str]) -> None:
    """Name the files that are in no split although folders or file names name splits."""
    if files:
        more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
        warn_once(
            f"{root}: skipping files that are neither in the training split nor in the validation split: "
            f"{', '.join(files[:MOST_NAMED])}{more}"
        )


class TooFewToSplit(UserError):
    """No class has an image that it can give to a validation split."""


def no_such_part(part: str, where: object) -> UserError:
    """The error for a split that the data set does not have."""
    instead = "-part all evaluates all images" if part == "val" else "-part val evaluates the validation split"
    return UserError(f"DATA.PART (-part) {part}: {where} has no {TITLES[part]}; {instead}.")


def split(labels: np.ndarray, fraction: float, seed: int, purpose: str = "split") -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending; they depend on the arguments alone.

    The split is stratified: each class gives the same fraction, and keeps at least one image for training. Each
    class of two or more images gives at least one, even if the validation split becomes larger for it.
    """
    members = shuffled_classes(labels, seed, purpose)
    sizes = np.array([len(of_class) for of_class in members])
    exact = sizes * fraction
    counts = np.maximum(np.floor(exact).astype(int), sizes > 1)
    # Rounding down gives too few; the classes with the largest remainders give one more each.
    missing = max(0, math.ceil(round(len(labels) * fraction, 6)) - counts.sum())  # 70 * 0.1 is a little more than 7
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[counts[by_remainder] < sizes[by_remainder] - 1][:missing]] += 1
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def shuffled_classes(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """Indices of the samples of each class, in a random order."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, purpose)))
    return [generator.permutation(of_class) for of_class in members_of_classes(labels)]
