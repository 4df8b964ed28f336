"""Find the splits that files and folders name, or make them by DATA.VAL_FRACTION or DATA.FOLD.

Splits by groups, and of images with several labels, are made in grouped.py.
"""

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
    """Map each split to the name under which a data set stores it, and warn of names that are not used as expected.

    Without a stored validation split, validation uses the test split. With DATA.KEEP_TEST, it uses a part of the
    training images instead: then the stored `train` is mapped as `all`, which the program splits. `names`: the names of
    SPLIT_NAMES that exist, in that order. `where`: the data set, which begins the warnings.
    """
    parts: dict[Part, str] = {}
    if TRAIN in names:
        parts["train"] = TRAIN
    validation = [name for name in names if name not in (TRAIN, TEST)]
    if validation:
        parts["val"] = validation[0]
    elif TRAIN in names and TEST in names and data.KEEP_TEST:
        parts = {"all": TRAIN}
    elif TEST in names:
        parts["val"] = TEST
        # No reason to warn if the run evaluates another split than that of validation (DATA.PART).
        if TRAIN in names and part_of(data, train=False) == "val":
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
    """Map each split to the name of its file in the folder `root`, such as val to valid.csv.

    `file_name` makes the name of a file from that of a split.
    """
    split_names = [name for name in SPLIT_NAMES if (root / file_name(name)).is_file()]
    parts = named_parts(split_names, root, data)
    return {part: file_name(name) for part, name in parts.items()}


def split_named_in(name: str) -> str | None:
    """Return the first word of SPLIT_NAMES that is in a file or folder name; None if there is none."""
    match = re.search(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])", name.lower())
    return match[1] if match else None


def warn_of_skipped(root: str, files: Sequence[str]) -> None:
    """Warn of the files that belong to no split although other files or folders are named as splits."""
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
    """Return the indices of the training and the validation split, each ascending. They depend on the arguments alone.

    The split is stratified: each class gives the same fraction for validation, and keeps at least one image for
    training. Each class of two or more images gives at least one, even if the validation split becomes larger for it.
    `purpose` seeds the random numbers together with `seed`.
    """
    members = shuffled_classes(labels, seed, purpose)
    sizes = np.array([len(of_class) for of_class in members])
    exact = sizes * fraction
    # The number of images that each class gives: rounded down, but at least 1 if the class has several images.
    counts = np.maximum(np.floor(exact).astype(int), sizes > 1)
    # Rounding down gives too few; the classes with the largest remainders give one more each.
    wanted = math.ceil(round(len(labels) * fraction, 6))  # rounded first, since 70 * 0.1 is a little more than 7
    missing = max(0, wanted - counts.sum())
    by_remainder = np.argsort(counts - exact, kind="stable")  # classes, the one with the largest remainder first
    can_give = counts[by_remainder] < sizes[by_remainder] - 1
    giving = by_remainder[can_give][:missing]
    counts[giving] += 1
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def shuffled_classes(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """Return one array per class that has samples: their indices in a random order."""
    generator = generator_of(seed, purpose)
    return [generator.permutation(members) for members in members_of_classes(labels)]


def keys_of_split(data: DataConfig) -> list[str]:
    """List the settings that decide which images are for validation, without those that have no effect here.

    `deciding` lists the settings that are declared as deciding about a split, or about one that is drawn at random.
    """
    without_effect: tuple[str, ...] = ()
    if data.FOLD is not None:
        without_effect = ("DATA.VAL_FRACTION",)
    elif data.DATASET == "digits":  # its split is always the same
        without_effect = deciding("random split")
    return [key for key in deciding("split", "random split") if key not in without_effect]


def check_fold(data: DataConfig, images: int) -> None:
    """Raise UserError if DATA.FOLD wants more folds than there are images."""
    if data.fold is not None and data.fold.folds > images:
        raise UserError(f"DATA.FOLD {data.fold}: {images} images cannot fill {data.fold.folds} folds; use fewer.")


def split_rows(
    labels: np.ndarray, data: DataConfig, part: Part, where: object, groups: Sequence[str] | None = None
) -> np.ndarray:
    """Return the indices of one split of a data set that comes unsplit. DATA.FOLD or DATA.VAL_FRACTION decides.

    For `all`, these are the indices of all samples; a split `test` is never made. `where` names the data set in
    messages. `groups`: the group of each sample, as DATA.GROUP names it; groups are not divided.
    """
    if part == "test":
        raise no_such_part(part, where)
    if part == "all":
        return np.arange(len(labels))
    check_fold(data, len(labels))
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
        if part == "val" and len(validation) == 0:
            raise TooFewToSplit(
                f"There are too few images for a validation split: {len(labels)} in {len(np.unique(labels))} classes, "
                "and each class keeps one image for training. Add images, or a validation split of your own."
            )
        # Warn if the split is half larger than it should be, but not for the one image that rounding up adds.
        largest_expected = 1.5 * data.VAL_FRACTION * len(labels) + 1
        if len(validation) > largest_expected:
            warn_once(
                f"{where}: {len(validation):,} of {len(labels):,} images validate, more than DATA.VAL_FRACTION "
                f"{data.VAL_FRACTION:g}, because each class gives at least one."
            )
    return train if part == "train" else validation


def split_by_fold(labels: np.ndarray, fold: Fold, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and the validation split, each ascending, for cross-validation.

    Fold K of N validates, and the other folds train. The folds are disjoint and cover all samples. Each class, and all
    classes together, give every fold the same number of images, or one more. The folds depend on the labels, N and
    the seed alone.
    """
    members = shuffled_classes(labels, seed, "folds")
    # Samples go to the folds in turn. Counting on from class to class keeps the folds equally large.
    fold_of = np.empty(len(labels), dtype=np.int64)
    fold_of[np.concatenate(members)] = np.arange(len(labels)) % fold.folds
    validates = fold_of == fold.number - 1
    return np.flatnonzero(~validates), np.flatnonzero(validates)
