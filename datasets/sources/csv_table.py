"""`csv`: a table with one image per line, as a path and a target; with DATA.MULTI_LABEL, several of them or none."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from datasets.sources.split import distinct, no_such_part, parts_in_files
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log
from vitamp.files import kind_of_path, only_regular

LEAST_RECURRING = {";": 0.0, "|": 0.5, ",": 0.5, " ": 0.9}
"""Separator -> fraction of the parts of labels that must recur in other labels, so that the labels look like lists"""
LabelSet = tuple[str, ...]
"""The labels of one image as its table has them; empty for an image of no class."""


def labels_in(text: str, separator: str, where: str) -> LabelSet:
    """The labels of a field such as `cat;dog`; none in an empty one."""
    if not text.strip():
        return ()
    labels = _parts(text, separator)
    if "" in labels:
        raise UserError(f"{where}: {text!r} has an empty label; separate labels by one {separator}")
    return _without_repeats(labels, where)


def separator_of(labels: Iterable[str]) -> str:
    """What separates the labels in the fields of a table: ; or | or a comma. Blanks are part of names."""
    found = separator_in(labels)
    return found[0] if found is not None and found[0] != " " else ";"


def separator_in(labels: Iterable[str]) -> tuple[str, str] | None:
    """The separator by which these labels look like lists of labels, and the first such label.

    None for names such as `golden retriever`: the parts of lists recur in other lists, or as labels of their own.
    """
    distinct = list(dict.fromkeys(labels))
    for separator in LEAST_RECURRING:
        lists = {label: parts for label in distinct if len(parts := set(_parts(label, separator))) > 1}
        alone = set(distinct) - set(lists)
        found = Counter(part for parts in lists.values() for part in parts if part)
        recurring = sum(count > 1 or part in alone for part, count in found.items())
        if not lists or recurring < LEAST_RECURRING[separator] * len(found):
            continue
        # Names of several words recur, too, in `red car`, `blue car`, `red bus`, `blue bus`.
        lengths = {len(parts) for parts in lists.values()}
        if separator == " " and (len(found) >= len(distinct) or (len(lengths) == 1 and not alone & set(found))):
            continue
        return separator, next(iter(lists))
    return None


def warn_of_lists(labels: Iterable[str], several: bool, where: Callable[[str], str]) -> None:
    """Warn of labels that look like lists but are read as one class each. `several`: DATA.MULTI_LABEL is set."""
    if (found := separator_in(labels)) is None:
        return
    separator, first = found
    needed = [] if several else ["set DATA.MULTI_LABEL=true"]
    needed += ["separate them by a semicolon"] if separator == " " else []
    log.warning(
        "%s: the label %r is read as one class. If it lists several labels, separated by %r, %s.",
        where(first),
        first,
        separator,
        " and ".join(needed) or "separate them in the same way in all tables",
    )


def _parts(text: str, separator: str) -> LabelSet:
    return tuple(part.strip() for part in text.split(None if separator == " " else separator))


def labels_marked(fields: Sequence[str], columns: Sequence[str], where: str) -> LabelSet:
    """The names of the columns that hold a 1; all others hold a 0."""
    for name, text in zip(columns, fields, strict=True):
        if text.strip() not in ("0", "1", "0.0", "1.0"):
            raise UserError(
                f"{where}: the column {name} holds {text!r}. Without a column of labels, every column but the path "
                "is a class and holds 0 or 1."
            )
    return tuple(name for name, text in zip(columns, fields, strict=True) if text.strip().startswith("1"))


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
    paths: list[str]
    targets: list[str]
    names: list[str]
    """Class names of the targets; empty without such a column"""
    numbers: list[int]
    """Line numbers in the file"""
    sets: list[LabelSet] = field(default_factory=list)
    """With DATA.MULTI_LABEL: the labels of each line"""
    columns: list[str] | None = None
    """With DATA.MULTI_LABEL: the classes, if each has a column"""
    groups: list[str] = field(default_factory=list)
    """Of the column DATA.GROUP; empty without"""
    separator: str = ";"
    """With DATA.MULTI_LABEL: between the labels of a line"""

    def where(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"

    def labelled(self, training: _Table, num_classes: int) -> FileList:
        """The images with checked labels. `training`: the table that defines the classes."""
        classes, labels = _labels(self, training, num_classes)
        return FileList(self.file.parent, self.paths, labels, classes, groups=self.groups or None)


def table_name(split: str) -> str:
    """File name of the table of a split."""
    return f"{split}.csv"


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    tables = _table_files(data)
    if isinstance(tables, Path):
        table = _read(tables, data)
        return split_files(table.labelled(table, num_classes), data, part)
    training = _read(tables["train"], data)
    table = training if part == "train" else _read(_file_of(tables, part), data, training.separator)
    return table.labelled(training, num_classes).samples()


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    given = _table_files(data)
    parts = parts_read(data, train, _existing(data))
    first = _read(given if isinstance(given, Path) else given["train"], data)
    _warn_of_lists(first)
    files = first.labelled(first, num_classes)
    if isinstance(given, Path):
        read = [first]
        validation = split_files(files, data, parts[-1]).labels
    else:
        read = [first if part == "train" else _read(_file_of(given, part), data, first.separator) for part in parts]
        validation = [table.labelled(first, num_classes) for table in read][-1].labels
    log_unused_outputs(len(files.classes), num_classes, f"The table {first.file}")
    warn_empty_classes(files.labels, files.classes, f"The table {first.file}")
    if data.MULTI_LABEL and data.PART != "all":
        _warn_unmeasured(TITLES[parts[-1]], validation, files.classes)
    for table in read:
        check_first_files(table.file, table.paths)


def _warn_unmeasured(title: str, validation: np.ndarray, classes: list[str] | range) -> None:
    unmeasured = np.flatnonzero(images_of_classes(validation, len(classes)) == 0)
    if len(unmeasured):
        log.warning(
            "The %s has no image of %d of %d classes (the first: %s): mAP and macro F1 leave these classes out.",
            title,
            len(unmeasured),
            len(classes),
            classes[unmeasured[0]],
        )


def _warn_of_lists(table: _Table) -> None:
    if table.columns is not None:
        return
    if table.sets:
        rows = [(label, row) for row, of_image in enumerate(table.sets) for label in of_image]
    else:
        rows = [(target, row) for row, target in enumerate(table.targets)]
    first_rows = dict(reversed(rows))
    warn_of_lists((label for label, _ in rows), bool(table.sets), lambda label: table.where(first_rows[label]))


def _table_files(data: DataConfig) -> Path | dict[Part, Path]:
    """The file of each split, or one file for all."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET csv needs DATA.DATA_PATH (-data_path). {LAYOUT.format(root='/data/cats')}")
    root = Path(data.DATA_PATH).expanduser()
    if root.is_file():
        return root
    parts = parts_in_files(root, data, table_name)
    missing: list[Part] = [part for part in ("train", "val") if part not in parts]
    if missing:
        if root.is_dir():
            problem = f"there is no file {root / table_name(missing[0])}"
        else:
            problem = no_file(root) if kind_of_path(root) else f"{root} does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {problem}. {LAYOUT.format(root=root)}")
    return {part: root / file for part, file in parts.items()}


def _file_of(tables: dict[Part, Path], part: Part) -> Path:
    if part not in tables:
        raise no_such_part(part, tables["train"].parent)
    return tables[part]


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
    several = data.MULTI_LABEL
    try:
        with open(file, encoding="utf-8-sig", newline="", opener=only_regular) as opened:
            rows = csv.reader(opened, strict=True)
            header = next(rows, [])
            group = _group_column(header, data)
            head = _read_sets_head(file, header, group) if several else _read_head(file, header, group)
            columns = [header[place].strip() for place in head.targets]
            table = _Table(file, [], [], [], [], columns=columns if len(columns) > 1 else None)
            for row in rows:
                if not any(field.strip() for field in row):
                    continue
                where = f"{file}:{rows.line_num}"
                if len(row) <= head.last:
                    raise UserError(f"{where} has {len(row)} fields; the header has {len(header)}.")
                table.paths.append(check_path(row[head.path].strip(), where))
                targets = [row[place] for place in head.targets]
                if table.columns is None:
                    table.targets.append(targets[0].strip())
                else:
                    table.sets.append(labels_marked(targets, table.columns, where))
                if head.name is not None:
                    table.names.append(row[head.name].strip())
                if head.group is not None:
                    table.groups.append(row[head.group].strip())
                table.numbers.append(rows.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The table {file} cannot be read: {error}.") from None
    if not table.paths:
        raise UserError(f"{file} has no lines below its header. {LAYOUT.format(root=file.parent)}")
    if several and table.columns is None:
        separator = separator or separator_of(table.targets)
        sets = [labels_in(text, separator, table.where(row)) for row, text in enumerate(table.targets)]
        return replace(table, targets=[], sets=sets, separator=separator)
    return table


def _group_column(header: list[str], data: DataConfig) -> int | None:
    """The column that DATA.GROUP names; None if it is a pattern, or none."""
    names = [text.strip() for text in header]
    return names.index(data.GROUP) if data.GROUP in names else None


def _read_head(file: Path, header: list[str], group: int | None) -> _Head:
    path, target = _column(file, header, PATHS), _column(file, header, TARGETS)
    name = next((place for place, text in enumerate(header) if text.strip().casefold() == NAMES), None)
    return _Head(path, [target], name, group, max(path, target, name or 0, group or 0))


def _read_sets_head(file: Path, header: list[str], group: int | None) -> _Head:
    """With DATA.MULTI_LABEL: a column of labels; without one, all columns but the path are classes."""
    path = _column(file, header, PATHS)
    names = [text.strip() for text in header]
    target = next((place for place, name in enumerate(names) if name.casefold() in (*TARGETS, *PLURALS)), None)
    if target is not None:
        return _Head(path, [target], None, group, max(path, target, group or 0))
    classes = [place for place in range(len(header)) if place not in (path, group)]
    if len(classes) < 2:
        raise UserError(
            f"{file} has neither a column called {' or '.join((*TARGETS, *PLURALS))} nor one column per class. "
            f"{LAYOUT.format(root=file.parent)}"
        )
    if repeated := next((names[place] for place in classes if names.count(names[place]) > 1), None):
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


def _labels(table: _Table, training: _Table, num_classes: int) -> tuple[list[str] | range, np.ndarray]:
    """Classes of the training table, and labels of `table`."""
    if training.sets:
        return _label_rows(table, training, num_classes)
    if _whole_number(training.targets[0]) is not None:
        return _numbered_classes(training, num_classes), _numbers(table, num_classes)
    classes = sorted(set(training.targets))
    check_class_count(len(classes), num_classes, f"The table {training.file}")
    numbers = {name: label for label, name in enumerate(classes)}
    for row, name in enumerate(table.targets):
        if not name:
            raise UserError(f"{table.where(row)}: the target is empty.")
        if name not in numbers:
            raise UserError(
                f"{table.where(row)}: {training.file} has no class {name!r}.{nearest(name, classes)} "
                "Every class in the validation split must also be in the training split."
            )
        if _whole_number(name) is not None:
            raise UserError(
                f"{table.where(row)}: the target {name} is a number, but {training.targets[0]!r} in "
                f"{training.where(0)} is a name. Give all targets as names, or all as whole numbers."
            )
    return classes, np.array([numbers[name] for name in table.targets], dtype=np.int64)


def _label_rows(table: _Table, training: _Table, num_classes: int) -> tuple[list[str] | range, np.ndarray]:
    """`_labels` with DATA.MULTI_LABEL."""
    classes = training.columns or classes_in(training.sets, _whole_number, f"The table {training.file}")
    if table.columns is not None and set(table.columns) != set(classes):
        missing = sorted({*table.columns} ^ {*map(str, classes)})
        raise UserError(f"{table.file} and {training.file} need the same columns; only one of them has {missing[0]}.")
    return classes, rows_of(table.sets, classes, num_classes, _whole_number, table.where, str(training.file))


def _numbers(table: _Table, num_classes: int) -> np.ndarray:
    labels = []
    for row, text in enumerate(table.targets):
        label = _whole_number(text)
        if label is None:
            raise UserError(f"{table.where(row)}: the target {text!r} is not a whole number, but the first target is.")
        check_label(label, num_classes, table.where(row))
        labels.append(label)
    return np.array(labels, dtype=np.int64)


def _numbered_classes(table: _Table, num_classes: int) -> list[str] | range:
    """Names of the numbered classes if the table has them, else their numbers."""
    labels = _numbers(table, num_classes)
    numbers = range(int(labels.max()) + 1)
    if not table.names:
        return numbers
    names = {}
    for row, (label, name) in enumerate(zip(labels.tolist(), table.names, strict=True)):
        if names.setdefault(label, name) != name:
            raise UserError(f"{table.where(row)}: class {label} is called {name!r} here and {names[label]!r} above.")
    return [names.get(label, str(label)) for label in numbers]


def _whole_number(text: str) -> int | None:
    """5 for `5`, and for `5.0`, which pandas writes if a column ever had a missing value."""
    match = re.fullmatch(r"(-?[0-9]+)(\.0*)?", text)
    return number_of_digits(match[1]) if match else None


def _count(data: DataConfig, train: bool) -> int:  # noqa: ARG001 - the training table has the classes of both splits
    given = _table_files(data)
    first = _read(given if isinstance(given, Path) else given["train"], data)
    if not first.sets and _whole_number(first.targets[0]) is not None:
        check_gaps(_numbers(first, ANY_LABEL), first.where)
    return len(first.labelled(first, ANY_LABEL).classes)


def _is_unsplit(data: DataConfig) -> bool:
    return isinstance(_table_files(data), Path)


def _existing(data: DataConfig) -> Sequence[Part]:
    tables = _table_files(data)
    return ("all",) if isinstance(tables, Path) else distinct(tables)


def _tests(data: DataConfig) -> bool:
    tables = _table_files(data)
    return not isinstance(tables, Path) and tables["val"] == tables.get("test")


SOURCE = image_source(
    _samples, _check, count=_count, is_unsplit=_is_unsplit, multi_label=True, parts=_existing, tests=_tests, groups=True
)
