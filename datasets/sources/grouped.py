"""Split images that have several labels, and split images without dividing groups of them (DATA.GROUP)."""

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
    # For a file whose name is a number, the group is its folder.
    "name": ("([^/]*[^/0-9]|[^/]+/|^)[0-9]*[.][^./]*$", "their name but for its last number"),
    "name_start": ("([^/_ -]+)[^/]*$", "the start of their name, up to its first -, _ or blank,"),
}
"""Words for DATA.GROUP -> a pattern that finds the group in a path, and what images of a group share, in words"""


def split_several_labels(labels: np.ndarray, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and the validation split, each ascending, by DATA.FOLD or DATA.VAL_FRACTION.

    Each split gets its part of the images of each class. `labels`: samples x classes, of zeros and ones.
    """
    # The images are divided into subsets: the folds, or else the validation and the training split. One of them is for
    # validation. `purpose` seeds the random numbers.
    fold = data.fold
    images = len(labels)
    if fold is not None:
        size, remainder = divmod(images, fold.folds)
        sizes = [size + 1 if number < remainder else size for number in range(fold.folds)]
        validation_subset = fold.number - 1
        purpose = "folds"
    else:
        validating = math.ceil(round(images * data.VAL_FRACTION, 6))  # rounded first, as 70 * 0.1 is more than 7
        validating = min(validating, images - 1)
        if validating == 0:
            raise UserError("One image is too few for a validation split. Add images, or a split of your own.")
        sizes = [validating, images - validating]
        validation_subset = 0
        purpose = "split"
    generator = generator_of(data.SPLIT_SEED, purpose)
    subset_of = stratified(labels, sizes, generator.permutation(images))
    return np.flatnonzero(subset_of != validation_subset), np.flatnonzero(subset_of == validation_subset)


def stratified(labels: np.ndarray, sizes: Sequence[int], order: np.ndarray) -> np.ndarray:
    """Divide samples into subsets, so that each subset gets its part of the samples of each label.

    `labels`: samples x classes, of zeros and ones. `sizes`: number of samples of each subset; their sum is the number
    of all. `order`: a random permutation of the samples. Returns the number of the subset of each sample.
    """
    # One row per label, with a column per sample. Rows are sorted by their content, so the result does not depend on
    # the order of the classes.
    has_label = np.ascontiguousarray(labels[order].T)
    has_label = has_label[sorted(range(len(has_label)), key=lambda label: has_label[label].tobytes())]
    unplaced_of_label = has_label.sum(1, dtype=np.int64)
    room = list(sizes)  # samples that each subset can still take
    # How many samples of each label each subset still lacks.
    wanted = np.outer(unplaced_of_label, np.array(sizes) / len(labels)).tolist()
    subset_of = np.full(len(labels), -1)
    # The rarest label is placed first. Later, other labels would already have decided where its samples are.
    while (unplaced_of_label > 0).any():
        rarest = int(np.where(unplaced_of_label > 0, unplaced_of_label, len(labels) + 1).argmin())
        for sample in np.flatnonzero((has_label[rarest] > 0) & (subset_of < 0)).tolist():
            # Choose the subset with room that lacks the most samples of the label; of equal ones, the one with the most
            # room.
            with_room = (subset for subset, places in enumerate(room) if places)
            chosen = max(with_room, key=lambda subset: (wanted[rarest][subset], room[subset]))
            subset_of[sample] = chosen
            room[chosen] -= 1
            for label in np.flatnonzero(has_label[:, sample]).tolist():
                wanted[label][chosen] -= 1
                unplaced_of_label[label] -= 1
    subset_of[subset_of < 0] = np.repeat(np.arange(len(room)), room)  # samples without a label fill the room
    in_given_order = np.empty_like(subset_of)
    in_given_order[order] = subset_of
    return in_given_order


def groups_in_paths(paths: Iterable[str], data: DataConfig) -> list[str]:
    """Find the group of each image in its path, by the regular expression DATA.GROUP or by a word of IN_NAMES.

    The group is the text that the pattern's parentheses match, or without parentheses the whole match. UserError if a
    path does not match.
    """
    setting = f"DATA.GROUP {data.GROUP}"
    expression = str(data.GROUP)
    is_word = expression in IN_NAMES
    if is_word:
        expression, _ = IN_NAMES[expression]
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UserError(f"{setting}: not a regular expression ({error}).") from None
    if pattern.groups > 1:
        raise UserError(f"{setting}: has {pattern.groups} pairs of parentheses; put one around what names the group.")
    groups = []
    if is_word:
        # The patterns of IN_NAMES are for one path, so take the first of several files of an image.
        paths = (path.partition("\0")[0] for path in paths)
    part_of_match = pattern.groups  # 1: the only pair of parentheses; 0: without one, the whole match
    for path in paths:
        match = pattern.search(path)
        if match is None or match[part_of_match] is None:
            raise UserError(
                f"{setting}: not found in {path!r}. Name a pattern of every path, as (id[0-9]+)_, a column, name or "
                "name_start."
            )
        groups.append(match[part_of_match])
    return groups


def split_by_group(labels: np.ndarray, groups: Sequence[str], data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and the validation split, each ascending, without dividing a group.

    DATA.FOLD or DATA.VAL_FRACTION gives the sizes. Whole groups are placed one by one, the largest first, where they
    bring the images of each class closest to the wanted numbers. The splits depend on labels, groups and seed alone.
    """
    names, group_of = np.unique(np.array(groups), return_inverse=True)

    # The groups are divided into subsets: the folds, or else the validation and the training split. One of them is for
    # validation. `purpose` seeds the random numbers.
    fold = data.fold
    if fold:
        fractions = np.full(fold.folds, 1 / fold.folds)
        validation_subset = fold.number - 1
        purpose = "folds"
        too_few = f"fewer than the {fold.folds} folds"
    else:
        fractions = np.array([data.VAL_FRACTION, 1 - data.VAL_FRACTION])
        validation_subset = 0
        purpose = "split"
        too_few = "too few for two splits"
    if len(names) < len(fractions):
        raise UserError(f"DATA.GROUP {data.GROUP}: {counted(len(names), 'group')}, {too_few}; groups stay whole.")

    counts = images_by_group(labels, group_of)

    # The largest groups come first, those of one size in a random order. The size is the number of images and labels.
    shuffled_groups = generator_of(data.SPLIT_SEED, purpose).permutation(len(names))
    largest_first = np.argsort(-counts[shuffled_groups].sum(1), kind="stable")
    order = shuffled_groups[largest_first]
    subset_of_group = subsets_of_groups(counts, fractions, order)
    is_validation = subset_of_group[group_of] == validation_subset

    number = int(is_validation.sum())
    wanted = fractions[validation_subset] * len(labels)
    # Warn if the split is a third smaller or half larger than it should be, but not for a single image.
    is_close = wanted / 1.5 - 1 <= number <= wanted * 1.5 + 1
    if not is_close:
        warn_once(
            f"DATA.GROUP {data.GROUP}: {number:,} of {len(labels):,} images validate, not {math.ceil(wanted):,}, "
            "since groups are not divided."
        )
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


def images_by_group(labels: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Count the images of each group: a row per group, the number of all, then that of each class.

    `labels`: of each image, or a row of zeros and ones. `group_of`: number of each image's group.
    """
    several_labels = labels.ndim == 2
    classes = labels.shape[1] if several_labels else int(labels.max()) + 1
    counts = np.zeros((int(group_of.max()) + 1, 1 + classes))
    np.add.at(counts[:, 0], group_of, 1)
    if several_labels:
        np.add.at(counts[:, 1:], group_of, labels)
    else:
        np.add.at(counts, (group_of, 1 + labels), 1)
    return counts


def subsets_of_groups(counts: np.ndarray, fractions: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Divide groups into subsets, and return the number of the subset of each group.

    `counts`: one row per group, the number of its images, then the number of its images of each class. `fractions`: the
    fraction of all images that each subset should get. `order`: all groups, the largest first.
    """
    # Images are counted in fractions of their class, so a small class counts as much as a large one.
    totals = counts.sum(0)
    scale = np.where(totals > 0, totals, 1)
    # What each subset still misses: one row per subset, one column for all images and for each class.
    missing = fractions[:, None] * np.ones(len(totals))
    subset_of = np.full(len(counts), -1)
    for group in order.tolist():
        group_fractions = counts[group] / scale
        # The error of a subset is the sum of the squares of what it misses. A group goes where it lowers the error the
        # most, relative to the size of the subset: otherwise the training split, which misses the most images, would
        # get all the largest groups.
        error_changes = ((missing - group_fractions) ** 2 - missing**2).sum(1)
        costs = error_changes * (fractions.min() / fractions)
        # Rounded, so that rounding errors do not decide between equal costs: the first subset then gets the group.
        subset_of[group] = int(np.argmin(costs.round(12)))
        missing[subset_of[group]] -= group_fractions
    # Large groups may leave a subset empty. It gets the smallest group of the subset that has the most groups.
    for empty_subset in np.setdiff1d(np.arange(len(fractions)), subset_of).tolist():
        richest = int(np.bincount(subset_of, minlength=len(fractions)).argmax())
        smallest = next(group for group in order[::-1].tolist() if subset_of[group] == richest)
        subset_of[smallest] = empty_subset
    return subset_of
