"""`csv`: a table with a path and a class a line."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from datasets.base import Source
from datasets.images import Images
from datasets.labels import check_class_count, check_label, tell_empty_classes, tell_spare_classes
from datasets.sources.files import FileSamples, PathTable, check_first_files, check_path
from datasets.sources.split import split_files
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.files import kind_of_path, only_regular

PATHS = ("path", "image_path", "image", "file", "filename")
TARGETS = ("target", "label", "class")
NAMES = "class_name"
"""A column that says what numbered targets are called"""
PARTS = ("train.csv", "val.csv")
LAYOUT = """Expected layout:
  {root}/train.csv    a header, as in path,target and lines like: images/cat 1.jpg,cat
  {root}/val.csv
or one file, as in DATA_PATH: {root}/all.csv, which DATA.VAL_FRACTION splits.
Paths are relative to the file; a target is a name or a whole number from 0 on."""


@dataclass(frozen=True)
class _Table:
    """The lines of one file."""

    file: Path
    paths: list[str]
    targets: list[str]
    names: list[str]
    """Of the targets, where there is a column of them"""
    numbers: list[int]
    """Of the lines in the file"""

    def where(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    files = _files(data)
    table = _read(files[0 if train else -1])
    classes, labels = _labels(table, table if train else _read(files[0]), num_classes)
    root = table.file.parent
    if len(files) == 1:
        return Images(split_files(root, table.paths, labels, classes, data, train), data, train, seed)
    return Images(FileSamples(root, PathTable(table.paths), labels, classes), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    files = _files(data)
    first = _read(files[0])
    classes, labels = _labels(first, first, num_classes)
    known = len(classes) if classes else int(labels.max()) + 1
    tell_spare_classes(known, num_classes, f"The table {files[0]}")
    tell_empty_classes(labels, classes or range(known), f"The table {files[0]}")
    tables = [first] if train else []
    if len(files) == 1:
        tables = [first]
        split_files(first.file.parent, first.paths, labels, classes, data, train)
    else:
        tables.append(_read(files[1]))
        _labels(tables[-1], first, num_classes)
    for table in tables:
        check_first_files(table.file, table.paths)


def _files(data: DataConfig) -> list[Path]:
    """The file of each part, or the one of both."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET csv needs DATA.DATA_PATH (-data_path). {LAYOUT.format(root='/data/cats')}")
    root = Path(data.DATA_PATH).expanduser()
    if root.is_file():
        return [root]
    files = [root / name for name in PARTS]
    for file in files:
        if not file.is_file():
            kind = kind_of_path(root)
            there = f"{root} is {kind}, not a file" if kind else f"{root} does not exist"
            there = f"there is no file {file}" if root.is_dir() else there
            raise UserError(f"DATA.DATA_PATH (-data_path): {there}. {LAYOUT.format(root=root)}")
    return files


def _read(file: Path) -> _Table:
    table = _Table(file, [], [], [], [])
    try:
        with open(file, encoding="utf-8-sig", newline="", opener=only_regular) as opened:
            rows = csv.reader(opened, strict=True)
            header = next(rows, [])
            path, target = _column(file, header, PATHS), _column(file, header, TARGETS)
            name = next((place for place, text in enumerate(header) if text.strip().casefold() == NAMES), None)
            for row in rows:
                if not any(field.strip() for field in row):
                    continue
                where = f"{file}:{rows.line_num}"
                if len(row) <= max(path, target, name or 0):
                    raise UserError(f"{where} has {len(row)} fields; the header has {len(header)}.")
                table.paths.append(check_path(row[path].strip(), where))
                table.targets.append(row[target].strip())
                if name is not None:
                    table.names.append(row[name].strip())
                table.numbers.append(rows.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The table {file} cannot be read: {error}.") from None
    if not table.paths:
        raise UserError(f"{file} has no lines below its header. {LAYOUT.format(root=file.parent)}")
    return table


def _column(file: Path, header: list[str], names: tuple[str, ...]) -> int:
    found = [name.strip().casefold() for name in header]
    for name in names:
        if name in found:
            return found.index(name)
    close = next((hint for name in found if (hint := nearest(name, names))), "")
    raise UserError(
        f"{file} has no column {' or '.join(names)}; its columns are {', '.join(header) or 'none'}.{close} "
        f"{LAYOUT.format(root=file.parent)}"
    )


def _labels(table: _Table, training: _Table, num_classes: int) -> tuple[list[str] | None, np.ndarray]:
    """Names of the classes, if they have any, and the labels of `table`. Classes are those of the training part."""
    if _whole(training.targets[0]) is not None:
        return _named(training, num_classes), _numbered(table, num_classes)
    classes = sorted(set(training.targets))
    check_class_count(len(classes), num_classes, f"The table {training.file}")
    numbers = {name: label for label, name in enumerate(classes)}
    for row, name in enumerate(table.targets):
        if not name:
            raise UserError(f"{table.where(row)}: the target is empty.")
        if name not in numbers:
            raise UserError(
                f"{table.where(row)}: {training.file} has no class {name!r}.{nearest(name, classes)} "
                f"Both parts need the same classes."
            )
        if _whole(name) is not None:
            raise UserError(
                f"{table.where(row)}: the target {name} is a number, {training.targets[0]!r} in "
                f"{training.where(0)} is a name. Give all targets as names, or all as whole numbers."
            )
    return classes, np.array([numbers[name] for name in table.targets], dtype=np.int64)


def _numbered(table: _Table, num_classes: int) -> np.ndarray:
    labels = []
    for row, text in enumerate(table.targets):
        label = _whole(text)
        if label is None:
            raise UserError(f"{table.where(row)}: the target {text!r} is no whole number, as the first one is.")
        check_label(label, num_classes, table.where(row))
        labels.append(label)
    return np.array(labels, dtype=np.int64)


def _named(table: _Table, num_classes: int) -> list[str] | None:
    """What the numbers are called, in order; None where nothing says so."""
    if not table.names:
        return None
    labels = _numbered(table, num_classes)
    names = {}
    for row, (label, name) in enumerate(zip(labels.tolist(), table.names, strict=True)):
        if names.setdefault(label, name) != name:
            raise UserError(f"{table.where(row)}: class {label} is called {name!r} here and {names[label]!r} above.")
    return [names.get(label, str(label)) for label in range(int(labels.max()) + 1)]


def _whole(text: str) -> int | None:
    """5 of `5`, and of the `5.0` that pandas makes of it when a column once had a gap."""
    found = re.fullmatch(r"(-?[0-9]+)(\.0*)?", text)
    return int(found[1]) if found else None


SOURCE = Source(_open, _check)
