"""DATA.EXCLUDE, a list of images to leave out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from datasets.base import Encoded, Samples
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log
from utils.program import started_as
from vitamp.files import read_regular_text

REMARK = "  # "
"""Between a name in the list and the reason, which is ignored."""
MARK = re.compile(r"(?:^|\s)#")
MOST_NAMED = 5


class Remaining(Samples):
    """Samples that are not excluded, with new consecutive indices."""

    def __init__(self, samples: Samples, remaining: np.ndarray, lines: set[int]) -> None:
        """`lines`: numbers of the lines that matched an image."""
        self.samples, self.lines = samples, lines
        self._old_index = remaining
        self._new_index = np.full(len(samples), -1, dtype=np.int64)
        self._new_index[remaining] = np.arange(len(remaining))
        self.labels, self.classes = samples.labels[remaining], samples.classes
        self.stored, self.remote = samples.stored, samples.remote
        self.groups = samples.groups and [samples.groups[index] for index in remaining]

    def read(self, index: int) -> Encoded:
        return self.samples.read(int(self._old_index[index]))

    def name(self, index: int) -> str:
        return self.samples.name(int(self._old_index[index]))

    def size(self, index: int) -> int:
        return self.samples.size(int(self._old_index[index]))

    def names(self) -> Iterator[bytes]:
        yield from self.samples.names()
        yield self._old_index.tobytes()

    def prefetch(self, indices: Sequence[int]) -> None:
        self.samples.prefetch([int(self._old_index[index]) for index in indices])

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        order = self._new_index[self.samples.shuffled(generator)]
        return order[order >= 0]


def without_excluded(samples: Samples, data: DataConfig) -> Samples:
    """The samples without those that DATA.EXCLUDE lists."""
    lines, prefix = excluded(data), name_prefix(data)
    line_of_sample = [lines.get(samples.name(index).removeprefix(prefix), 0) for index in range(len(samples))]
    remaining = np.flatnonzero(np.array(line_of_sample) == 0)
    if not len(remaining):
        raise UserError(f"DATA.EXCLUDE {data.EXCLUDE} lists all {len(samples)} images of a split; none is left.")
    return samples if len(remaining) == len(samples) else Remaining(samples, remaining, {*line_of_sample} - {0})


def line_of(name: str, remark: str, data: DataConfig) -> str:
    """A line of the list. Names are relative to DATA_PATH, so that the list stays valid when the data moves."""
    return f"{name.removeprefix(name_prefix(data))}{REMARK}{' '.join(remark.split())}"


def warn_unmatched(data: DataConfig, splits: Iterable[Samples | None]) -> None:
    """Warn of lines that match no image of any split. None stands for a split in memory."""
    read_singly = [split for split in splits if split is not None]
    if not read_singly:
        log.warning("DATA.EXCLUDE has no effect on the data set %s: its images have no names.", data.DATASET)
        return
    matched = set[int]().union(*(split.lines for split in read_singly if isinstance(split, Remaining)))
    # Reversed, so that of the names that one line may mean, the shortest remains: the one without its comment.
    unmatched = {number: name for name, number in reversed(excluded(data).items()) if number not in matched}
    if not unmatched:
        return
    lines = [f"line {number}, {unmatched[number]}" for number in sorted(unmatched)[:MOST_NAMED]]
    named = "; ".join([*lines, "..."] if len(unmatched) > MOST_NAMED else lines)
    what = f"DATA.EXCLUDE {data.EXCLUDE}: {len(unmatched)} of its lines match no image: {named}."
    one = read_singly[0].name(0).removeprefix(name_prefix(data))
    log.warning("%s A line is a path below DATA_PATH, as %s.", what, one)


def excluded(data: DataConfig) -> dict[str, int]:
    """Names in the file of DATA.EXCLUDE -> their line numbers, from 1.

    A # may be part of a name, so a line can mean several names.
    """
    file = Path(data.EXCLUDE or "").expanduser()
    try:
        lines = read_regular_text(file, "utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"DATA.EXCLUDE: the file {file} {why}. It lists images to leave out, one per line; "
            f"{started_as('scripts/check_data.py')} -fix FILE writes such a file."
        ) from None
    prefix, root = name_prefix(data), f"{os.path.abspath(name_prefix(data))}/"
    line_of_name: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        for end in [*(mark.start() for mark in MARK.finditer(line)), len(line)]:
            if (text := line[:end].strip()) and not text.startswith("#"):
                line_of_name[text.removeprefix(prefix).removeprefix(root).removeprefix("./")] = number
    return line_of_name


def name_prefix(data: DataConfig) -> str:
    """Common prefix of all sample names, from DATA_PATH."""
    if data.DATA_PATH is None:
        return ""
    if "://" in data.DATA_PATH:
        return f"{data.DATA_PATH.rstrip('/')}/"
    place = Path(data.DATA_PATH).expanduser()
    return f"{place.parent if place.is_file() else place}/"
