"""DATA.EXCLUDE, a list of images to leave out, and DATA.RELABEL, a table of training images with wrong labels."""

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
"""Between a name in the list and the reason, which is ignored."""
MARK = re.compile(r"(?:^|\s)#")
COLUMNS = ("path", "given", "proposed", "decision")
"""Of DATA.RELABEL"""


class Row(NamedTuple):
    """A line of DATA.RELABEL."""

    line: int
    """Its number"""
    given: list[str]
    """Names of the given labels"""
    proposed: list[str]
    decision: str


class Remaining(Samples):
    """Samples that are not excluded, with new consecutive indices."""

    unmatched: Mapping[str, int] = {}
    """Names in DATA.RELABEL that no training image has -> their line numbers"""

    def __init__(self, samples: Samples, remaining: np.ndarray, lines: Sequence[int]) -> None:
        """`lines`: for each image that DATA.EXCLUDE leaves out, the number of its line."""
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
    """The samples without those that DATA.EXCLUDE lists."""
    lines = excluded(data)
    prefix = name_prefix(data)
    line_of_sample = [lines.get(below(samples.name(index), prefix), 0) for index in range(len(samples))]
    remaining = np.flatnonzero(np.array(line_of_sample) == 0)
    if not len(remaining):
        raise UserError(f"DATA.EXCLUDE {data.EXCLUDE} lists all {len(samples)} images of a split; none is left.")
    if len(remaining) == len(samples):
        return samples
    return Remaining(samples, remaining, list(filter(None, line_of_sample)))


def line_of(name: str, remark: str, data: DataConfig) -> str:
    """A line of the list."""
    return f"{path_in_list(name, data)}{REMARK}{redacted(' '.join(remark.split()))}"


def path_in_list(name: str, data: DataConfig) -> str:
    """The name of a sample, relative to DATA_PATH, so that the list stays valid when the data moves."""
    prefix = name_prefix(data)
    path = name.removeprefix(prefix)
    # A line that begins with a # is a comment, and from one that begins with DATA_PATH `below` takes it off.
    return f"./{path}" if path.startswith(("#", prefix or "#")) else path


def report_excluded(data: DataConfig, splits: Sequence[Samples | None]) -> None:
    """Log how many images of each split are left out, and warn of lines that match no image of any split.

    `splits`: training, validation, test, and others. None stands for one in memory, or that the data has not.
    """
    read_singly = [split for split in splits if split is not None]
    if not read_singly:
        log.warning("DATA.EXCLUDE has no effect on the data set %s: its images have no names.", data.DATASET)
        return
    lines = [split.lines if isinstance(split, Remaining) else () for split in splits]
    named = zip(("training", "validation", "test"), splits, lines, strict=False)
    left_out = [f"{len(of_split):,} {title}" for title, split, of_split in named if split is not None]
    log.info("DATA.EXCLUDE %s leaves out: %s images.", data.EXCLUDE, ", ".join(left_out))
    matched = set[int]().union(*lines)
    # Reversed, so that of the names that one line may mean, the shortest remains: the one without its comment.
    unmatched = {number: name for name, number in reversed(excluded(data).items()) if number not in matched}
    if unmatched:
        what = f"DATA.EXCLUDE {data.EXCLUDE}: {len(unmatched)} of its lines match no image"
        log.warning("%s%s", what, _named(unmatched, read_singly[0], data))


def _named(unmatched: Mapping[int, str], split: Samples, data: DataConfig) -> str:
    """End of a warning of these lines. `split` has an example of a name."""
    named = some_of([f"line {number}, {unmatched[number]}" for number in sorted(unmatched)], separator="; ")
    return f": {named}. A line is a path below DATA_PATH, as {path_in_list(split.name(0), data)}."


def text_of(data: DataConfig) -> str:
    """The text of DATA.EXCLUDE, empty without one; names in it need not be UTF-8."""
    if not data.EXCLUDE:
        return ""
    file = Path(data.EXCLUDE).expanduser()
    with open(file, encoding="utf-8-sig", errors="surrogateescape", opener=only_regular) as lines:
        return lines.read()


def excluded(data: DataConfig) -> dict[str, int]:
    """Names in the file of DATA.EXCLUDE -> their line numbers, from 1.

    A # may be part of a name, so a line can mean several names.
    """
    try:
        lines = text_of(data).split("\n")
        if any("\0" in line for line in lines):
            raise OSError("it is not a text file")
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"DATA.EXCLUDE: the file {data.EXCLUDE} {why}. It lists images to leave out, one per line; "
            f"{started_as('scripts/check_data.py')} -fix FILE writes such a file."
        ) from None
    file = Path(data.EXCLUDE or "").expanduser()
    prefix = name_prefix(data)
    line_of_name = dict[str, int]()
    for number, line in enumerate(lines, start=1):
        ends = [mark.start() for mark in MARK.finditer(line)]
        ends.append(len(line))
        for end in ends:
            text = line[:end].strip()
            if text and not text.startswith("#"):
                line_of_name[named_in(file, text, prefix)] = number
    return line_of_name


def named_in(table: Path, path: str, prefix: str) -> str:
    """A path in a list or table as `below`: relative to DATA_PATH, or to the table if only there is such an image."""
    named = below(path, prefix)
    beside = os.path.abspath(table.parent / path)
    inside = below(beside, prefix)
    if inside in (named, beside) or not os.path.isfile(beside) or os.path.isfile(f"{prefix}{named}"):
        return named
    return inside


def below(path: str, prefix: str) -> str:
    """A path in a list, or the name of a sample, without `name_prefix`."""
    return path.removeprefix(prefix).removeprefix(f"{os.path.abspath(prefix)}/").removeprefix("./")


def read_rows(data: DataConfig) -> tuple[dict[str, Row], str]:
    """The rows of DATA.RELABEL by the name of their image, without `name_prefix`, and the hash of the file."""
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
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        writer = started_as("scripts/check_labels.py")
        raise UserError(f"DATA.RELABEL: the file {file} {why}. {writer} writes such a file.") from None
    return rows, hashlib.sha256(content).hexdigest()


def relabelled(samples: Samples, data: DataConfig) -> Samples:
    """The training samples as DATA.RELABEL decides."""
    rows, sha256 = read_rows(data)
    prefix = name_prefix(data)
    labels = samples.labels.copy()
    unmatched = {name: row.line for name, row in rows.items()}
    done = Counter[str]()
    name_of = _names_of_labels(samples, data)
    label_of = {name: label for label, name in name_of.items()}
    remains = np.ones(len(labels), dtype=bool)
    others = dict[str, str]()  # of a name that a table has again, another label than that of its line
    for index in range(len(labels)):
        name = below(samples.name(index), prefix)
        if name not in rows:
            continue
        row = rows[name]
        own = np.flatnonzero(labels[index]).tolist() if data.MULTI_LABEL else [int(labels[index])]
        if {label_of.get(one) for one in row.given} != set(own):
            others[name] = "|".join(name_of.get(label, f"{label}") for label in own)
            continue
        unmatched.pop(name, None)
        wanted = _wanted(row, label_of, data)
        labels[index] = np.isin(np.arange(labels.shape[-1]), wanted) if data.MULTI_LABEL else wanted[0]
        if row.decision == "drop":
            remains[index] = False
            done["drop"] += 1
        else:
            done["keep" if set(wanted) == set(own) else "relabel"] += 1
    for name, label in others.items():
        if name in unmatched:
            given = "|".join(rows[name].given)
            raise UserError(
                f"{data.RELABEL}:{rows[name].line}: given is {given!r}, but {name} has the label {label!r}. The "
                "list was made for other labels: make it again, or correct the line."
            )
    if not remains.any():
        raise UserError(f"DATA.RELABEL {data.RELABEL} leaves out all {len(labels)} training images.")
    found = Remaining(samples, np.flatnonzero(remains), samples.lines if isinstance(samples, Remaining) else ())
    found.labels = labels[remains]
    found.unmatched = unmatched
    file = Path(str(data.RELABEL)).name  # exported weights have this too, so no folders
    found.relabel = {"file": file, "sha256": sha256, "dropped": done["drop"], "relabelled": done["relabel"]}
    _report_relabelled(samples, found, name_of, done, data)
    return found


def _wanted(row: Row, label_of: Mapping[str, int], data: DataConfig) -> list[int]:
    """The labels that a row gives to its image."""
    names = row.proposed if row.decision == "relabel" else row.given
    for name in names:
        if name not in label_of:
            closest = nearest(name, label_of) or f" Give a name as {next(iter(label_of))!r}."
            where = f"{data.RELABEL}:{row.line}"
            raise UserError(f"{where}: proposed is {name!r}, which is no class of the data.{closest}")
    return [label_of[name] for name in names]


def _names_of_labels(samples: Samples, data: DataConfig) -> dict[int, str]:
    labels = samples.labels
    largest = labels.shape[1] if data.MULTI_LABEL else int(labels.max(initial=-1)) + 1
    return dict(enumerate(distinct_names(samples.classes or range(largest))))


def _report_relabelled(
    samples: Samples, found: Samples, name_of: Mapping[int, str], done: Counter[str], data: DataConfig
) -> None:
    """Log how many images have other labels, and warn of classes that have lost all. `samples`: before."""
    words = f"{counted(done['drop'], 'training image')} left out, {done['relabel']} with another label"
    warn_once(f"DATA.RELABEL {data.RELABEL}: {words}, {done['keep']} as before.", logging.INFO)
    gone = sorted(_labels_in(samples, data) - _labels_in(found, data))
    if gone:
        first = name_of.get(gone[0], f"{gone[0]}")
        words = f"{counted(len(gone), 'class')}, such as {first}"
        warn_once(f"DATA.RELABEL {data.RELABEL} leaves no training image of {words}.")


def _labels_in(samples: Samples, data: DataConfig) -> set[int]:
    labels = np.nonzero(samples.labels)[1] if data.MULTI_LABEL else samples.labels
    return set(labels.tolist())


def warn_unmatched_rows(data: DataConfig, train: Samples, validation: Samples | None) -> None:
    """Warn of rows of DATA.RELABEL that match no training image."""
    unmatched = train.unmatched if isinstance(train, Remaining) else {}
    prefix = name_prefix(data)
    if not unmatched:
        return
    validating = {below(validation.name(index), prefix) for index in range(len(validation))} if validation else ()
    nowhere = {number: name for name, number in unmatched.items() if name not in validating}
    what = f"DATA.RELABEL {data.RELABEL}: {len(unmatched)} of its lines match no training image"
    which = f"validation images, whose labels stay as given: {len(unmatched) - len(nowhere)}; others: {len(nowhere)}"
    log.warning("%s (%s)%s", what, which, _named(nowhere, train, data) if nowhere else ".")
