"""DATA.GROUP: splits that keep images of one group together, such as those of one patient."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import warn_once
from utils.seeding import key
from utils.text import counted


def groups_in_paths(paths: Sequence[str], data: DataConfig, columns: Sequence[str] = ()) -> list[str]:
    """The group of each path, which the pattern DATA.GROUP finds in it. `columns`: of a table, none of which it is."""
    what = f"DATA.GROUP {data.GROUP}"
    also = f" a column of the table ({', '.join(columns)}) or" if columns else ""
    try:
        pattern = re.compile(str(data.GROUP))
    except re.error as error:
        raise UserError(f"{what}: not{also} a regular expression ({error}).") from None
    if pattern.groups > 1:
        raise UserError(f"{what}: has {pattern.groups} pairs of parentheses; put one around what names the group.")
    groups = []
    for path in paths:
        if (found := pattern.search(path)) is None:
            raise UserError(
                f"{what}: not found in {path!r}. Name{also} a pattern that is in every path, such as (patient[0-9]+)_."
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
    shares = [1 / fold.folds] * fold.folds if fold else [data.VAL_FRACTION, 1 - data.VAL_FRACTION]
    validation, purpose = (fold.number - 1, "folds") if fold else (0, "split")
    if len(names) < len(shares):
        wanted = f"fewer than the {fold.folds} folds" if fold else "too few for two splits"
        raise UserError(
            f"DATA.GROUP {data.GROUP}: {counted(len(names), 'group')}, {wanted}, since a group is not divided."
        )
    of_group = _images_of_groups(labels, group_of, len(names))
    order = np.random.Generator(np.random.Philox(key=key(data.SPLIT_SEED, purpose))).permutation(len(names))
    order = order[np.argsort(-of_group[order].sum(1), kind="stable")]
    subset_of = _placed(of_group, order, np.array(shares))
    validates = subset_of[group_of] == validation
    _warn_of_size(int(validates.sum()), len(labels), shares[validation], data)
    return np.flatnonzero(~validates), np.flatnonzero(validates)


def _images_of_groups(labels: np.ndarray, group_of: np.ndarray, groups: int) -> np.ndarray:
    """Images of each class in each group, with the number of all of them as the first column."""
    classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    counts = np.zeros((groups, 1 + classes))
    np.add.at(counts[:, 0], group_of, 1)
    if labels.ndim == 2:
        np.add.at(counts[:, 1:], group_of, labels)
    else:
        np.add.at(counts, (group_of, 1 + labels), 1)
    return counts


def _placed(of_group: np.ndarray, order: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The subset of each group."""
    total = of_group.sum(0)
    scale = np.where(total > 0, total, 1)  # a class of few images counts as much as a large one
    missing = shares[:, None] * np.ones(len(total))
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
    return subset_of


def _warn_of_size(validating: int, images: int, share: float, data: DataConfig) -> None:
    if not share * images / 1.5 - 1 <= validating <= share * images * 1.5 + 1:
        warn_once(
            f"DATA.GROUP {data.GROUP}: {validating:,} of {images:,} validate, not {math.ceil(share * images):,}, "
            "since groups are not divided."
        )
