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
from datasets.labels import names_of_classes
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
        """Number the samples that remain anew, from 0.

        `samples`: the whole split. `remaining`: indices of the samples to keep, ascending. `lines`: for each image that
        DATA.EXCLUDE leaves out, the number of its line in the list.
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
        # The new index of a file's first sample is the number of remaining samples before the file.
        self.file_begins = np.searchsorted(remaining, samples.file_begins)
        self.groups = samples.groups and [samples.groups[index] for index in remaining]

    def read(self, index: int) -> Encoded:
        return self.samples.read(int(self._old_index[index]))

    def name(self, index: int) -> str:
        return self.samples.name(int(self._old_index[index]))

    def size(self, index: int) -> int:
        return self.samples.size(int(self._old_index[index]))

    def stamp(self, index: int) -> str:
        return self.samples.stamp(int(self._old_index[index]))

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
    names = (below(samples.name(index), prefix) for index in range(len(samples)))
    # The number of each sample's line in the list, which counts from 1; 0 for the samples that are not listed.
    line_of_sample = [line_of_name.get(name, 0) for name in names]
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
    # A line that begins with # is a comment, and if a line begins with DATA_PATH, `below` removes that. Without
    # DATA_PATH the prefix is '', with which every path begins, so only # is looked for.
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
    # The lines of the list that match an image of the split. A split that lost no image is no `Remaining`.
    lines_of_splits = [split.lines if isinstance(split, Remaining) else () for split in splits]
    left_out = []
    for title, split, lines in zip(("training", "validation", "test"), splits, lines_of_splits, strict=False):
        if split is not None:
            left_out.append(f"{len(lines):,} {title}")
    log.info("DATA.EXCLUDE %s leaves out: %s images.", data.EXCLUDE, ", ".join(left_out))
    matched_lines = set[int]().union(*lines_of_splits)
    # The name in each line that matches no image. `excluded` reads a line with # as several names, from the shortest,
    # which has no comment, to the whole line. In reverse order, the shortest is the last to be put in, and stays.
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

    A # may begin a comment or be part of a name. So a line with # is read as several names, one that ends before each #
    and the whole line; all of them are included.
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
    """Return the name below DATA_PATH of an image whose path is in a list or table.

    The path is relative to DATA_PATH; or to the folder of the table, if the file exists only there. `prefix`: DATA_PATH
    with a slash, with which the names of samples begin.
    """
    name = below(path, prefix)
    beside_table = os.path.abspath(table.parent / path)
    name_beside_table = below(beside_table, prefix)
    # `below` returns a path outside DATA_PATH as it is.
    is_outside = name_beside_table == beside_table
    if name_beside_table == name or is_outside:
        return name
    only_beside_table = os.path.isfile(beside_table) and not os.path.isfile(f"{prefix}{name}")
    return name_beside_table if only_beside_table else name


def below(path: str, prefix: str) -> str:
    """Return a path, or the name of a sample, relative to DATA_PATH. `prefix`: see `name_prefix`."""
    return path.removeprefix(prefix).removeprefix(f"{os.path.abspath(prefix)}/").removeprefix("./")


def read_rows(data: DataConfig) -> tuple[dict[str, Row], str]:
    """Read the file DATA.RELABEL. Return its rows by the names of their images below DATA_PATH, and the file's hash.

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
        columns_of_file = table.fieldnames or ()  # None if the file is empty
        missing = [name for name in COLUMNS if name not in columns_of_file]
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
    images_by_decision = Counter[str]()
    name_of = dict(enumerate(names_of_classes(samples.classes, samples.labels)))
    label_of = {name: label for label, name in name_of.items()}
    remains = np.ones(len(labels), dtype=bool)
    # Image -> its label, if that is not the label given in the row.
    mismatches = dict[str, str]()
    for index in range(len(labels)):
        name = below(samples.name(index), prefix)
        if name not in rows:
            continue
        row = rows[name]
        old_labels = np.flatnonzero(labels[index]).tolist() if data.MULTI_LABEL else [int(labels[index])]
        given_labels = {label_of.get(label_name) for label_name in row.given}
        if given_labels != set(old_labels):
            mismatches[name] = "|".join(name_of.get(label, f"{label}") for label in old_labels)
            continue
        unmatched.pop(name, None)
        new_labels = _new_labels(row, label_of, data)
        if data.MULTI_LABEL:
            labels[index] = np.isin(np.arange(labels.shape[-1]), new_labels)  # zeros and ones
        else:
            labels[index] = new_labels[0]
        if row.decision == "drop":
            remains[index] = False
            images_by_decision["drop"] += 1
        else:
            is_same = set(new_labels) == set(old_labels)
            images_by_decision["keep" if is_same else "relabel"] += 1
    # An image can be in a csv table twice, with different labels. Its row is for the sample with the given label, so a
    # mismatch is an error only if no other sample of this image matched.
    for name, label in mismatches.items():
        if name in unmatched:
            given = "|".join(rows[name].given)
            raise UserError(
                f"{data.RELABEL}:{rows[name].line}: given is {given!r}, but {name} has the label {label!r}. The "
                "list was made for other labels: make it again, or correct the line."
            )
    if not remains.any():
        raise UserError(f"DATA.RELABEL {data.RELABEL} leaves out all {len(labels)} training images.")
    # Keep the line numbers of the images that DATA.EXCLUDE left out of these samples before, for `report_excluded`.
    lines_of_excluded = samples.lines if isinstance(samples, Remaining) else ()
    result = Remaining(samples, np.flatnonzero(remains), lines_of_excluded)
    result.labels = labels[remains]
    result.unmatched = unmatched
    file = Path(str(data.RELABEL)).name  # exported weights have this too, so no folders
    result.relabel = {
        "file": file,
        "sha256": sha256,
        "dropped": images_by_decision["drop"],
        "relabelled": images_by_decision["relabel"],
    }
    _report_relabelled(samples, result, name_of, images_by_decision, data)
    return result


def _new_labels(row: Row, label_of: Mapping[str, int], data: DataConfig) -> list[int]:
    """Return the labels that a row of DATA.RELABEL decides on for its image. UserError for a name that is no class.

    Given names are known to be classes, because they were compared with the image's labels; proposed ones may not be.
    """
    names = row.proposed if row.decision == "relabel" else row.given
    for name in names:
        if name not in label_of:
            closest = nearest(name, label_of) or f" Give a name as {next(iter(label_of))!r}."
            where = f"{data.RELABEL}:{row.line}"
            raise UserError(f"{where}: proposed is {name!r}, which is no class of the data.{closest}")
    return [label_of[name] for name in names]


def _report_relabelled(
    before: Samples, after: Samples, name_of: Mapping[int, str], images_by_decision: Counter[str], data: DataConfig
) -> None:
    """Log how many images have other labels, and warn of classes that have no images left.

    `before`, `after`: the training samples before and after the change. `name_of`: label -> name of the class.
    `images_by_decision`: decision (keep, drop, relabel) -> number of images.
    """
    dropped = counted(images_by_decision["drop"], "training image")
    numbers = f"{dropped} left out, {images_by_decision['relabel']} with another label"
    warn_once(f"DATA.RELABEL {data.RELABEL}: {numbers}, {images_by_decision['keep']} as before.", logging.INFO)
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
    # Name in a row -> number of its line; `relabelled` made the samples a `Remaining` and set it.
    unmatched = train.unmatched if isinstance(train, Remaining) else {}
    prefix = name_prefix(data)
    if not unmatched:
        return
    validation_names = set()
    if validation:
        validation_names = {below(validation.name(index), prefix) for index in range(len(validation))}
    # Number of a line -> the name in it, as the warning lists them.
    in_no_split = {number: name for name, number in unmatched.items() if name not in validation_names}
    validating = len(unmatched) - len(in_no_split)
    message = f"DATA.RELABEL {data.RELABEL}: {len(unmatched)} of its lines match no training image"
    numbers = f"validation images, whose labels stay as given: {validating}; others: {len(in_no_split)}"
    ending = _unmatched_words(in_no_split, train, data) if in_no_split else "."
    log.warning("%s (%s)%s", message, numbers, ending)
