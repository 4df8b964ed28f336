"""Splits of samples with several labels, and splits that keep groups of samples whole (DATA.GROUP)."""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import generator_of
from utils.text import counted

IN_NAMES = {
    # Of a number alone, the folder.
    "name": ("([^/]*[^/0-9]|[^/]+/|^)[0-9]*[.][^./]*$", "Without their last number"),
    "name_start": ("([^/_ -]+)[^/]*$", "Up to their first -, _ or blank"),
}
"""Words for DATA.GROUP -> the pattern of a part of a file's name, and which part it is"""


def split_several_labels(labels: np.ndarray, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending, of `labels` (samples x classes)."""
    fold = data.fold
    images = len(labels)
    if fold is not None:
        each, more = divmod(images, fold.folds)
        sizes = [each + 1 if number < more else each for number in range(fold.folds)]
        validation = fold.number - 1
        purpose = "folds"
    else:
        count = min(math.ceil(round(images * data.VAL_FRACTION, 6)), images - 1)
        if not count:
            raise UserError("One image is too few for a validation split. Add images, or a split of your own.")
        sizes = [count, images - count]
        validation = 0
        purpose = "split"
    generator = generator_of(data.SPLIT_SEED, purpose)
    subset_of = stratified(labels, sizes, generator.permutation(images))
    return np.flatnonzero(subset_of != validation), np.flatnonzero(subset_of == validation)


def stratified(labels: np.ndarray, sizes: Sequence[int], order: np.ndarray) -> np.ndarray:
    """The subset of each sample. `labels`: samples x classes, of zeros and ones; `order`: a random permutation."""
    columns = np.ascontiguousarray(labels[order].T)
    # The samples of a label decide which of two equally rare labels is first, so the order of columns does not.
    columns = columns[sorted(range(len(columns)), key=lambda label: columns[label].tobytes())]
    left = columns.sum(1, dtype=np.int64)
    room = list(sizes)
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


def groups_in_paths(paths: Iterable[str], data: DataConfig) -> list[str]:
    """The group of each path, which the pattern DATA.GROUP, or that of its word, finds in it."""
    what = f"DATA.GROUP {data.GROUP}"
    try:
        pattern = re.compile(IN_NAMES[data.GROUP][0] if data.GROUP in IN_NAMES else str(data.GROUP))
    except re.error as error:
        raise UserError(f"{what}: not a regular expression ({error}).") from None
    if pattern.groups > 1:
        raise UserError(f"{what}: has {pattern.groups} pairs of parentheses; put one around what names the group.")
    groups = []
    if data.GROUP in IN_NAMES:
        paths = (path.partition("\0")[0] for path in paths)  # the first of several files of an image
    for path in paths:
        found = pattern.search(path)
        if found is None or found[pattern.groups] is None:
            raise UserError(
                f"{what}: not found in {path!r}. Name a pattern of every path, as (id[0-9]+)_, or a column."
            )
        groups.append(found[pattern.groups])
    return groups


def split_by_group(labels: np.ndarray, groups: Sequence[str], data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation split, each ascending, by DATA.FOLD or DATA.VAL_FRACTION.

    Whole groups are placed one by one, the largest first, where they bring the images of each class closest to the
    wanted numbers. The splits depend on labels, groups and seed alone.
    """
    names, group_of = np.unique(np.array(groups), return_inverse=True)
    fold = data.fold
    if fold:
        shares = np.full(fold.folds, 1 / fold.folds)
        validation = fold.number - 1
        purpose = "folds"
        too_few = f"fewer than the {fold.folds} folds"
    else:
        shares = np.array([data.VAL_FRACTION, 1 - data.VAL_FRACTION])
        validation = 0
        purpose = "split"
        too_few = "too few for two splits"
    if len(names) < len(shares):
        raise UserError(f"DATA.GROUP {data.GROUP}: {counted(len(names), 'group')}, {too_few}; groups stay whole.")
    # The images of each class in each group, after the number of all of them.
    classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    of_group = np.zeros((len(names), 1 + classes))
    np.add.at(of_group[:, 0], group_of, 1)
    if labels.ndim == 2:
        np.add.at(of_group[:, 1:], group_of, labels)
    else:
        np.add.at(of_group, (group_of, 1 + labels), 1)
    order = generator_of(data.SPLIT_SEED, purpose).permutation(len(names))
    order = order[np.argsort(-of_group[order].sum(1), kind="stable")]
    validates = placed(of_group, shares, order)[group_of] == validation
    validating = int(validates.sum())
    wanted = shares[validation] * len(labels)
    if not wanted / 1.5 - 1 <= validating <= wanted * 1.5 + 1:
        warn_once(
            f"DATA.GROUP {data.GROUP}: {validating:,} of {len(labels):,} images validate, not {math.ceil(wanted):,}, "
            "since groups are not divided."
        )
    return np.flatnonzero(~validates), np.flatnonzero(validates)


def placed(of_group: np.ndarray, shares: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The subset of each group. `of_group`: its images in all, and of each class; `order`: the largest first."""
    total = of_group.sum(0)
    scale = np.where(total > 0, total, 1)  # a class of few images counts as much as a large one
    missing = shares[:, None] * np.ones(len(total))
    subset_of = np.full(len(of_group), -1)
    for group in order.tolist():
        share = of_group[group] / scale
        # As parts of what the subset wants: else training, which misses the most, gets all the largest groups.
        costs = ((missing - share) ** 2 - missing**2).sum(1) * (shares.min() / shares)
        subset_of[group] = int(np.argmin(costs.round(12)))
        missing[subset_of[group]] -= share
    # Large groups may leave a subset without any: it gets the smallest of the subset that has most groups.
    for subset in np.setdiff1d(np.arange(len(shares)), subset_of).tolist():
        richest = int(np.bincount(subset_of, minlength=len(shares)).argmax())
        smallest = next(group for group in order[::-1].tolist() if subset_of[group] == richest)
        subset_of[smallest] = subset
    return subset_of
