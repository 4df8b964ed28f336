"""Splitting a data set that has no validation split of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from datasets.base import TITLES, Part
from datasets.labels import images_of_classes, members_of_classes
from utils.config.data import DataConfig
from utils.config.kinds import Fold
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import key
from utils.text import counted

MOST_NAMED = 5


def no_such_part(part: str, where: object) -> UserError:
    """The error for a split that the data set does not have."""
    instead = "-part all evaluates all images" if part == "val" else "-part val evaluates the validation split"
    return UserError(f"DATA.PART (-part) {part}: {where} has no {TITLES[part]}; {instead}.")


def split(
    labels: np.ndarray, fraction: float, seed: int, purpose: str = "split", of_each: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending; they depend on the arguments alone.

    The split is stratified: each class gives the same fraction, and keeps at least one image for training. `of_each`:
    each class of two or more images gives at least one, even if the validation split becomes larger for it.
    """
    members = _shuffled_classes(labels, seed, purpose)
    sizes = np.array([len(of_class) for of_class in members])
    exact = sizes * fraction
    counts = np.floor(exact).astype(int)
    if of_each:
        counts = np.maximum(counts, sizes > 1)
    # Rounding down gives too few; the classes with the largest remainders give one more each.
    missing = max(0, math.ceil(round(len(labels) * fraction, 6)) - counts.sum())  # 70 * 0.1 is a little more than 7
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[counts[by_remainder] < sizes[by_remainder] - 1][:missing]] += 1
    if not counts.any():
        raise UserError(
            f"There are too few images for a validation split: {len(labels)} in {len(sizes)} classes, and "
            "each class keeps one image for training. Add images, or a validation split of your own."
        )
    validation = np.concatenate([of_class[:count] for of_class, count in zip(members, counts, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), validation), np.sort(validation)


def split_by_fold(
    labels: np.ndarray, fold: Fold, seed: int, classes: Sequence[object] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending: fold K of N, and the other folds.

    The folds are disjoint and cover all samples. Each class, and all classes together, give every fold the same
    number of images, or one more. They depend on the labels, N and the seed alone.
    """
    if fold.folds > len(labels):
        raise UserError(f"DATA.FOLD {fold}: {len(labels)} images cannot fill {fold.folds} folds; use fewer folds.")
    members = _shuffled_classes(labels, seed, "folds")
    if small := [of_class for of_class in members if len(of_class) < fold.folds]:
        fewest = min(small, key=len)
        label = int(labels[fewest[0]])
        smallest = classes[label] if classes else f"label {label}"
        warn_once(
            f"DATA.FOLD {fold}: {len(small)} of {len(members)} classes have fewer images than folds, so some folds "
            f"lack these classes. The smallest is {smallest}, with {counted(len(fewest), 'image')}."
        )
    # Counting on from class to class keeps the folds equally large, too.
    fold_of = np.empty(len(labels), dtype=np.int64)
    fold_of[np.concatenate(members)] = np.arange(len(labels)) % fold.folds
    validates = fold_of == fold.number - 1
    return np.flatnonzero(~validates), np.flatnonzero(validates)


def _shuffled_classes(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """Indices of the samples of each class, in a random order."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, purpose)))
    return [generator.permutation(of_class) for of_class in members_of_classes(labels)]


def split_several_labels(labels: np.ndarray, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """The same two splits where samples have several labels (samples x classes), by DATA.FOLD or DATA.VAL_FRACTION."""
    fold, images = data.fold, len(labels)
    if fold is not None:
        if fold.folds > images:
            raise UserError(f"DATA.FOLD {fold}: {images} images cannot fill {fold.folds} folds; use fewer folds.")
        sizes = [images // fold.folds + (number < images % fold.folds) for number in range(fold.folds)]
        validation, purpose = fold.number - 1, "folds"
    else:
        count = min(math.ceil(round(images * data.VAL_FRACTION, 6)), images - 1)
        if not count:
            raise UserError(
                "One image is too few for a validation split. Add images, or a validation split of your own."
            )
        sizes, validation, purpose = [count, images - count], 0, "split"
    if data.LABEL_SPLIT == "sets":
        subset_of = _subsets_by_label_sets(labels, sizes, data, purpose)
    else:
        from datasets.sources.stratify import stratified

        generator = np.random.Generator(np.random.Philox(key=key(data.SPLIT_SEED, purpose)))
        subset_of = stratified(labels, sizes, generator.permutation(images))
    return np.flatnonzero(subset_of != validation), np.flatnonzero(subset_of == validation)


def _subsets_by_label_sets(labels: np.ndarray, sizes: list[int], data: DataConfig, purpose: str) -> np.ndarray:
    """The subset of each sample if samples with the same set of labels are spread evenly.

    Many sets of labels occur once, so labels are split evenly only as far as their samples have sets in common.
    """
    _, sets = np.unique(labels, axis=0, return_inverse=True)
    order, number = (
        np.concatenate(_shuffled_classes(sets.reshape(-1), data.SPLIT_SEED, purpose)),
        np.arange(len(labels)),
    )
    subset_of = np.empty_like(number)
    if data.fold is not None:
        subset_of[order] = number % len(sizes)
    else:
        subset_of[order] = np.diff(number * sizes[0] // len(labels), append=sizes[0]) == 0
    return subset_of


def split_rows(
    labels: np.ndarray,
    data: DataConfig,
    part: Part,
    where: object,
    classes: Sequence[object] | None,
    groups: Callable[[], Sequence[str]] | None = None,
) -> np.ndarray:
    """Indices of one split of samples with these labels, by DATA.FOLD or else DATA.VAL_FRACTION; for `all`, of all.

    `where` has these samples, of these classes; None: they have no names. `groups`: those of DATA.GROUP.
    """
    if part == "test":
        raise no_such_part(part, where)
    if part == "all":
        return np.arange(len(labels))
    if data.GROUP is not None and groups is not None:
        from datasets.sources.groups import split_by_group

        splits = split_by_group(labels, groups(), data)
        if labels.ndim == 1:
            _warn_unvalidated(labels, splits[1], data, where, classes)
    elif labels.ndim == 2:
        splits = split_several_labels(labels, data)
    elif data.fold is not None:
        splits = split_by_fold(labels, data.fold, data.SPLIT_SEED, classes)
    else:
        splits = split(labels, data.VAL_FRACTION, data.SPLIT_SEED, of_each=data.LISTING > 1)
        _warn_unvalidated(labels, splits[1], data, where, classes)
    return splits[0 if part == "train" else 1]


def _share(data: DataConfig) -> str:
    return f"DATA.VAL_FRACTION {data.VAL_FRACTION:g}" if data.fold is None else f"DATA.FOLD {data.FOLD}"


def _warn_unvalidated(
    labels: np.ndarray, validation: np.ndarray, data: DataConfig, where: object, classes: Sequence[object] | None
) -> None:
    """Warn of classes without a validation image, and of a validation split much larger than DATA.VAL_FRACTION."""
    names = classes or range(max(int(labels.max()), 0) + 1)
    of_class, validated = (images_of_classes(of, len(names)) for of in (labels, labels[validation]))
    missing = [str(names[label]) for label in np.flatnonzero((of_class > 0) & (validated == 0)).tolist()]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        warn_once(
            f"{where}: the validation split has no image of {len(missing)} of {len(names)} classes "
            f"({', '.join(missing[:MOST_NAMED])}{more}), which have too few "
            f"{'groups' if data.GROUP else 'images'} for {_share(data)}."
        )
    if data.GROUP is None and len(validation) > 1.5 * data.VAL_FRACTION * len(labels) + 1:
        warn_once(
            f"{where}: {len(validation):,} of {len(labels):,} images validate, more than DATA.VAL_FRACTION "
            f"{data.VAL_FRACTION:g}, because each class gives at least one."
        )
