"""`csv`: a table with one image per line, as a path and a label; with DATA.MULTI_LABEL, any number of labels."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from datasets.base import CSV_PREFIX, Part, Source, part_to_make, parts_read
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
"""Characters that may separate the labels of an image; the first that occurs in the training table does"""

PATHS = ("path", "image_path", "image", "file", "filename")
"""Usual names of the column of paths"""
NUMBERED = re.compile(rf"(?:{'|'.join(PATHS)})_?([0-9]{{1,4}})", re.IGNORECASE)
"""Names of columns that each hold a file of the same image"""
TARGETS = ("target", "label", "class")
"""Usual names of the column of labels"""
PLURALS = ("targets", "labels", "classes")
"""Usual names of the column that may hold several labels, besides TARGETS"""
SPLITS = ("split", "set", "fold", "partition", "subset")
"""Usual names of the column that may say which split an image of a single table is in"""
GROUPS = re.compile(
    "(patient|subject|person|animal|case|study|series|scene|video|site|location)([ _-]?id)?", re.IGNORECASE
)
"""Usual names of a column that says what thing or place an image shows"""
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
    """The header of a table: it finds the columns of paths, labels, classes and splits.

    DATA.COLUMNS can name the columns of path and label, and DATA.GROUP that of groups; otherwise their usual names
    tell. A column is an index, counted from 0.
    """

    def __init__(self, file: Path, names: list[str], data: DataConfig) -> None:
        """`names`: the fields of the table's first line."""
        self.file = file
        self.names = names
        self.data = data
        self.folded = [name.casefold() for name in names]
        self.configured: dict[str, str] = dict(re.findall(COLUMN, data.COLUMNS or ""))
        """DATA.COLUMNS: the names of the columns `file` and `label`, as far as they are set"""

    def find_first(self, names: Iterable[str]) -> list[int]:
        """Return the column with the first of these names that the table has, as a list of one; empty without one."""
        return [self.folded.index(name.casefold()) for name in names if name.casefold() in self.folded][:1]

    def split_column(self) -> int | None:
        """Return the column that may say which split an image is in; None without a column of such a name."""
        used_otherwise = (self.data.GROUP, *self.configured.values())
        candidates = ["" if name in used_otherwise else name.casefold() for name in self.names]
        return next((candidates.index(name) for name in SPLITS if name in candidates), None)

    def path_and_label_columns(self, split_column: int | None) -> tuple[list[int], list[int]]:
        """Return the columns of paths, and the column of labels, or those of the classes; raise UserError without them.

        With DATA.MULTI_LABEL and no column of labels, every column but those of paths is a class. If a table has just
        two columns of which not both have a usual name, one is read as the path and the other as the label, unless
        DATA.COLUMNS or DATA.MULTI_LABEL is set. The column of splits and that of DATA.GROUP do not count.
        """
        usual_names = TARGETS + PLURALS if self.data.MULTI_LABEL else TARGETS
        label_names = (self.configured["label"],) if "label" in self.configured else usual_names
        columns = [
            column for column, name in enumerate(self.names) if name != self.data.GROUP and column != split_column
        ]
        paths = self.path_columns()
        labels = self.find_first(label_names)
        names_decide = self.data.MULTI_LABEL or self.configured or (paths and labels)
        if len(columns) == 2 and not names_decide:
            path, label = self.path_and_label_of_two(columns, paths, labels)
            paths = [path]
            labels = [label]
        if not paths:
            raise self.missing_column(PATHS)
        compared_names = self.folded  # without regard to capital letters
        if not labels:
            labels = self.class_columns(columns, paths, label_names)
            compared_names = self.names  # classes may be a and A
        for column in paths + labels:
            if compared_names.count(compared_names[column]) > 1:
                raise UserError(f"{self.file}: two columns are called {self.names[column]!r}; remove or rename one.")
        return paths, labels

    def path_and_label_of_two(self, columns: list[int], paths: list[int], labels: list[int]) -> tuple[int, int]:
        """Decide which of a table's two columns is the path and which the label, with a warning.

        At most one of them has a usual name: `paths` and `labels` are the columns that were found by their names.
        """
        # A name that ends like an image file is no name of a column: the first line is an image.
        if any(self.names[column].lower().endswith(ENDINGS) for column in columns):
            raise UserError(f"{self.file} has no header: its first line is {', '.join(self.names)}. {ADVICE}")
        # By default the path comes first. Two columns such as file_1 and file_2 are both in `paths`: only the first
        # one is then the path.
        path, label = columns
        if path in labels or label in paths[:1]:
            path, label = label, path
        reading = f"{self.names[path]!r} is read as the path, {self.names[label]!r} as the label"
        warn_once(f"{self.file}: the column {reading}. {ADVICE}")
        return path, label

    def class_columns(self, columns: list[int], paths: list[int], label_names: Sequence[str]) -> list[int]:
        """Return the columns that are classes, in a table without a column of labels; raise UserError without them.

        These are all `columns` but those of `paths`. `label_names`: names that a column of labels could have had.
        """
        # With one label per image, or if DATA.COLUMNS names the column of labels, there must be such a column.
        if not self.data.MULTI_LABEL or "label" in self.configured:
            raise self.missing_column(label_names)
        classes = [column for column in columns if column not in paths]
        if len(classes) < 2:
            missing = f"neither a column called {' or '.join(label_names)} nor one column per class"
            raise UserError(f"{self.file} has {missing}. {LAYOUT.format(root=self.file.parent)}")
        return classes

    def path_columns(self) -> list[int]:
        """Return the column of paths, or the columns of an image's several files; empty if there is none."""
        names = [self.configured["file"]] if "file" in self.configured else PATHS
        return self.find_first(names) or self.numbered_path_columns()

    def numbered_path_columns(self) -> list[int]:
        """Return columns such as file_1, file_2, each with a file of the same image, in the order of the numbers.

        Empty if there are none. Raises UserError if a number between them is missing.
        """
        if "file" in self.configured:  # DATA.COLUMNS names another column
            return []
        matches = map(NUMBERED.fullmatch, self.names)
        column_of = {int(match[1]): column for column, match in enumerate(matches) if match}
        if not column_of:
            return []
        numbers = sorted(column_of)
        names = ", ".join(self.names[column_of[number]] for number in numbers)
        message = f"{self.file}: the columns {names} are the files of an image"
        for number in range(numbers[0], numbers[-1]):  # the last one is there
            if number not in column_of:
                raise UserError(f"{message}, but there is none with number {number}.")
        warn_once(f"{message}, in the order of its channels.", logging.INFO)
        return [column_of[number] for number in numbers]

    def missing_column(self, names: Sequence[str], labelled: bool = True) -> UserError:
        """Make the error for a table that has no column of any of these names. `labelled`: the table needs labels."""
        # `nearest` returns a question such as " Did you mean path?", or '' if no name is similar.
        suggestions = (nearest(name, names) for name in self.folded)
        suggestion = next(filter(None, suggestions), "")
        columns = ", ".join(self.names) or "none"
        advice = f" {ADVICE} {LAYOUT.format(root=self.file.parent)}" if labelled else ""
        wanted = " or ".join(names)
        return UserError(f"{self.file} has no column {wanted}; its columns are {columns}.{suggestion}{advice}")


@dataclass(frozen=True)
class _Table:
    """The images and labels of one table, or of the lines of one split in it."""

    file: Path
    several: bool
    """DATA.MULTI_LABEL: any number of labels per line; else one"""
    columns: list[str] | None
    """Names of the classes, if each has a column of its own, which DATA.MULTI_LABEL allows; else None"""
    paths: list[str]
    """One per image; several files of one image are joined by OF_SEVERAL"""
    root: Path
    """The folder that `paths` are relative to"""
    line_numbers: list[int]
    """Number of the line of each image in the file, for messages"""
    groups: list[str]
    """Group of each image, from the column DATA.GROUP, else its path; empty without such a column"""
    separator: str
    """With DATA.MULTI_LABEL: the character between the labels of a line"""
    label_sets: list[tuple[str, ...]] = field(default_factory=list)
    """Labels of each image; an image of no class has none"""

    def where(self, row: int) -> str:
        """Name the line of an image for a message, as file:line."""
        return f"{self.file}:{self.line_numbers[row]}"

    def all_labels(self) -> list[tuple[int, str]]:
        """List all labels of all images, each with the row of its image."""
        rows_and_labels = []
        for row, labels in enumerate(self.label_sets):
            rows_and_labels += [(row, label) for label in labels]
        return rows_and_labels

    def is_numbered(self) -> bool:
        """Tell whether labels are numbers, not names. The first label decides; UserError if there is none."""
        first_label = next((label for _, label in self.all_labels()), "")
        if not first_label and self.columns is None:
            raise UserError(f"The table {self.file}: no image has a label.")
        return self.columns is None and _whole_number(first_label) is not None

    def label_numbers(self, num_classes: int) -> list[int]:
        """Convert `all_labels`, which are texts, to numbers. UserError for a text that is no number or is out of range.

        `num_classes`: labels must be below it.
        """
        numbers = []
        for row, text in self.all_labels():
            number = _whole_number(text)
            if number is None:
                raise UserError(f"{self.where(row)}: the label {text!r} is not a whole number, but the first label is.")
            check_label(number, num_classes, self.where(row))
            numbers.append(number)
        return numbers

    def classes(self) -> list[str] | range:
        """Return the names of the classes in the order of their labels; their numbers if they have no names."""
        if self.is_numbered():
            return range(max(self.label_numbers(ANY_LABEL)) + 1)
        return self.columns or sorted({label for _, label in self.all_labels()})

    def labelled(self, training: _Table, num_classes: int) -> FileSamples:
        """Make samples of the images, with labels as numbers. UserError for a label that does not fit.

        `training`: the table that has the classes, which may be this one. `num_classes`: number of the model's classes;
        with ANY_LABEL, labels are not checked.
        """
        classes = training.classes()
        # With several labels, the samples have a column per class, so ANY_LABEL stands for as many as the table has.
        takes_count_of_table = self.several and num_classes == ANY_LABEL
        width = len(classes) if takes_count_of_table else num_classes
        if isinstance(classes, range):  # labels are numbers
            if takes_count_of_table:
                self.check_gaps()
            names = None
            numbers = self.label_numbers(width)
        else:
            check_class_count(len(classes), num_classes, f"The table {training.file}")
            names = classes
            numbers = self.numbers_of_names(training, classes)
        if self.several:
            labels = np.zeros((len(self.label_sets), width), dtype=np.uint8)
            labels[[row for row, _ in self.all_labels()], numbers] = 1
        else:
            labels = np.array(numbers, dtype=np.int64)
        files = FileSamples(self.root, self.paths, labels, names)
        files.groups = self.groups or None
        without = sum(group == path for group, path in zip(self.groups, self.paths, strict=False))
        if without:
            warn_once(
                f"{self.file}: {without:,} of {len(self.paths):,} images have no value in the column of DATA.GROUP; "
                "each is a group of its own."
            )
        return files

    def numbers_of_names(self, training: _Table, classes: list[str]) -> list[int]:
        """Convert `all_labels`, which are names of classes, to numbers. UserError for a name that is no class.

        `classes`: the names of the classes, which the table `training` has.
        """
        if self.columns is not None and set(self.columns) != set(classes):
            in_one_table = set(self.columns) ^ set(classes)
            missing = min(in_one_table)
            raise UserError(f"{self.file} and {training.file} need the same columns: one lacks {missing}.")
        number_of = {name: number for number, name in enumerate(classes)}
        for row, name in self.all_labels():
            if name not in number_of:
                raise UserError(
                    f"{self.where(row)}: {training.file} has no class {name!r}.{nearest(name, classes)} "
                    "Every class in the validation split must also be in the training split."
                )
            # The first label of the training table is a name, but a later one is a number, which must be a mistake.
            if not self.several and _whole_number(name) is not None:
                raise UserError(
                    f"{self.where(row)}: the target {name} is a number, but {training.label_sets[0][0]!r} in "
                    f"{training.where(0)} is a name. Give all targets as names, or all as whole numbers."
                )
        return [number_of[name] for _, name in self.all_labels()]

    def log_separator(self) -> None:
        """Log which character separates labels. If no image has several, warn of a label that looks like a list."""
        if any(len(labels) > 1 for labels in self.label_sets):
            log.info("%s: the labels of an image are separated by %r.", self.file, self.separator)
            return
        marks_of_lists = " " if self.several else ";|"
        advice = "separate them by ';'" if self.several else "set DATA.MULTI_LABEL=true"
        for row, label in self.all_labels():  # each image has one label, or none
            if any(mark in label for mark in marks_of_lists):
                message = f"{self.where(row)}: the label {label!r} is read as one class."
                log.warning("%s If it lists several labels, %s.", message, advice)
                return

    def check_gaps(self) -> None:
        """Raise UserError if labels are numbers of which suspiciously many do not occur; see `labels.check_gaps`."""
        rows = [row for row, _ in self.all_labels()]
        check_gaps(self.label_numbers(ANY_LABEL), lambda index: self.where(rows[index]))


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    """Open a split: it has a table of its own, or is made of the images of the only table."""
    locations = _locations(data)
    training = _read_training(locations, data)
    made_part = part_to_make(locations, part)  # None if the split has a table of its own
    table = training if made_part else _read_part(locations, part, training, data)
    return split_files(table.labelled(training, num_classes), data, made_part)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    """Check the tables of all splits that a run reads, and that the first images exist; log what is unusual."""
    locations = _locations(data)
    parts = parts_read(data, train, locations)
    training = _read_training(locations, data)
    owner = f"The table {training.file}"
    if training.columns is None:  # one column of labels, not one per class
        training.log_separator()
    if train and not any(training.label_sets):
        raise UserError(f"{owner}: no image has a label.")
    files = training.labelled(training, num_classes)
    # For its errors: groups may be missing, or the images may be too few to split.
    split_files(files, data, part_to_make(locations, parts[-1]))
    # The tables of the splits. A split that the program makes is in the training table.
    tables = []
    for part in parts:
        is_made_here = part_to_make(locations, part) is not None
        tables.append(training if is_made_here else _read_part(locations, part, training, data))
    classes = training.classes()
    log_unused_outputs(len(classes), num_classes, owner)
    warn_empty_classes(files.labels, classes, owner)
    warn_alike_names(classes, owner)

    # An image that is in two lines, of one table or of two, must have the same labels in both.
    first_line_of: dict[str, tuple[_Table, int]] = {}
    for table in tables:
        if table is not training:  # for the errors of its labels and groups
            split_files(table.labelled(training, num_classes), data, None)
        for row, path in enumerate(table.paths):
            first_table, first_row = first_line_of.setdefault(path, (table, row))
            if set(first_table.label_sets[first_row]) != set(table.label_sets[row]):
                image = path.partition(OF_SEVERAL)[0]
                message = f"{table.where(row)}: {image} has other labels in {first_table.where(first_row)}."
                raise UserError(
                    f"{message} An image has one label, or, with DATA.MULTI_LABEL, all of them in one line."
                )
        check_first_files(table.file, table.paths, data, table.root)


def _locations(data: DataConfig) -> dict[Part, tuple[Path, str]]:
    """Find where each split is: its table, and its name in the column of splits if one table has several.

    The name is '' if the whole table is one split. `all` is a table that the program splits.
    """
    dataset_names_place = data.DATASET.startswith(CSV_PREFIX)  # csv:PLACE
    place = data.DATASET.removeprefix(CSV_PREFIX) if dataset_names_place else data.DATA_PATH
    if place is None:
        raise UserError(f"DATA.DATASET csv needs DATA.DATA_PATH (-data_path). {LAYOUT.format(root='/data/cats')}")
    root = Path(place).expanduser()
    if root.is_file():
        return {part: (root, name) for part, name in _splits_in_table(root, data).items()}
    parts = parts_in_files(root, data, table_name)  # split -> file name; `table_name` makes it from the split's name
    for part in ("train", "val"):
        if part not in parts and "all" not in parts:
            problem = no_file(root / table_name(part) if root.is_dir() else root)
            key = "DATA.DATA_PATH (-data_path)" if place == data.DATA_PATH else "DATA.DATASET (-dataset)"
            raise UserError(f"{key}: {problem}. {LAYOUT.format(root=root)}")
    return {part: (root / file, "") for part, file in parts.items()}


def _splits_in_table(file: Path, data: DataConfig) -> dict[Part, str]:
    """Map each split to its name in a table's column of splits.

    If no column says which split an image is in, the result is {'all': ''}: the program splits the whole table.
    """
    rows = _rows(file, data)
    _, header = next(rows)
    column = _Header(file, header, data).split_column()
    if column is None:
        return {"all": ""}
    first_line_of: dict[str, int] = {}
    for line_number, fields in rows:
        first_line_of.setdefault(_split_in_field(fields, column), line_number)
    title = f"the column {header[column]!r}"
    if TRAIN not in first_line_of or len(first_line_of) == 1:
        # The column means something else than splits. If it is the only column besides the paths, it has the labels,
        # and with DATA.MULTI_LABEL it may be a class: nothing to warn of.
        if len(header) > 2 and not data.MULTI_LABEL:
            values = some_of(list(first_line_of))
            problem = f"{title} is not read as splits: it holds {values}, not train and val or test"
            warn_once(f"{file}: {problem}. DATA.GROUP={header[column]} keeps images of one value together.")
        return {"all": ""}
    for name, line_number in first_line_of.items():
        if name not in SPLIT_NAMES:
            raise UserError(f"{file}:{line_number}: {title} holds {name!r}; it must hold train, val or test.")
    names = [name for name in SPLIT_NAMES if name in first_line_of]
    warn_once(f"{file}: {title} says which split an image is in: {', '.join(names)}.", logging.INFO)
    return named_parts(names, file, data)


def _split_in_field(fields: list[str], column: int) -> str:
    """Return the name of the split of a line, in small letters; '' if the line ends before that column."""
    if column >= len(fields):
        return ""
    return fields[column].casefold().removesuffix("ing")  # training, testing


def _read_training(locations: dict[Part, tuple[Path, str]], data: DataConfig) -> _Table:
    """Read the table of the training split, or the table that the program splits."""
    return _read(locations.get("all") or locations["train"], data)


def _read_part(locations: dict[Part, tuple[Path, str]], part: Part, training: _Table, data: DataConfig) -> _Table:
    """Read the table of a split; UserError if the data set has no such split. `training` is not read again."""
    if part not in locations:
        raise no_such_part(part, data.DATA_PATH)
    return training if part == "train" else _read(locations[part], data, training.separator)


def _root(file: Path, paths: Sequence[str], data: DataConfig) -> Path:
    """Return the folder that the paths in a table are relative to: the table's own folder, or DATA_PATH.

    The first images decide. It is DATA_PATH if at least one of them is there, and none is in the table's folder.
    """
    table_folder = file.parent
    data_path = Path(data.DATA_PATH or table_folder).expanduser()
    first_paths = [path.partition(OF_SEVERAL)[0] for path in paths[:PROBED]]
    if any((table_folder / path).exists() for path in first_paths):
        return table_folder
    if any((data_path / path).exists() for path in first_paths):
        return data_path
    return table_folder


def _rows(file: Path, data: DataConfig) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of the header, then of each line that is not blank.

    The encoding (UTF-8 or Latin-1) and the character between columns are guessed, and logged if they are unusual.
    """
    try:
        content = read_regular(file)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            if b"\0" in content:  # it is not text, or text of 16 bits per character
                raise
            text = content.decode("latin1")
            warn_once(f"{file} is not UTF-8 and is read as Latin-1.")
        first_line = text.partition("\n")[0]
        delimiters = ",\t" if data.MULTI_LABEL else ",;\t"  # with several labels, ; may separate these
        delimiter = max(delimiters, key=first_line.count)
        if delimiter != ",":
            warn_once(f"{file}: columns are separated by {delimiter!r}, as in its header.")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = [field.strip() for field in next(rows, [])]
        yield 1, header
        for row in rows:
            fields = [field.strip() for field in row]
            if any(fields[len(header) :]):  # fields beyond the header; empty ones are ignored
                alternative = " or separate labels by ';'" if data.MULTI_LABEL else ""
                advice = f"Put fields with {delimiter!r} in quotes{alternative}."
                raise UserError(f"{file}:{rows.line_num} has {len(row)} fields; the header has {len(header)}. {advice}")
            if any(fields):
                yield rows.line_num, fields
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The table {file} cannot be read: {error}.") from None


def _read(location: tuple[Path, str], data: DataConfig, separator: str | None = None) -> _Table:
    """Read a table, or the lines of one split in it. `location`: the file, and the name of the split; '' for all lines.

    `separator`: the character between the labels of an image, as found in the training table. None finds it in this
    table, which is then the training table.
    """
    file, split_name = location
    rows = _rows(file, data)
    _, names = next(rows)
    header = _Header(file, names, data)
    split_column = header.split_column() if split_name else None
    path_columns, label_columns = header.path_and_label_columns(split_column)
    group_columns = [names.index(data.GROUP)] if data.GROUP in names else []  # one, or none
    last_column = max(path_columns + label_columns + group_columns)

    paths: list[str] = []
    label_fields: list[list[str]] = []
    line_numbers: list[int] = []
    groups: list[str] = []
    for line_number, fields in rows:
        if split_column is not None and _split_in_field(fields, split_column) != split_name:
            continue
        where = f"{file}:{line_number}"
        if len(fields) <= last_column:
            raise UserError(f"{where} has {len(fields)} fields; the header has {len(names)}.")
        # Several files of one image are joined to one text.
        paths.append(OF_SEVERAL.join(check_path(fields[column], where) for column in path_columns))
        label_fields.append([one_line(fields[column]) for column in label_columns])
        line_numbers.append(line_number)
        groups += [fields[column] or paths[-1] for column in group_columns]
    if not paths:
        raise UserError(f"{file} has no lines below its header. {LAYOUT.format(root=file.parent)}")

    if separator is None:
        separator = _separator_in(label_fields)
    has_column_per_class = len(label_columns) > 1
    table = _Table(
        file=file,
        several=data.MULTI_LABEL,
        columns=[names[column] for column in label_columns] if has_column_per_class else None,
        paths=paths,
        root=_root(file, paths, data),
        line_numbers=line_numbers,
        groups=groups,
        separator=separator,
    )
    # How a line's labels are read depends on the table, so they are added to it afterwards.
    for row, fields in enumerate(label_fields):
        table.label_sets.append(_labels_of_line(fields, table, table.where(row)))
    return table


def _separator_in(label_fields: list[list[str]]) -> str:
    """Return the first of SEPARATORS that occurs in a label of the training table; ';' if none does."""
    for separator in SEPARATORS:
        if any(separator in fields[0] for fields in label_fields):
            return separator
    return ";"


def _labels_of_line(fields: list[str], table: _Table, where: str) -> tuple[str, ...]:
    """Return the labels of an image as texts. `fields`: those of the label columns. UserError names the line `where`.

    With one column per class, the labels are the names of the columns that hold a 1. Otherwise the only field is the
    label, or with DATA.MULTI_LABEL a list of labels.
    """
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
    """List the images that a table names, with the folder of their paths; the table needs no labels.

    Several files of one image are one path, joined by OF_SEVERAL.
    """
    rows = _rows(file, data)
    _, names = next(rows)
    header = _Header(file, names, data)
    columns = header.path_columns()
    if not columns:
        raise header.missing_column(PATHS, labelled=False)
    images = []
    for line_number, fields in rows:
        where = f"{file}:{line_number}"
        paths = []
        for column in columns:
            path = fields[column] if column < len(fields) else ""  # `check_path` refuses an empty path
            paths.append(check_path(path, where))
        images.append(OF_SEVERAL.join(paths))
    # The first images show which folder the paths are relative to. Then each path is joined to it.
    root = _root(file, images, data)
    images_with_root = []
    for image in images:
        files = [str(root / path) for path in image.split(OF_SEVERAL)]
        images_with_root.append(OF_SEVERAL.join(files))
    return images_with_root


def group_column(data: DataConfig) -> tuple[str, dict[str, str]]:
    """Find the first column of the data's tables that may be one for DATA.GROUP, by its name.

    Returns its name, and its value for each image by `FileSamples.name`; '' and an empty dictionary without one.
    """
    group_of = dict[str, str]()
    if data.DATASET.partition(":")[0] != "csv":
        return "", group_of
    locations = _locations(data)
    _, names = next(_rows(next(iter(locations.values()))[0], data))
    column = next(filter(GROUPS.fullmatch, names), "")
    if column:
        for location in locations.values():
            table = _read(location, data.changed(GROUP=column))
            images = FileSamples(table.root, table.paths, np.empty(0), None)
            group_of.update((images.name(row), group) for row, group in enumerate(table.groups))
    return column, group_of


def _whole_number(text: str) -> int | None:
    """Convert a label such as 5 to a number; None if it is none.

    5.0 is 5, too: pandas writes that if a column ever had a missing value.
    """
    match = re.fullmatch(r"(-?[0-9]{1,18})(\.0*)?", text)
    return int(match[1]) if match else None


def _count(data: DataConfig, train: bool) -> int:  # noqa: ARG001 - the training table has the classes of both splits
    """Count the classes of the training table, and check all of its labels."""
    training = _read_training(_locations(data), data)
    if training.is_numbered():  # labels are numbers, not names
        training.check_gaps()
    training.labelled(training, ANY_LABEL)  # for its errors: the table's labels must fit its own classes
    return len(training.classes())


SOURCE = Source(_samples, _check, count=_count, multi_label=True, parts=_locations, groups=True, shares_list=True)
