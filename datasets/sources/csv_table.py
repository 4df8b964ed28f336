"""`csv`: a table with one image per line, as a path and a target; with DATA.MULTI_LABEL, several of them or none."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from datasets.base import CSV_PREFIX, Part, Source, part_made, parts_read
from datasets.decoding import ENDINGS
from datasets.labels import (
    ANY_LABEL,
    check_class_count,
    check_gaps,
    check_label,
    log_unused_outputs,
    warn_alike_names,
    warn_empty_classes,
)
from datasets.sources.files import OF_SEVERAL, PROBED, FileSamples, check_first_files, check_path, no_file, split_files
from datasets.sources.split import SPLIT_NAMES, TRAIN, named_parts, no_such_part, parts_in_files
from utils.config.data import DataConfig
from utils.config.kinds import COLUMN
from utils.errors import UserError, nearest
from utils.log import log, warn_once
from utils.text import one_line, some_of
from vitamp.files import read_regular

SEPARATORS = (";", "|", ",")
"""Between the labels of an image; the first that occurs in the training table separates"""

PATHS = ("path", "image_path", "image", "file", "filename")
NUMBERED = re.compile(rf"(?:{'|'.join(PATHS)})_?([0-9]{{1,4}})", re.IGNORECASE)
"""Names of columns that each hold a file of the same image"""
TARGETS = ("target", "label", "class")
PLURALS = ("targets", "labels", "classes")
"""Names of the column that may hold several labels, besides TARGETS"""
SPLITS = ("split", "set", "fold", "partition", "subset")
"""Names of the column that may say which split an image of a single table is in"""
table_name = "{}.csv".format
"""File name of the table of a split"""
LAYOUT = """Expected layout:
  {root}/train.csv    a header such as path,target, then lines such as images/cat 1.jpg,cat
  {root}/val.csv    (or valid.csv, validation.csv, dev.csv; test.csv if there is one)
or a single file, given as DATA.DATA_PATH: {root}/all.csv
or a file or folder elsewhere, as -dataset csv:/lists/all.csv, with -data_path as the folder of the images.
It is split by its column split, which holds train, val or test; without one by DATA.VAL_FRACTION.
Paths are relative to the file, or else to -data_path; a target is a name or a whole number from 0. With
DATA.MULTI_LABEL=true a target is a list of any length, such as cat;dog, or every column but the path is a class and
holds 0 or 1.
Columns file_1, file_2 and so on are files of one image, with its channels in this order."""

ADVICE = "Name the columns in a header, such as path,target, or with -columns file=NAME,label=NAME."


class _Header:
    """The names of a table's columns, and what the columns hold, by DATA.COLUMNS, DATA.GROUP or their names."""

    def __init__(self, file: Path, names: list[str], data: DataConfig) -> None:
        self.file = file
        self.names = names
        self.data = data
        self.folded = [name.casefold() for name in names]
        self.given: dict[str, str] = dict(re.findall(COLUMN, data.COLUMNS or ""))

    def first_of(self, names: Iterable[str]) -> list[int]:
        """Place of the first of the names that a column has; empty without one."""
        return [self.folded.index(name.casefold()) for name in names if name.casefold() in self.folded][:1]

    def split(self) -> int | None:
        """Place of the column that may name splits."""
        taken = (self.data.GROUP, *self.given.values())
        free = ["" if name in taken else name.casefold() for name in self.names]
        return next((free.index(name) for name in SPLITS if name in free), None)

    def places(self, split: int | None) -> tuple[list[int], list[int]]:
        """Places of the columns of paths, and of the one of labels, or of one per class. `split`: that of splits.

        With DATA.MULTI_LABEL and no column of labels, all but those of paths are classes. Two columns may have any
        names.
        """
        targets = TARGETS + PLURALS if self.data.MULTI_LABEL else TARGETS
        names = (self.given["label"],) if "label" in self.given else targets
        own = [place for place, name in enumerate(self.names) if name != self.data.GROUP and place != split]
        paths = self.files()
        labels = self.first_of(names)
        if len(own) == 2 and not (self.data.MULTI_LABEL or self.given or (paths and labels)):
            path, label = self.of_any_names(own, paths, labels)
            paths = [path]
            labels = [label]
        if not paths:
            raise self.lacks(PATHS)
        called = self.folded
        if not labels:
            labels = self.class_columns(own, paths, names)
            called = self.names  # classes may be a and A
        for place in paths + labels:
            if called.count(called[place]) > 1:
                raise UserError(f"{self.file}: two columns are called {self.names[place]!r}; remove or rename one.")
        return paths, labels

    def of_any_names(self, own: list[int], paths: list[int], labels: list[int]) -> tuple[int, int]:
        """Places of the path and the label, if a table has two columns, of which at most one has a usual name."""
        if any(self.names[place].lower().endswith(ENDINGS) for place in own):
            raise UserError(f"{self.file} has no header: its first line is {', '.join(self.names)}. {ADVICE}")
        path, label = own
        if path in labels or label in paths[:1]:
            path, label = label, path
        read = f"{self.names[path]!r} is read as the path, {self.names[label]!r} as the label"
        warn_once(f"{self.file}: the column {read}. {ADVICE}")
        return path, label

    def class_columns(self, own: list[int], paths: list[int], names: Sequence[str]) -> list[int]:
        """Places of the columns that are classes. `names`: of a column of labels, which the table lacks."""
        if not self.data.MULTI_LABEL or "label" in self.given:
            raise self.lacks(names)
        classes = [place for place in own if place not in paths]
        if len(classes) < 2:
            what = f"neither a column called {' or '.join(names)} nor one column per class"
            raise UserError(f"{self.file} has {what}. {LAYOUT.format(root=self.file.parent)}")
        return classes

    def files(self) -> list[int]:
        """Places of the columns of paths: one, or those of several files per image."""
        return self.first_of([self.given["file"]] if "file" in self.given else PATHS) or self.numbered()

    def numbered(self) -> list[int]:
        """Places of columns such as file_1, file_2, each with a file of the same image, in the order of numbers."""
        matches = () if "file" in self.given else map(NUMBERED.fullmatch, self.names)
        found = {int(match[1]): place for place, match in enumerate(matches) if match}
        if not found:
            return []
        numbers = sorted(found)
        names = ", ".join(self.names[found[number]] for number in numbers)
        of_image = f"{self.file}: the columns {names} are the files of an image"
        for number in range(numbers[0], numbers[-1]):
            if number not in found:
                raise UserError(f"{of_image}, but there is none with number {number}.")
        warn_once(f"{of_image}, in the order of its channels.", logging.INFO)
        return [found[number] for number in numbers]

    def lacks(self, names: Sequence[str], labelled: bool = True) -> UserError:
        """The error for a column of paths or labels that has none of these names."""
        suggestions = (nearest(name, names) for name in self.folded)
        suggestion = next(filter(None, suggestions), "")
        own = ", ".join(self.names) or "none"
        advice = f" {ADVICE} {LAYOUT.format(root=self.file.parent)}" if labelled else ""
        return UserError(f"{self.file} has no column {' or '.join(names)}; its columns are {own}.{suggestion}{advice}")


@dataclass(frozen=True)
class _Table:
    """Columns of one file."""

    file: Path
    several: bool
    """DATA.MULTI_LABEL: any number of labels per line; else one"""
    columns: list[str] | None
    """With DATA.MULTI_LABEL: the classes, if each has a column"""
    paths: list[str]
    root: Path
    """The folder that they are relative to"""
    numbers: list[int]
    """Line numbers in the file"""
    groups: list[str]
    """Of the column DATA.GROUP; empty without"""
    separator: str
    """With DATA.MULTI_LABEL: between the labels of a line"""
    sets: list[tuple[str, ...]] = field(default_factory=list)
    """The labels of each line; empty for an image of no class"""

    def where(self, row: int) -> str:
        return f"{self.file}:{self.numbers[row]}"

    def each(self) -> list[tuple[int, str]]:
        """All labels, each with its row."""
        found = []
        for row, of_image in enumerate(self.sets):
            found += [(row, label) for label in of_image]
        return found

    def is_numbered(self) -> bool:
        """Whether the labels are numbers, as the first one says."""
        first = next((label for _, label in self.each()), "")
        if not first and self.columns is None:
            raise UserError(f"The table {self.file}: no image has a label.")
        return self.columns is None and _whole_number(first) is not None

    def label_numbers(self, num_classes: int) -> list[int]:
        """The numbers in `each`, checked."""
        found = []
        for row, text in self.each():
            label = _whole_number(text)
            if label is None:
                raise UserError(f"{self.where(row)}: the label {text!r} is not a whole number, but the first label is.")
            check_label(label, num_classes, self.where(row))
            found.append(label)
        return found

    def classes(self) -> list[str] | range:
        """The names of the classes that this table has; their numbers if they have no names."""
        if self.is_numbered():
            return range(max(self.label_numbers(ANY_LABEL)) + 1)
        return self.columns or sorted({label for _, label in self.each()})

    def labelled(self, training: _Table, num_classes: int) -> FileSamples:
        """The images with checked labels. `training`: the table that defines the classes."""
        classes = training.classes()
        counted = self.several and num_classes == ANY_LABEL
        width = len(classes) if counted else num_classes
        if isinstance(classes, range):
            if counted:
                self.check_gaps()
            names = None
            numbers = self.label_numbers(width)
        else:
            check_class_count(len(classes), num_classes, f"The table {training.file}")
            names = classes
            numbers = self.numbers_of_names(training, classes)
        if self.several:
            labels = np.zeros((len(self.sets), width), dtype=np.uint8)
            labels[[row for row, _ in self.each()], numbers] = 1
        else:
            labels = np.array(numbers, dtype=np.int64)
        files = FileSamples(self.root, self.paths, labels, names)
        files.groups = self.groups or None
        return files

    def numbers_of_names(self, training: _Table, classes: list[str]) -> list[int]:
        """The numbers of the names in `each`, checked. `classes`: names of those of `training`."""
        if self.columns is not None and set(self.columns) != set(classes):
            missing = min(set(self.columns) ^ set(classes))
            raise UserError(f"{self.file} and {training.file} need the same columns: one lacks {missing}.")
        number_of = {name: label for label, name in enumerate(classes)}
        for row, name in self.each():
            if name not in number_of:
                raise UserError(
                    f"{self.where(row)}: {training.file} has no class {name!r}.{nearest(name, classes)} "
                    "Every class in the validation split must also be in the training split."
                )
            if not self.several and _whole_number(name) is not None:
                raise UserError(
                    f"{self.where(row)}: the target {name} is a number, but {training.sets[0][0]!r} in "
                    f"{training.where(0)} is a name. Give all targets as names, or all as whole numbers."
                )
        return [number_of[name] for _, name in self.each()]

    def log_separator(self) -> None:
        """Log what separates labels; without such lines, warn of a label that looks like a list."""
        if any(len(labels) > 1 for labels in self.sets):
            log.info("%s: the labels of an image are separated by %r.", self.file, self.separator)
            return
        marks = " " if self.several else ";|"
        do = "separate them by ';'" if self.several else "set DATA.MULTI_LABEL=true"
        for row, label in self.each():
            if any(mark in label for mark in marks):
                what = f"{self.where(row)}: the label {self.sets[row][0]!r} is read as one class."
                log.warning("%s If it lists several labels, %s.", what, do)
                return

    def check_gaps(self) -> None:
        rows = [row for row, _ in self.each()]
        check_gaps(self.label_numbers(ANY_LABEL), lambda place: self.where(rows[place]))


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    files = _files(data)
    training = _read(files.get("all") or files["train"], data)
    made = part_made(files, part)
    table = training if made else _read_part(files, part, training, data)
    return split_files(table.labelled(training, num_classes), data, made)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    given = _files(data)
    parts = parts_read(data, train, given)
    first = _read(given.get("all") or given["train"], data)
    if first.columns is None:
        first.log_separator()
    if train and not any(first.sets):
        raise UserError(f"The table {first.file}: no image has a label.")
    files = first.labelled(first, num_classes)
    split_files(files, data, part_made(given, parts[-1]))
    read = [first if part_made(given, part) else _read_part(given, part, first, data) for part in parts]
    classes = first.classes()
    log_unused_outputs(len(classes), num_classes, f"The table {first.file}")
    warn_empty_classes(files.labels, classes, f"The table {first.file}")
    warn_alike_names(classes, f"The table {first.file}")
    row_of: dict[str, tuple[_Table, int]] = {}
    for table in read:
        if table is not first:
            split_files(table.labelled(first, num_classes), data, None)
        for row, path in enumerate(table.paths):
            other, before = row_of.setdefault(path, (table, row))
            if set(other.sets[before]) != set(table.sets[row]):
                what = f"{table.where(row)}: {path.partition(OF_SEVERAL)[0]} has other labels in {other.where(before)}."
                raise UserError(f"{what} An image has one label, or, with DATA.MULTI_LABEL, all of them in one line.")
        check_first_files(table.file, table.paths, data, table.root)


def _files(data: DataConfig) -> dict[Part, tuple[Path, str]]:
    """The file of each split, or one file for all. With it, the split's name in the file's column of splits, if any."""
    given = data.DATASET.removeprefix(CSV_PREFIX) if data.DATASET.startswith(CSV_PREFIX) else data.DATA_PATH
    if given is None:
        raise UserError(f"DATA.DATASET csv needs DATA.DATA_PATH (-data_path). {LAYOUT.format(root='/data/cats')}")
    root = Path(given).expanduser()
    if root.is_file():
        return {part: (root, name) for part, name in _splits_in(root, data).items()}
    parts = parts_in_files(root, data, table_name)
    for part in ("train", "val"):
        if part not in parts and "all" not in parts:
            problem = no_file(root / table_name(part) if root.is_dir() else root)
            key = "DATA.DATA_PATH (-data_path)" if given == data.DATA_PATH else "DATA.DATASET (-dataset)"
            raise UserError(f"{key}: {problem}. {LAYOUT.format(root=root)}")
    return {part: (root / file, "") for part, file in parts.items()}


def _splits_in(file: Path, data: DataConfig) -> dict[Part, str]:
    """The splits that a single table's column of splits names, and their names there; `all` without such a column."""
    rows = _rows(file, data)
    _, header = next(rows)
    place = _Header(file, header, data).split()
    if place is None:
        return {"all": ""}
    line_of: dict[str, int] = {}
    for number, fields in rows:
        line_of.setdefault(_split_named(fields, place), number)
    column = f"the column {header[place]!r}"
    if TRAIN not in line_of or len(line_of) == 1:
        if len(header) > 2 and not data.MULTI_LABEL:  # else it has the labels
            what = f"{column} is not read as splits: it holds {some_of(list(line_of))}, not train and val or test"
            warn_once(f"{file}: {what}. DATA.GROUP={header[place]} keeps images of one value together.")
        return {"all": ""}
    for name, number in line_of.items():
        if name not in SPLIT_NAMES:
            raise UserError(f"{file}:{number}: {column} holds {name!r}; it must hold train, val or test.")
    names = [name for name in SPLIT_NAMES if name in line_of]
    warn_once(f"{file}: {column} says which split an image is in: {', '.join(names)}.", logging.INFO)
    return named_parts(names, file, data)


def _split_named(fields: list[str], place: int) -> str:
    return fields[place].casefold().removesuffix("ing") if place < len(fields) else ""  # training, testing


def _read_part(files: dict[Part, tuple[Path, str]], part: Part, training: _Table, data: DataConfig) -> _Table:
    if part not in files:
        raise no_such_part(part, data.DATA_PATH)
    return training if part == "train" else _read(files[part], data, training.separator)


def _root(file: Path, paths: Sequence[str], data: DataConfig) -> Path:
    """The folder that paths in a table are relative to: its own, or DATA_PATH if images of the first lines are there
    alone."""
    own = file.parent
    other = Path(data.DATA_PATH or own).expanduser()
    first = [path.partition(OF_SEVERAL)[0] for path in paths[:PROBED]]
    is_elsewhere = not any((own / path).exists() for path in first) and any((other / path).exists() for path in first)
    return other if is_elsewhere else own


def _rows(file: Path, data: DataConfig) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of the header, then of each line that is not blank."""
    try:
        content = read_regular(file)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            if b"\0" in content:  # no text, or of 16 bits
                raise
            text = content.decode("latin1")
            warn_once(f"{file} is not UTF-8 and is read as Latin-1.")
        delimiter = max(",\t" if data.MULTI_LABEL else ",;\t", key=text.partition("\n")[0].count)
        if delimiter != ",":
            warn_once(f"{file}: columns are separated by {delimiter!r}, as in its header.")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = [field.strip() for field in next(rows, [])]
        yield 1, header
        for row in rows:
            fields = [field.strip() for field in row]
            if any(fields[len(header) :]):
                or_separate = " or separate labels by ';'" if data.MULTI_LABEL else ""
                advice = f"Put fields with {delimiter!r} in quotes{or_separate}."
                raise UserError(f"{file}:{rows.line_num} has {len(row)} fields; the header has {len(header)}. {advice}")
            if any(fields):
                yield rows.line_num, fields
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The table {file} cannot be read: {error}.") from None


def _read(place: tuple[Path, str], data: DataConfig, separator: str | None = None) -> _Table:
    """`place`: see `_files`. `separator`: of the training table's labels; None: this is it."""
    file, split_name = place
    rows = _rows(file, data)
    _, header = next(rows)
    columns = _Header(file, header, data)
    split = columns.split() if split_name else None
    paths_at, targets = columns.places(split)
    group = [header.index(data.GROUP)] if data.GROUP in header else []
    last = max(paths_at + targets + group)
    paths: list[str] = []
    texts: list[list[str]] = []
    numbers: list[int] = []
    groups: list[str] = []
    for number, fields in rows:
        if split is not None and _split_named(fields, split) != split_name:
            continue
        where = f"{file}:{number}"
        if len(fields) <= last:
            raise UserError(f"{where} has {len(fields)} fields; the header has {len(header)}.")
        paths.append(OF_SEVERAL.join(check_path(fields[place], where) for place in paths_at))
        texts.append([one_line(fields[place]) for place in targets])
        numbers.append(number)
        groups += [fields[place] for place in group]
    if not paths:
        raise UserError(f"{file} has no lines below its header. {LAYOUT.format(root=file.parent)}")
    table = _Table(
        file=file,
        several=data.MULTI_LABEL,
        columns=[header[place] for place in targets] if len(targets) > 1 else None,
        paths=paths,
        root=_root(file, paths, data),
        numbers=numbers,
        groups=groups,
        separator=_separator_in(texts) if separator is None else separator,
    )
    table.sets.extend(_label_set(fields, table, table.where(row)) for row, fields in enumerate(texts))
    return table


def _separator_in(texts: list[list[str]]) -> str:
    for separator in SEPARATORS:
        if any(separator in fields[0] for fields in texts):
            return separator
    return ";"


def _label_set(fields: list[str], table: _Table, where: str) -> tuple[str, ...]:
    """The labels of a line: its target, the parts of it, or the names of the columns that hold a 1."""
    if table.columns is not None:
        for name, text in zip(table.columns, fields, strict=True):
            if text not in ("0", "1", "0.0", "1.0"):
                raise UserError(
                    f"{where}: the column {name} holds {text!r}. Without a column of labels, every column but the "
                    "path and that of DATA.GROUP is a class and holds 0 or 1."
                )
        return tuple(name for name, text in zip(table.columns, fields, strict=True) if text.startswith("1"))
    (text,) = fields
    if not table.several:
        if not text:
            raise UserError(f"{where}: the target is empty.")
        return (text,)
    labels = tuple(part.strip() for part in text.split(table.separator)) if text else ()
    if "" in labels:
        raise UserError(f"{where}: {text!r} has an empty label; separate labels by one {table.separator}")
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"{where}: the label {label!r} appears twice; give each label once.")
    return labels


def images_in_table(file: Path, data: DataConfig) -> list[str]:
    """Paths of the images that a table names, whatever its other columns are; each one may be several files."""
    rows = _rows(file, data)
    _, names = next(rows)
    header = _Header(file, names, data)
    places = header.files()
    if not places:
        raise header.lacks(PATHS, labelled=False)
    paths = []
    for number, fields in rows:
        of_image = [check_path(fields[place] if place < len(fields) else "", f"{file}:{number}") for place in places]
        paths.append(OF_SEVERAL.join(of_image))
    root = _root(file, paths, data)
    found = []
    for of_image in paths:
        files = [str(root / path) for path in of_image.split(OF_SEVERAL)]
        found.append(OF_SEVERAL.join(files))
    return found


def _whole_number(text: str) -> int | None:
    """5 for `5`, and for `5.0`, which pandas writes if a column ever had a missing value."""
    match = re.fullmatch(r"(-?[0-9]{1,18})(\.0*)?", text)
    return int(match[1]) if match else None


def _count(data: DataConfig, train: bool) -> int:  # noqa: ARG001 - the training table has the classes of both splits
    files = _files(data)
    first = _read(files.get("all") or files["train"], data)
    if first.is_numbered():
        first.check_gaps()
    first.labelled(first, ANY_LABEL)  # checks all labels
    return len(first.classes())


SOURCE = Source(_samples, _check, count=_count, multi_label=True, parts=_files, groups=True, shares_list=True)
