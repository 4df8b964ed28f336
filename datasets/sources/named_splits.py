"""Splits by name: files and folders called train, val or test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from datasets.base import Part, part_of
from utils.config.data import DataConfig
from utils.log import warn_once

MOST_NAMED = 5
TRAIN, TEST = "train", "test"
VALIDATION_NAMES = ("val", "valid", "validation", "dev")
"""Names of a validation split, in all kinds of data sets. The first that exists is read."""
SPLIT_NAMES = (TRAIN, *VALIDATION_NAMES, TEST)


def split_names(data: DataConfig) -> tuple[str, ...]:
    """All names of splits, by DATA.LISTING."""
    return SPLIT_NAMES if data.LISTING > 1 else (TRAIN, "val", "validation", TEST)


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
    """The files in `root` that are splits, by DATA.LISTING. `file_name`: of a split, from its name."""
    names = split_names(data) if data.LISTING > 1 else (TRAIN, "val")
    parts = named_parts([name for name in names if (root / file_name(name)).is_file()], root, part_of(data, False))
    return {part: file_name(name) for part, name in parts.items()}


def distinct(parts: Mapping[Part, object]) -> list[Part]:
    """The splits of `named_parts`, without `test` if it is the validation split."""
    return [part for part in parts if part != "test" or parts["val"] != parts["test"]]


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
