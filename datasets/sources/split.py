"""Splits: named by files and folders, or made by DATA.VAL_FRACTION or DATA.FOLD. For groups see grouped.py."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from datasets.base import TITLES, Part, part_of
from datasets.labels import members_of_classes
from utils.config.data import DataConfig
from utils.config.keys import deciding
from utils.config.kinds import Fold
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import generator_of
from utils.text import some_of

TRAIN = "train"
TEST = "test"
VALIDATION_NAMES = ("val", "valid", "validation", "dev")
"""Names of a validation split, in all kinds of data sets. The first that exists is read."""
SPLIT_NAMES = (TRAIN, *VALIDATION_NAMES, TEST)


def named_parts(names: Sequence[str], where: object, data: DataConfig) -> dict[Part, str]:
    """Which of the names that `where` has is which split. They are in the order of SPLIT_NAMES."""
    parts: dict[Part, str] = {"train": TRAIN} if TRAIN in names else {}
    validation = [name for name in names if name not in (TRAIN, TEST)]
    if validation:
        parts["val"] = validation[0]
    elif parts and TEST in names and data.KEEP_TEST:
        parts = {"all": TRAIN}
    elif TEST in names:
        parts["val"] = TEST
        if TRAIN in names and part_of(data, False) == "val":
            warn_once(
                f"{where}: the split test is used for validation, because no other split is read for it. It then "
                "chooses the best checkpoint, so accuracy on it is a little too high for a test result. "
                "DATA.KEEP_TEST=true keeps it for the end, and validates on a part of train."
            )
    if len(validation) > 1:
        warn_once(f"{where}: {validation[0]} is the validation split; {', '.join(validation[1:])} not read.")
    if TEST in names:
        parts["test"] = TEST
    return parts


def parts_in_files(root: Path, data: DataConfig, file_name: Callable[[str], str]) -> dict[Part, str]:
    """The files in `root` that are splits. `file_name`: of a split, from its name."""
    parts = named_parts([one for one in SPLIT_NAMES if (root / file_name(one)).is_file()], root, data)
    return {part: file_name(name) for part, name in parts.items()}


def split_named_in(name: str) -> str | None:
    """The word in a file or folder name that names a split."""
    match = re.search(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])", name.lower())
    return match[1] if match else None


def warn_of_skipped(root: str, files: Sequence[str]) -> None:
    """Name the files that are in no split although folders or file names name splits."""
    if files:
        warn_once(
            f"{root}: skipping files that are neither in the training split nor in the validation split: "
            f"{some_of(files)}"
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
    can_give = counts[by_remainder] < sizes[by_remainder] - 1
    counts[by_remainder[can_give][:missing]] += 1
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def shuffled_classes(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """Indices of the samples of each class, in a random order."""
    generator = generator_of(seed, purpose)
    return [generator.permutation(of_class) for of_class in members_of_classes(labels)]


def keys_of_split(data: DataConfig) -> list[str]:
    """The settings that split images without a validation split, but for those that have no effect here."""
    idle: tuple[str, ...] = ()
    if data.FOLD is not None:
        idle = ("DATA.VAL_FRACTION",)
    elif data.DATASET == "digits":  # whose own split is always the same
        idle = deciding("random split")
    return [key for key in deciding("split", "random split") if key not in idle]


def split_rows(
    labels: np.ndarray, data: DataConfig, part: Part, where: object, groups: Sequence[str] | None = None
) -> np.ndarray:
    """Indices of one split of samples with these labels, by DATA.FOLD or else DATA.VAL_FRACTION; for `all`, of all.

    `where` has these samples. `groups`: those of DATA.GROUP.
    """
    if part == "test":
        raise no_such_part(part, where)
    if part == "all":
        return np.arange(len(labels))
    if data.fold is not None and data.fold.folds > len(labels):
        raise UserError(f"DATA.FOLD {data.fold}: {len(labels)} images cannot fill {data.fold.folds} folds; use fewer.")
    if data.GROUP is not None and groups is not None:
        from datasets.sources.grouped import split_by_group

        train, validation = split_by_group(labels, groups, data)
    elif labels.ndim == 2:
        from datasets.sources.grouped import split_several_labels

        train, validation = split_several_labels(labels, data)
    elif data.fold is not None:
        train, validation = split_by_fold(labels, data.fold, data.SPLIT_SEED)
    else:
        train, validation = split(labels, data.VAL_FRACTION, data.SPLIT_SEED)
        if part == "val" and not len(validation):
            raise TooFewToSplit(
                f"There are too few images for a validation split: {len(labels)} in {len(np.unique(labels))} classes, "
                "and each class keeps one image for training. Add images, or a validation split of your own."
            )
        if len(validation) > 1.5 * data.VAL_FRACTION * len(labels) + 1:
            warn_once(
                f"{where}: {len(validation):,} of {len(labels):,} images validate, more than DATA.VAL_FRACTION "
                f"{data.VAL_FRACTION:g}, because each class gives at least one."
            )
    return train if part == "train" else validation


def split_by_fold(labels: np.ndarray, fold: Fold, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending: fold K of N, and the other folds.

    The folds are disjoint and cover all samples. Each class, and all classes together, give every fold the same
    number of images, or one more. They depend on the labels, N and the seed alone.
    """
    members = shuffled_classes(labels, seed, "folds")
    # Counting on from class to class keeps the folds equally large, too.
    fold_of = np.empty(len(labels), dtype=np.int64)
    fold_of[np.concatenate(members)] = np.arange(len(labels)) % fold.folds
    validates = fold_of == fold.number - 1
    return np.flatnonzero(~validates), np.flatnonzero(validates)
