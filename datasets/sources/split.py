"""Splits: named by files and folders, or made by DATA.VAL_FRACTION or DATA.FOLD, also by groups or several labels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from datasets.base import TITLES, Part, part_of
from datasets.labels import members_of_classes
from utils.config.data import DataConfig
from utils.config.kinds import Fold
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import key
from utils.text import counted, some_of

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
    counts[by_remainder[counts[by_remainder] < sizes[by_remainder] - 1][:missing]] += 1
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def shuffled_classes(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """Indices of the samples of each class, in a random order."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, purpose)))
    return [generator.permutation(of_class) for of_class in members_of_classes(labels)]


def split_rows(
    labels: np.ndarray,
    data: DataConfig,
    part: Part,
    where: object,
    groups: Sequence[str] | None = None,
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
        train, validation = split_by_group(labels, groups, data)
    elif labels.ndim == 2:
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


def split_several_labels(labels: np.ndarray, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """The same two splits where samples have several labels (samples x classes), by DATA.FOLD or DATA.VAL_FRACTION."""
    fold, images = data.fold, len(labels)
    if fold is not None:
        sizes = [images // fold.folds + (number < images % fold.folds) for number in range(fold.folds)]
        validation, purpose = fold.number - 1, "folds"
    else:
        count = min(math.ceil(round(images * data.VAL_FRACTION, 6)), images - 1)
        if not count:
            raise UserError("One image is too few for a validation split. Add images, or a split of your own.")
        sizes, validation, purpose = [count, images - count], 0, "split"
    generator = np.random.Generator(np.random.Philox(key=key(data.SPLIT_SEED, purpose)))
    subset_of = stratified(labels, sizes, generator.permutation(images))
    return np.flatnonzero(subset_of != validation), np.flatnonzero(subset_of == validation)


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
            # Of those with room, the subset that lacks the most samples of the label; of equal ones, the roomiest.
            free = (subset for subset, places in enumerate(room) if places)
            subset = max(free, key=lambda subset: (wanted[rarest][subset], room[subset]))
            placed[sample] = subset
            room[subset] -= 1
            for label in columns[:, sample].nonzero()[0].tolist():
                wanted[label][subset] -= 1
                left[label] -= 1
    placed[placed < 0] = np.repeat(np.arange(len(room)), room)  # samples without a label
    subsets = np.empty_like(placed)
    subsets[order] = placed
    return subsets


def groups_in_paths(paths: Sequence[str], data: DataConfig) -> list[str]:
    """The group of each path, which the pattern DATA.GROUP finds in it."""
    what = f"DATA.GROUP {data.GROUP}"
    try:
        pattern = re.compile(str(data.GROUP))
    except re.error as error:
        raise UserError(f"{what}: not a regular expression ({error}).") from None
    if pattern.groups > 1:
        raise UserError(f"{what}: has {pattern.groups} pairs of parentheses; put one around what names the group.")
    groups = []
    for path in paths:
        if (found := pattern.search(path)) is None:
            raise UserError(f"{what}: not found in {path!r}. Name a pattern of every path, as (patient[0-9]+)_.")
        groups.append(found[pattern.groups])
    return groups


def split_by_group(labels: np.ndarray, groups: Sequence[str], data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending, by DATA.FOLD or DATA.VAL_FRACTION.

    Whole groups are placed one by one, the largest first, where they bring the images of each class closest to the
    wanted numbers. The splits depend on labels, groups and seed alone.
    """
    names, group_of = np.unique(np.array(groups), return_inverse=True)
    fold = data.fold
    shares = [1 / fold.folds] * fold.folds if fold else [data.VAL_FRACTION, 1 - data.VAL_FRACTION]
    validation, purpose = (fold.number - 1, "folds") if fold else (0, "split")
    if len(names) < len(shares):
        wanted = f"fewer than the {fold.folds} folds" if fold else "too few for two splits"
        raise UserError(f"DATA.GROUP {data.GROUP}: {counted(len(names), 'group')}, {wanted}; groups stay whole.")
    # The images of each class in each group, after the number of all of them.
    of_group = np.zeros((len(names), 1 + (labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1)))
    np.add.at(of_group[:, 0], group_of, 1)
    if labels.ndim == 2:
        np.add.at(of_group[:, 1:], group_of, labels)
    else:
        np.add.at(of_group, (group_of, 1 + labels), 1)
    order = np.random.Generator(np.random.Philox(key=key(data.SPLIT_SEED, purpose))).permutation(len(names))
    order = order[np.argsort(-of_group[order].sum(1), kind="stable")]
    total = of_group.sum(0)
    scale = np.where(total > 0, total, 1)  # a class of few images counts as much as a large one
    missing = np.array(shares)[:, None] * np.ones(len(total))
    subset_of = np.full(len(of_group), -1)
    for group in order.tolist():
        share = of_group[group] / scale
        costs = ((missing - share) ** 2 - missing**2).sum(1)
        subset_of[group] = int(np.argmin(costs.round(12)))
        missing[subset_of[group]] -= share
    # Large groups may leave a subset without any: it gets the smallest of the subset that has most groups.
    for subset in np.setdiff1d(np.arange(len(shares)), subset_of).tolist():
        richest = int(np.bincount(subset_of, minlength=len(shares)).argmax())
        smallest = next(group for group in order[::-1].tolist() if subset_of[group] == richest)
        subset_of[smallest] = subset
    validates = subset_of[group_of] == validation
    validating, wanted = int(validates.sum()), shares[validation] * len(labels)
    if not wanted / 1.5 - 1 <= validating <= wanted * 1.5 + 1:
        warn_once(
            f"DATA.GROUP {data.GROUP}: {validating:,} of {len(labels):,} images validate, not {math.ceil(wanted):,}, "
            "since groups are not divided."
        )
    return np.flatnonzero(~validates), np.flatnonzero(validates)
