"""`csv`: a table with one image per line, as a path and a target; with DATA.MULTI_LABEL, several of them or none."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.base import TITLES, Part, parts_read
from datasets.images import image_source
from datasets.labels import (
    ANY_LABEL,
    check_class_count,
    check_gaps,
    check_label,
    images_of_classes,
    log_unused_outputs,
    number_of_digits,
    warn_empty_classes,
)
from datasets.sources.files import FileList, FileSamples, check_first_files, check_path, no_file, split_files
from datasets.sources.split import no_such_part, parts_in_files
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log
from vitamp.files import kind_of_path, only_regular

LEAST_RECURRING = {";": 0.0, "|": 0.5, ",": 0.5}
"""Separator -> fraction of the parts of labels that must recur in other labels, so that the labels look like lists"""
LabelSet = tuple[str, ...]
"""The labels of one image as its table has them; empty for an image of no class."""


def separator_in(labels: Iterable[str]) -> tuple[str, str] | None:
    """The separator by which these labels look like lists of labels, and the first such label.

    The parts of lists recur in other lists, or as labels of their own. Blanks are part of names.
    """
    distinct = list(dict.fromkeys(labels))
    for separator, least in LEAST_RECURRING.items():
        lists = {label: parts for label in distinct if len(parts := set(_parts(label, separator))) > 1}
        alone = set(distinct) - set(lists)
        found = Counter(part for parts in lists.values() for part in parts if part)
        recurring = sum(count > 1 or part in alone for part, count in found.items())
        if lists and recurring >= least * len(found):
            return separator, next(iter(lists))
    return None


def _parts(text: str, separator: str) -> LabelSet:
    return tuple(part.strip() for part in text.split(separator))


PATHS = ("path", "image_path", "image", "file", "filename")
TARGETS = ("target", "label", "class")
PLURALS = ("targets", "labels", "classes")
"""Names of the column that may hold several labels, besides TARGETS"""
NAMES = "class_name"
"""Column with the class names of numbered targets"""
LAYOUT = """Expected layout:
  {root}/train.csv    a header such as path,target, then lines such as images/cat 1.jpg,cat
  {root}/val.csv    (or valid.csv, validation.csv, dev.csv; test.csv if there is one)
or a single file, given as DATA.DATA_PATH and split by DATA.VAL_FRACTION: {root}/all.csv
Paths are relative to the file; a target is a name or a whole number from 0. With DATA.MULTI_LABEL=true
a target is a list of any length, such as cat;dog, or every column but the path is a class and holds 0 or 1."""


@dataclass(frozen=True)
class _Table:
    """Columns of one file."""

    file: Path
    several: bool
    """DATA.MULTI_LABEL: any number of labels per line; else one"""
    columns: list[str] | None
    """With DATA.MULTI_LABEL: the classes, if each has a column"""
    paths: list[str] = field(default_factory=list)
    sets: list[LabelSet] = field(default_factory=list)
    """The labels of each line"""
    names: list[str] = field(default_factory=list)
    """Class names of numbered labels; empty without such a column"""
    numbers: list[int] = field(default_factory=list)
    """Line numbers in the file"""
    groups: list[str] = field(default_factory=list)
    """Of the column DATA.GROUP; empty without"""
    separator: str = ";"
    """With DATA.MULTI_LABEL: between the labels of a line"""

    def where(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"

    def each(self) -> list[tuple[int, str]]:
        """All labels, each with its row."""
        return [(row, label) for row, of_image in enumerate(self.sets) for label in of_image]

    def is_numbered(self) -> bool:
        """Whether the labels are numbers, as the first one says."""
        first = next((label for _, label in self.each()), None)
        if first is None:
            raise UserError(f"The table {self.file}: no image has a label.")
        return self.columns is None and _whole_number(first) is not None

    def label_numbers(self, num_classes: int) -> list[int]:
        """The numbers in `each`, checked."""
        found = []
        for row, text in self.each():
            if (label := _whole_number(text)) is None:
                raise UserError(f"{self.where(row)}: the label {text!r} is not a whole number, but the first label is.")
            check_label(label, num_classes, self.where(row))
            found.append(label)
        return found

    def labelled(self, training: _Table, num_classes: int) -> FileList:
        """The images with checked labels. `training`: the table that defines the classes."""
        if training.is_numbered():
            classes = _numbered_classes(training)
            if self.several and num_classes == ANY_LABEL:
                self.check_gaps()
            numbers = self.label_numbers(len(classes) if self.several and num_classes == ANY_LABEL else num_classes)
        else:
            classes = training.columns or sorted({label for _, label in training.each()})
            check_class_count(len(classes), num_classes, f"The table {training.file}")
            numbers = self._numbers_of(classes, training)
        if self.several:
            width = len(classes) if num_classes == ANY_LABEL else num_classes
            labels = np.zeros((len(self.sets), width), dtype=np.uint8)
            labels[[row for row, _ in self.each()], numbers] = 1
        else:
            labels = np.array(numbers, dtype=np.int64)
        return FileList(self.file.parent, self.paths, labels, classes, groups=self.groups or None)

    def check_gaps(self) -> None:
        rows = [row for row, _ in self.each()]
        check_gaps(self.label_numbers(ANY_LABEL), lambda place: self.where(rows[place]))

    def _numbers_of(self, classes: list[str], training: _Table) -> list[int]:
        """The number of each label in `each`, by its name."""
        if self.columns is not None and set(self.columns) != set(classes):
            missing = sorted({*self.columns} ^ {*classes})
            raise UserError(
                f"{self.file} and {training.file} need the same columns; only one of them has {missing[0]}."
            )
        numbers = {name: label for label, name in enumerate(classes)}
        for row, name in self.each():
            if name not in numbers:
                raise UserError(
                    f"{self.where(row)}: {training.file} has no class {name!r}.{nearest(name, classes)} "
                    "Every class in the validation split must also be in the training split."
                )
            if not self.several and _whole_number(name) is not None:
                raise UserError(
                    f"{self.where(row)}: the target {name} is a number, but {training.sets[0][0]!r} in "
                    f"{training.where(0)} is a name. Give all targets as names, or all as whole numbers."
                )
        return [numbers[name] for _, name in self.each()]


def table_name(split: str) -> str:
    """File name of the table of a split."""
    return f"{split}.csv"


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    files = _files(data)
    training = _read(files.get("all") or files["train"], data)
    if "all" in files:
        return split_files(training.labelled(training, num_classes), data, part)
    return _read_part(files, part, training, data).labelled(training, num_classes).samples()


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    given = _files(data)
    parts = parts_read(data, train, given)
    first = _read(given.get("all") or given["train"], data)
    _warn_of_lists(first)
    files = first.labelled(first, num_classes)
    if "all" in given:
        read, validation = [first], split_files(files, data, parts[-1]).labels
    else:
        read = [_read_part(given, part, first, data) for part in parts]
        validation = [table.labelled(first, num_classes) for table in read][-1].labels
    log_unused_outputs(len(files.classes), num_classes, f"The table {first.file}")
    warn_empty_classes(files.labels, files.classes, f"The table {first.file}")
    unmeasured = np.flatnonzero(images_of_classes(validation, len(files.classes)) == 0)
    if data.MULTI_LABEL and data.PART != "all" and len(unmeasured):
        log.warning(
            "The %s has no image of %d of %d classes (the first: %s): mAP and macro F1 leave these classes out.",
            TITLES[parts[-1]],
            len(unmeasured),
            len(files.classes),
            files.classes[unmeasured[0]],
        )
    for table in read:
        check_first_files(table.file, table.paths)


def _warn_of_lists(table: _Table) -> None:
    """Warn of labels that look like lists but are read as one class each."""
    if table.columns is not None or (found := separator_in(label for _, label in table.each())) is None:
        return
    log.warning(
        "%s: the label %r is read as one class. If it lists several labels, separated by %r, %s.",
        table.where(next(row for row, label in table.each() if label == found[1])),
        found[1],
        found[0],
        "separate them in the same way in all tables" if table.several else "set DATA.MULTI_LABEL=true",
    )


def _files(data: DataConfig) -> dict[Part, Path]:
    """The file of each split, or one file for all."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET csv needs DATA.DATA_PATH (-data_path). {LAYOUT.format(root='/data/cats')}")
    root = Path(data.DATA_PATH).expanduser()
    if root.is_file():
        return {"all": root}
    parts = parts_in_files(root, data, table_name)
    missing = next((part for part in ("train", "val") if part not in parts), None)
    if missing:
        if root.is_dir():
            problem = f"there is no file {root / table_name(missing)}"
        else:
            problem = no_file(root) if kind_of_path(root) else f"{root} does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {problem}. {LAYOUT.format(root=root)}")
    return {part: root / file for part, file in parts.items()}


def _read_part(files: dict[Part, Path], part: Part, training: _Table, data: DataConfig) -> _Table:
    if part not in files:
        raise no_such_part(part, training.file.parent)
    return training if part == "train" else _read(files[part], data, training.separator)


class _Head(NamedTuple):
    """Places of the columns in a file."""

    path: int
    targets: list[int]
    """One column, or one per class"""
    name: int | None
    group: int | None
    last: int


def _read(file: Path, data: DataConfig, separator: str | None = None) -> _Table:
    """`separator`: of the training table's labels; None: this is it."""
    try:
        with open(file, encoding="utf-8-sig", newline="", opener=only_regular) as opened:
            rows = csv.reader(opened, strict=True)
            header = [text.strip() for text in next(rows, [])]
            head = _read_head(file, header, data)
            columns = [header[place] for place in head.targets] if len(head.targets) > 1 else None
            table, texts = _Table(file, data.MULTI_LABEL, columns), []
            for row in rows:
                if not any(field.strip() for field in row):
                    continue
                where = f"{file}:{rows.line_num}"
                if len(row) <= head.last:
                    raise UserError(f"{where} has {len(row)} fields; the header has {len(header)}.")
                table.paths.append(check_path(row[head.path].strip(), where))
                texts.append([row[place].strip() for place in head.targets])
                if head.name is not None:
                    table.names.append(row[head.name].strip())
                if head.group is not None:
                    table.groups.append(row[head.group].strip())
                table.numbers.append(rows.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The table {file} cannot be read: {error}.") from None
    if not table.paths:
        raise UserError(f"{file} has no lines below its header. {LAYOUT.format(root=file.parent)}")
    if data.MULTI_LABEL and columns is None and separator is None:
        found = separator_in(text for (text,) in texts)
        separator = found[0] if found else ";"
    table = replace(table, separator=separator or ";")
    table.sets.extend(_label_set(fields, table, table.where(row)) for row, fields in enumerate(texts))
    return table


def _label_set(fields: list[str], table: _Table, where: str) -> LabelSet:
    """The labels of a line: its target, the parts of it, or the names of the columns that hold a 1."""
    if table.columns is not None:
        for name, text in zip(table.columns, fields, strict=True):
            if text not in ("0", "1", "0.0", "1.0"):
                raise UserError(
                    f"{where}: the column {name} holds {text!r}. Without a column of labels, every column but the "
                    "path is a class and holds 0 or 1."
                )
        return tuple(name for name, text in zip(table.columns, fields, strict=True) if text.startswith("1"))
    (text,) = fields
    if not table.several:
        if not text:
            raise UserError(f"{where}: the target is empty.")
        return (text,)
    labels = _parts(text, table.separator) if text else ()
    if "" in labels:
        raise UserError(f"{where}: {text!r} has an empty label; separate labels by one {table.separator}")
    if len(set(labels)) < len(labels):
        repeated = next(label for label in labels if labels.count(label) > 1)
        raise UserError(f"{where}: the label {repeated!r} appears twice; give each label once.")
    return labels


def _read_head(file: Path, header: list[str], data: DataConfig) -> _Head:
    """Where the columns are. With DATA.MULTI_LABEL and no column of labels, all columns but the path are classes."""
    path = _column(file, header, PATHS)
    group = header.index(data.GROUP) if data.GROUP in header else None
    if not data.MULTI_LABEL:
        target = _column(file, header, TARGETS)
        name = next((place for place, text in enumerate(header) if text.casefold() == NAMES), None)
        return _Head(path, [target], name, group, max(path, target, name or 0, group or 0))
    target = next((place for place, name in enumerate(header) if name.casefold() in (*TARGETS, *PLURALS)), None)
    if target is not None:
        return _Head(path, [target], None, group, max(path, target, group or 0))
    classes = [place for place in range(len(header)) if place not in (path, group)]
    if len(classes) < 2:
        raise UserError(
            f"{file} has neither a column called {' or '.join((*TARGETS, *PLURALS))} nor one column per class. "
            f"{LAYOUT.format(root=file.parent)}"
        )
    if repeated := next((header[place] for place in classes if header.count(header[place]) > 1), None):
        raise UserError(f"{file}: two columns are called {repeated!r}; give each class one column.")
    return _Head(path, classes, None, group, len(header) - 1)


def _column(file: Path, header: list[str], names: tuple[str, ...]) -> int:
    columns = [name.strip().casefold() for name in header]
    for name in names:
        if name in columns:
            return columns.index(name)
    suggestion = next((text for name in columns if (text := nearest(name, names))), "")
    raise UserError(
        f"{file} has no column {' or '.join(names)}; its columns are {', '.join(header) or 'none'}.{suggestion} "
        f"{LAYOUT.format(root=file.parent)}"
    )


def _numbered_classes(table: _Table) -> list[str] | range:
    """Names of the numbered classes if the table has them, else their numbers."""
    labels = table.label_numbers(ANY_LABEL)
    numbers = range(max(labels) + 1)
    if not table.names:
        return numbers
    names = {}
    for row, (label, name) in enumerate(zip(labels, table.names, strict=True)):
        if names.setdefault(label, name) != name:
            raise UserError(f"{table.where(row)}: class {label} is called {name!r} here and {names[label]!r} above.")
    return [names.get(label, str(label)) for label in numbers]


def _whole_number(text: str) -> int | None:
    """5 for `5`, and for `5.0`, which pandas writes if a column ever had a missing value."""
    match = re.fullmatch(r"(-?[0-9]+)(\.0*)?", text)
    return number_of_digits(match[1]) if match else None


def _count(data: DataConfig, train: bool) -> int:  # noqa: ARG001 - the training table has the classes of both splits
    files = _files(data)
    first = _read(files.get("all") or files["train"], data)
    if first.is_numbered():
        first.check_gaps()
    return len(first.labelled(first, ANY_LABEL).classes)


SOURCE = image_source(_samples, _check, count=_count, multi_label=True, parts=_files, groups=True)
