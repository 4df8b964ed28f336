"""Leave out the images in the list DATA.EXCLUDE, and correct labels by the table DATA.RELABEL."""

import csv
import hashlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.base import Encoded, Samples, name_prefix
from datasets.labels import distinct_names
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log, warn_once
from utils.program import started_as
from utils.text import counted, one_line, redacted, some_of
from vitamp.files import only_regular, read_regular

REMARK = "  # "
"""Separates the name of an image in the list from the reason, which is ignored when the list is read"""
MARK = re.compile(r"(?:^|\s)#")
"""Possible beginning of a comment"""
COLUMNS = ("path", "given", "proposed", "decision")
"""Columns that DATA.RELABEL must have"""


class Row(NamedTuple):
    """A line of DATA.RELABEL, which decides about the label of one image."""

    line: int
    """Number of the line"""
    given: list[str]
    """Names of the labels that the data set gives to the image"""
    proposed: list[str]
    """Names of the labels that replace them if the decision is relabel"""
    decision: str
    """keep, drop or relabel"""


class Remaining(Samples):
    """A split without the samples that were left out. The others have new consecutive indices."""

    unmatched: Mapping[str, int] = {}
    """Names in DATA.RELABEL that no training image has -> their line numbers"""

    def __init__(self, samples: Samples, remaining: np.ndarray, lines: Sequence[int]) -> None:
        """`samples`: the whole split. `remaining`: indices of the samples to keep, ascending.

        `lines`: for each image that DATA.EXCLUDE leaves out, the number of its line in the list.
        """
        self.samples = samples
        self.lines = lines
        self._old_index = remaining
        self._new_index = np.full(len(samples), -1, dtype=np.int64)
        self._new_index[remaining] = np.arange(len(remaining))
        self.labels = samples.labels[remaining]
        self.classes = samples.classes
        self.stored = samples.stored
        self.remote = samples.remote
        self.window = samples.window
        self.file_begins = np.searchsorted(remaining, samples.file_begins)
        self.groups = samples.groups and [samples.groups[index] for index in remaining]

    def read(self, index: int) -> Encoded:
        return self.samples.read(int(self._old_index[index]))

    def name(self, index: int) -> str:
        return self.samples.name(int(self._old_index[index]))

    def size(self, index: int) -> int:
        return self.samples.size(int(self._old_index[index]))

    def names(self) -> Iterator[bytes | memoryview]:
        yield from self.samples.names()
        if len(self) < len(self.samples):
            yield self._old_index.tobytes()

    def prefetch(self, indices: Sequence[int]) -> None:
        self.samples.prefetch([int(self._old_index[index]) for index in indices])

    def look_ahead(self) -> float | None:
        return self.samples.look_ahead()

    def announce(self, indices: Sequence[int]) -> None:
        self.samples.announce([int(self._old_index[index]) for index in indices])

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        order = self._new_index[self.samples.shuffled(generator)]
        return order[order >= 0]


def without_excluded(samples: Samples, data: DataConfig) -> Samples:
    """Leave out the samples that DATA.EXCLUDE lists. UserError if none is left."""
    line_of_name = excluded(data)
    prefix = name_prefix(data)
    # 0 for the samples that are not listed.
    line_of_sample = [line_of_name.get(below(samples.name(index), prefix), 0) for index in range(len(samples))]
    remaining = np.flatnonzero(np.array(line_of_sample) == 0)
    if len(remaining) == 0:
        raise UserError(f"DATA.EXCLUDE {data.EXCLUDE} lists all {len(samples)} images of a split; none is left.")
    if len(remaining) == len(samples):
        return samples
    return Remaining(samples, remaining, list(filter(None, line_of_sample)))


def line_of(name: str, remark: str, data: DataConfig) -> str:
    """Write a line of the list DATA.EXCLUDE: the name of an image and a remark, which is ignored."""
    return f"{path_in_list(name, data)}{REMARK}{redacted(' '.join(remark.split()))}"


def path_in_list(name: str, data: DataConfig) -> str:
    """Return the name of a sample as a list has it: relative to DATA_PATH, so that it stays valid when the data moves.

    It begins with ./ if it would be misread otherwise.
    """
    prefix = name_prefix(data)
    path = name.removeprefix(prefix)
    # A line that begins with # is a comment, and if a line begins with DATA_PATH, `below` removes that.
    is_misread = path.startswith(("#", prefix or "#"))
    return f"./{path}" if is_misread else path


def report_excluded(data: DataConfig, splits: Sequence[Samples | None]) -> None:
    """Log how many images of each split are left out, and warn of lines that match no image of any split.

    `splits`: training, validation, test, and others. None is a split in memory, or one that the data set lacks.
    """
    splits_with_names = [split for split in splits if split is not None]
    if not splits_with_names:
        log.warning("DATA.EXCLUDE has no effect on the data set %s: its images have no names.", data.DATASET)
        return
    lines_of_splits = [split.lines if isinstance(split, Remaining) else () for split in splits]
    left_out = []
    for title, split, lines in zip(("training", "validation", "test"), splits, lines_of_splits, strict=False):
        if split is not None:
            left_out.append(f"{len(lines):,} {title}")
    log.info("DATA.EXCLUDE %s leaves out: %s images.", data.EXCLUDE, ", ".join(left_out))
    matched_lines = set[int]().union(*lines_of_splits)
    # A line can mean several names. Reversed, so that the shortest of them is shown, which has no comment.
    unmatched = {number: name for name, number in reversed(excluded(data).items()) if number not in matched_lines}
    if unmatched:
        message = f"DATA.EXCLUDE {data.EXCLUDE}: {len(unmatched)} of its lines match no image"
        log.warning("%s%s", message, _unmatched_words(unmatched, splits_with_names[0], data))


def _unmatched_words(unmatched: Mapping[int, str], split: Samples, data: DataConfig) -> str:
    """End a warning about lines that match no image: list them, and show how a name of `split` is written.

    `unmatched`: the name in each line, by the line's number.
    """
    lines = some_of([f"line {number}, {unmatched[number]}" for number in sorted(unmatched)], separator="; ")
    return f": {lines}. A line is a path below DATA_PATH, as {path_in_list(split.name(0), data)}."


def text_of(data: DataConfig) -> str:
    """Read the file DATA.EXCLUDE; '' if the setting is empty. Names in it need not be UTF-8."""
    if not data.EXCLUDE:
        return ""
    file = Path(data.EXCLUDE).expanduser()
    with open(file, encoding="utf-8-sig", errors="surrogateescape", opener=only_regular) as lines:
        return lines.read()


def excluded(data: DataConfig) -> dict[str, int]:
    """Map the names in the file DATA.EXCLUDE to their line numbers, from 1. UserError if it cannot be read.

    A # may begin a comment or be part of a name, so a line can mean several names: all are included.
    """
    try:
        lines = text_of(data).split("\n")
        if any("\0" in line for line in lines):
            raise OSError("it is not a text file")
    except OSError as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"DATA.EXCLUDE: the file {data.EXCLUDE} {problem}. It lists images to leave out, one per line; "
            f"{started_as('scripts/check_data.py')} -fix FILE writes such a file."
        ) from None
    file = Path(data.EXCLUDE or "").expanduser()
    prefix = name_prefix(data)
    line_of_name = dict[str, int]()
    for number, line in enumerate(lines, start=1):
        possible_ends = [mark.start() for mark in MARK.finditer(line)]
        possible_ends.append(len(line))
        for end in possible_ends:
            name = line[:end].strip()
            if name and not name.startswith("#"):
                line_of_name[named_in(file, name, prefix)] = number
    return line_of_name


def named_in(table: Path, path: str, prefix: str) -> str:
    """Return the name that an image in a list or table has below DATA_PATH, as `below` returns it.

    Paths are relative to DATA_PATH, or to the table if only there is such an image.
    """
    name = below(path, prefix)
    beside_table = os.path.abspath(table.parent / path)
    name_beside_table = below(beside_table, prefix)
    is_same = name_beside_table == name
    is_outside = name_beside_table == beside_table
    if is_same or is_outside or not os.path.isfile(beside_table) or os.path.isfile(f"{prefix}{name}"):
        return name
    return name_beside_table


def below(path: str, prefix: str) -> str:
    """Return a path, or the name of a sample, relative to DATA_PATH. `prefix`: see `name_prefix`."""
    return path.removeprefix(prefix).removeprefix(f"{os.path.abspath(prefix)}/").removeprefix("./")


def read_rows(data: DataConfig) -> tuple[dict[str, Row], str]:
    """Read the rows of DATA.RELABEL, by the names of their images below DATA_PATH, and the file's hash.

    UserError names the line that is wrong.
    """
    file = Path(data.RELABEL or "").expanduser()
    prefix = name_prefix(data)
    rows = dict[str, Row]()
    try:
        content = read_regular(file)
        table = csv.DictReader(
            io.StringIO(content.decode("utf-8-sig", "surrogateescape"), newline=""), restval="", strict=True
        )
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            columns = f"the columns {','.join(COLUMNS)}, separated by commas; others are ignored"
            raise UserError(f"DATA.RELABEL {file} has no column {missing[0]}. Its first line must name {columns}.")
        for fields in table:
            where = f"{file}:{table.line_num}"
            name = named_in(file, one_line(fields["path"]), prefix)
            decision = fields["decision"].strip().casefold()
            if decision not in ("keep", "drop", "relabel"):
                raise UserError(f"{where}: the decision {fields['decision']!r} must be keep, drop or relabel.")
            if name in rows:
                raise UserError(f"{where}: {name} is in line {rows[name].line} too. Give each image one line.")
            given = [fields["given"]]
            proposed = [fields["proposed"]]
            if data.MULTI_LABEL:
                given = list(filter(None, fields["given"].split("|")))
                proposed = list(filter(None, fields["proposed"].split("|")))
            rows[name] = Row(table.line_num, given, proposed, decision)
    except (OSError, csv.Error) as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        writer = started_as("scripts/check_labels.py")
        raise UserError(f"DATA.RELABEL: the file {file} {problem}. {writer} writes such a file.") from None
    return rows, hashlib.sha256(content).hexdigest()


def relabelled(samples: Samples, data: DataConfig) -> Samples:
    """Change labels of the training samples, and leave samples out, as DATA.RELABEL decides.

    UserError if a given label is not that of the image, if a proposed one is unknown, or if no sample is left.
    """
    rows, sha256 = read_rows(data)
    prefix = name_prefix(data)
    labels = samples.labels.copy()
    unmatched = {name: row.line for name, row in rows.items()}
    done = Counter[str]()
    name_of = _names_of_labels(samples, data)
    label_of = {name: label for label, name in name_of.items()}
    remains = np.ones(len(labels), dtype=bool)
    # An image can be in a csv table twice, with different labels. Its row is then for the one with the given label.
    mismatches = dict[str, str]()
    for index in range(len(labels)):
        name = below(samples.name(index), prefix)
        if name not in rows:
            continue
        row = rows[name]
        old_labels = np.flatnonzero(labels[index]).tolist() if data.MULTI_LABEL else [int(labels[index])]
        if {label_of.get(label_name) for label_name in row.given} != set(old_labels):
            mismatches[name] = "|".join(name_of.get(label, f"{label}") for label in old_labels)
            continue
        unmatched.pop(name, None)
        new_labels = _new_labels(row, label_of, data)
        labels[index] = np.isin(np.arange(labels.shape[-1]), new_labels) if data.MULTI_LABEL else new_labels[0]
        if row.decision == "drop":
            remains[index] = False
            done["drop"] += 1
        else:
            done["keep" if set(new_labels) == set(old_labels) else "relabel"] += 1
    for name, label in mismatches.items():
        if name in unmatched:
            given = "|".join(rows[name].given)
            raise UserError(
                f"{data.RELABEL}:{rows[name].line}: given is {given!r}, but {name} has the label {label!r}. The "
                "list was made for other labels: make it again, or correct the line."
            )
    if not remains.any():
        raise UserError(f"DATA.RELABEL {data.RELABEL} leaves out all {len(labels)} training images.")
    lines = samples.lines if isinstance(samples, Remaining) else ()
    result = Remaining(samples, np.flatnonzero(remains), lines)
    result.labels = labels[remains]
    result.unmatched = unmatched
    file = Path(str(data.RELABEL)).name  # exported weights have this too, so no folders
    result.relabel = {"file": file, "sha256": sha256, "dropped": done["drop"], "relabelled": done["relabel"]}
    _report_relabelled(samples, result, name_of, done, data)
    return result


def _new_labels(row: Row, label_of: Mapping[str, int], data: DataConfig) -> list[int]:
    """Return the labels that a row decides on for its image. UserError for a name that is no class."""
    names = row.proposed if row.decision == "relabel" else row.given
    for name in names:
        if name not in label_of:
            closest = nearest(name, label_of) or f" Give a name as {next(iter(label_of))!r}."
            where = f"{data.RELABEL}:{row.line}"
            raise UserError(f"{where}: proposed is {name!r}, which is no class of the data.{closest}")
    return [label_of[name] for name in names]


def _names_of_labels(samples: Samples, data: DataConfig) -> dict[int, str]:
    """Map each label to the name of its class, or to the label as text if classes have no names."""
    labels = samples.labels
    largest = labels.shape[1] if data.MULTI_LABEL else int(labels.max(initial=-1)) + 1
    return dict(enumerate(distinct_names(samples.classes or range(largest))))


def _report_relabelled(
    before: Samples, after: Samples, name_of: Mapping[int, str], done: Counter[str], data: DataConfig
) -> None:
    """Log how many images have other labels, and warn of classes that have no images left. `done`: by decision."""
    numbers = f"{counted(done['drop'], 'training image')} left out, {done['relabel']} with another label"
    warn_once(f"DATA.RELABEL {data.RELABEL}: {numbers}, {done['keep']} as before.", logging.INFO)
    lost_labels = sorted(_labels_in(before, data) - _labels_in(after, data))
    if lost_labels:
        first = name_of.get(lost_labels[0], f"{lost_labels[0]}")
        classes = f"{counted(len(lost_labels), 'class')}, such as {first}"
        warn_once(f"DATA.RELABEL {data.RELABEL} leaves no training image of {classes}.")


def _labels_in(samples: Samples, data: DataConfig) -> set[int]:
    """Return the labels that at least one sample has."""
    labels = np.nonzero(samples.labels)[1] if data.MULTI_LABEL else samples.labels
    return set(labels.tolist())


def warn_unmatched_rows(data: DataConfig, train: Samples, validation: Samples | None) -> None:
    """Warn of rows of DATA.RELABEL that match no training image. Those of validation images are only counted."""
    unmatched = train.unmatched if isinstance(train, Remaining) else {}
    prefix = name_prefix(data)
    if not unmatched:
        return
    validation_names = set()
    if validation:
        validation_names = {below(validation.name(index), prefix) for index in range(len(validation))}
    in_no_split = {number: name for name, number in unmatched.items() if name not in validation_names}
    validating = len(unmatched) - len(in_no_split)
    message = f"DATA.RELABEL {data.RELABEL}: {len(unmatched)} of its lines match no training image"
    numbers = f"validation images, whose labels stay as given: {validating}; others: {len(in_no_split)}"
    ending = _unmatched_words(in_no_split, train, data) if in_no_split else "."
    log.warning("%s (%s)%s", message, numbers, ending)
