"""Several labels per image (DATA.MULTI_LABEL): reading them from a table, and their rows of zeros and ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from datasets.labels import ANY_LABEL, check_class_count, check_gaps, check_label
from utils.errors import UserError, nearest
from utils.log import log

SEPARATORS: dict[str, str | None] = {"semicolon": ";", "bar": "|", "comma": ",", "space": None}
"""Values of DATA.LABEL_SEPARATOR, and the argument of `str.split`."""
LEAST_RECURRING = {"semicolon": 0.0, "bar": 0.5, "comma": 0.5, "space": 0.9}
"""Fraction of the parts of labels that must recur in other labels, so that the labels look like lists."""
LabelSet = tuple[str, ...]
"""The labels of one image as its table has them; empty for an image of no class."""


def labels_in(text: str, separator: str, where: str) -> LabelSet:
    """The labels of a field such as `cat;dog`; none in an empty one. `separator`: DATA.LABEL_SEPARATOR."""
    if not text.strip():
        return ()
    labels = _parts(text, separator)
    if "" in labels:
        raise UserError(
            f"{where}: {text!r} has an empty label; separate labels by one {separator} (DATA.LABEL_SEPARATOR)."
        )
    return _without_repeats(labels, where)


def separator_in(labels: Iterable[str]) -> tuple[str, str] | None:
    """The value of DATA.LABEL_SEPARATOR by which these labels look like lists of labels, and the first such label.

    None for names such as `golden retriever`: the parts of lists recur in other lists, or as labels of their own.
    """
    distinct = list(dict.fromkeys(labels))
    for separator in SEPARATORS:
        lists = {label: parts for label in distinct if len(parts := set(_parts(label, separator))) > 1}
        alone = set(distinct) - set(lists)
        found = Counter(part for parts in lists.values() for part in parts if part)
        recurring = sum(count > 1 or part in alone for part, count in found.items())
        if not lists or recurring < LEAST_RECURRING[separator] * len(found):
            continue
        # Names of several words recur, too, in `red car`, `blue car`, `red bus`, `blue bus`.
        lengths = {len(parts) for parts in lists.values()}
        if separator == "space" and (len(found) >= len(distinct) or (len(lengths) == 1 and not alone & set(found))):
            continue
        return separator, next(iter(lists))
    return None


def warn_of_lists(labels: Iterable[str], several: bool, where: Callable[[str], str]) -> None:
    """Warn of labels that look like lists but are read as one class each. `several`: DATA.MULTI_LABEL is set."""
    if (found := separator_in(labels)) is None:
        return
    separator, first = found
    needed = [] if several else ["DATA.MULTI_LABEL=true"]
    needed += [f"DATA.LABEL_SEPARATOR={separator}"] if several or separator != "semicolon" else []
    log.warning(
        "%s: the label %r is read as one class. If it lists several labels, separated by a %s, set %s.",
        where(first),
        first,
        separator,
        " ".join(needed),
    )


def _parts(text: str, separator: str) -> LabelSet:
    return tuple(part.strip() for part in text.split(SEPARATORS[separator]))


def labels_marked(fields: Sequence[str], columns: Sequence[str], where: str) -> LabelSet:
    """The names of the columns that hold a 1; all others hold a 0."""
    for name, field in zip(columns, fields, strict=True):
        if field.strip() not in ("0", "1", "0.0", "1.0"):
            raise UserError(
                f"{where}: the column {name} holds {field!r}. Without a column of labels, every column but the path "
                "is a class and holds 0 or 1."
            )
    return tuple(name for name, field in zip(columns, fields, strict=True) if field.strip().startswith("1"))


def classes_in(sets: Sequence[LabelSet], number_of: Callable[[str], int | None], owner: str) -> list[str] | range:
    """Classes of the training table: names in alphabetical order, or numbers if the first label is one."""
    names = sorted({label for of_image in sets for label in of_image})
    if not names:
        raise UserError(f"{owner}: no image has a label.")
    first = next(of_image[0] for of_image in sets if of_image)
    if number_of(first) is None:
        return names
    numbers = [number_of(name) for name in names]
    return range(max(number for number in numbers if number is not None) + 1)


def rows_of(
    sets: Sequence[LabelSet],
    classes: list[str] | range,
    num_classes: int,
    number_of: Callable[[str], int | None],
    where: Callable[[int], str],
    training: str,
) -> np.ndarray:
    """Zeros and ones, images x classes, uint8. `training`: the table that defines the classes."""
    index = {name: label for label, name in enumerate(classes)} if isinstance(classes, list) else None
    if index is not None:
        check_class_count(len(classes), num_classes, f"The table {training}")
    if index is None and num_classes == ANY_LABEL:
        numbered = [(row, text) for row, of_image in enumerate(sets) for text in of_image]
        numbers = [_checked(number_of(text), text, num_classes, where(row)) for row, text in numbered]
        check_gaps(numbers, lambda place: where(numbered[place][0]))
    width = len(classes) if num_classes == ANY_LABEL else num_classes
    rows = np.zeros((len(sets), width), dtype=np.uint8)
    for row, of_image in enumerate(sets):
        for text in of_image:
            if index is None:
                rows[row, _checked(number_of(text), text, width, where(row))] = 1
            elif text in index:
                rows[row, index[text]] = 1
            else:
                raise UserError(
                    f"{where(row)}: {training} has no class {text!r}.{nearest(text, index)} "
                    "Every class in the validation split must also be in the training split."
                )
    return rows


def _checked(number: int | None, text: str, width: int, where: str) -> int:
    if number is None:
        raise UserError(f"{where}: the label {text!r} is not a whole number, but the first label is.")
    check_label(number, width, where)
    return number


def _without_repeats(labels: LabelSet, where: str) -> LabelSet:
    repeated = next((label for place, label in enumerate(labels) if label in labels[:place]), None)
    if repeated is not None:
        raise UserError(f"{where}: the label {repeated!r} appears twice; give each label once.")
    return labels
