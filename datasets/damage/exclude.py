"""DATA.EXCLUDE: a file that names images to leave out, one a line; what follows a # is a remark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from datasets.base import Encoded, Samples
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.files import read_regular_text
from utils.log import log

REMARK = "  # "
MARK = re.compile(r"(?:^|\s)#")
TOLD, COMPARED = 5, 2000


class Remaining(Samples):
    """Those of `samples` that are not left out, numbered anew."""

    def __init__(self, samples: Samples, kept: np.ndarray, lines: set[int]) -> None:
        """`lines`: those of the file that named something here."""
        self.samples, self.lines = samples, lines
        self._kept = kept
        self._place = np.full(len(samples), -1, dtype=np.int64)
        self._place[kept] = np.arange(len(kept))
        self.labels, self.classes = samples.labels[kept], samples.classes
        self.stored, self.remote = samples.stored, samples.remote

    def read(self, index: int) -> Encoded:
        return self.samples.read(int(self._kept[index]))

    def name(self, index: int) -> str:
        return self.samples.name(int(self._kept[index]))

    def expect(self, indices: Sequence[int]) -> None:
        self.samples.expect([int(self._kept[index]) for index in indices])

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        places = self._place[self.samples.shuffled(generator)]
        return places[places >= 0]


def without_excluded(samples: Samples, data: DataConfig) -> Samples:
    """`samples`, or those of them that DATA.EXCLUDE does not name."""
    if data.EXCLUDE is None:
        return samples
    excluded, prefix = _read(data), name_prefix(data)
    named_by = [excluded.get(samples.name(index).removeprefix(prefix), 0) for index in range(len(samples))]
    kept = np.flatnonzero(np.array(named_by) == 0)
    if not len(kept):
        raise UserError(f"DATA.EXCLUDE {data.EXCLUDE}: it names all {len(samples)} images of a part; none is left.")
    return samples if len(kept) == len(samples) else Remaining(samples, kept, {*named_by} - {0})


def check_exclude(data: DataConfig) -> None:
    """The file is there and can be read."""
    if data.EXCLUDE is not None:
        _read(data)


def line_of(name: str, remark: str, data: DataConfig) -> str:
    """One line of a list. The name is that below DATA_PATH, so that the list stays true where the data moves to."""
    return f"{name.removeprefix(name_prefix(data))}{REMARK}{' '.join(remark.split())}"


def tell_unmatched(data: DataConfig, parts: Iterable[Samples | None]) -> None:
    """Warn of lines that name no image of any part. None stands for a part without single images."""
    if data.EXCLUDE is None:
        return
    read = [part for part in parts if part is not None]
    if not read:
        log.warning("DATA.EXCLUDE has no effect on the data set %s: its images have no names.", data.DATASET)
        return
    matched = set[int]().union(*(part.lines for part in read if isinstance(part, Remaining)))
    # Of what one line may name, the shortest: without its remark.
    unmatched = {number: name for name, number in reversed(_read(data).items()) if number not in matched}
    if not unmatched:
        return
    told = [f"line {number}, {unmatched[number]}" for number in sorted(unmatched)[:TOLD]]
    closest = _closest(next(iter(sorted(unmatched.items())))[1], read, name_prefix(data))
    log.warning(
        "DATA.EXCLUDE %s: %d of its lines name no image: %s%s.%s",
        data.EXCLUDE,
        len(unmatched),
        "; ".join(told),
        "; ..." if len(unmatched) > TOLD else "",
        closest,
    )


def _read(data: DataConfig) -> dict[str, int]:
    """What the file names -> the number of the line, from 1. A # in a line may also be part of the name."""
    file = Path(data.EXCLUDE or "").expanduser()
    try:
        lines = read_regular_text(file, "utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"DATA.EXCLUDE: the file {file} {why}. It names images to leave out, one a line, as scripts/check_data.py "
            "-out FILE writes them."
        ) from None
    prefix, root = name_prefix(data), f"{os.path.abspath(name_prefix(data))}/"
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        for end in [*(mark.start() for mark in MARK.finditer(line)), len(line)]:
            if (text := line[:end].strip()) and not text.startswith("#"):
                found[text.removeprefix(prefix).removeprefix(root).removeprefix("./")] = number
    return found


def name_prefix(data: DataConfig) -> str:
    """What the names of all samples begin with, as far as DATA_PATH says."""
    if data.DATA_PATH is None:
        return ""
    if "://" in data.DATA_PATH:
        return f"{data.DATA_PATH.rstrip('/')}/"
    place = Path(data.DATA_PATH).expanduser()
    return f"{place.parent if place.is_file() else place}/"


def _closest(name: str, parts: Sequence[Samples], prefix: str) -> str:
    """A hint at what `name` may have meant, among images of the same name elsewhere and those of the same folder."""
    folder, base = os.path.split(name)
    alike: list[str] = []
    for part in parts:
        for index in range(len(part)):
            other = part.name(index).removeprefix(prefix)
            if other.endswith(base) or other.startswith(f"{folder}/"):
                alike.append(other)
    return nearest(name, alike[:COMPARED])
