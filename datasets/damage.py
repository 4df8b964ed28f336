"""Images that cannot be read: retries, lists of them, limits; and DATA.EXCLUDE, a list of images to leave out."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from datasets.base import Broken, Encoded, Samples, Unreadable
from utils.config.data import DataConfig
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksError, TrainingError, UserError, nearest
from utils.log import log
from utils.program import started_as
from utils.text import counted
from vitamp.files import NotRegular, read_regular_text, write_atomically

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between retries after a storage error; network file systems have temporary ones."""
NOT_RETRIED = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    kind: Literal["missing", "not a file", "storage", "damaged"]
    """not a file: a pipe, a socket or a device. storage: a storage error, after which the image may be intact."""


def failure_of(read: Callable[[], None]) -> Failure | None:
    """Call `read` until it succeeds or retries are used up; None after success.

    Raises TrainingError if memory runs out, which is not the image's fault.
    """
    pauses, decoded_before = iter(PAUSES), False
    while True:
        try:
            return read()
        except NOT_RETRIED as error:
            return Failure("it does not exist" if isinstance(error, FileNotFoundError) else _text(error), "missing")
        except NotRegular as error:
            return Failure(_text(error), "not a file")
        except Unreadable as error:
            if decoded_before:
                return Failure(str(error), "damaged")
            decoded_before = True
        except OSError as error:
            if error.errno == errno.ELOOP:
                return Failure("its symbolic links form a loop", "missing")
            pause = next(pauses, None)
            if pause is None:
                return Failure(_text(error), "storage")
            time.sleep(pause)
        except MemoryError:
            raise TrainingError(
                "Memory ran out while an image was read; the image is not to blame. Use fewer loading processes "
                "(DATA.NUM_WORKERS, -num_workers), a smaller batch (DATA.BATCH_SIZE, -batch_size), or more memory. "
                "Then repeat the command, or resume a training run from its last checkpoint with -resume."
            ) from None


def _text(error: OSError) -> str:
    return " ".join((error.strerror or str(error) or type(error).__name__).split())


LIST = "broken.txt"
REMARK = "  # "
"""Between a name in the list and the reason, which DATA.EXCLUDE ignores."""
MOST_NAMED_IN_TRAINING, MOST_NAMED_IN_VALIDATION = 3, 10


def allowed(max_bad: float, samples: int) -> int:
    """DATA.MAX_BAD as a number of images. Fractions are rounded up: one bad image of fifty is no reason to stop."""
    return math.ceil(max_bad * samples) if max_bad < 1 else int(max_bad)


class BrokenImages:
    """Unreadable training images of a run, on all ranks. Each is logged once, however often it is read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._broken: dict[int, Broken] = {}
        self._not_shared: list[Broken] = []
        self._folder: Path | None = None

    def write_into(self, folder: Path) -> None:
        """Set the folder for the list of broken images."""
        self._folder = folder

    def add(self, images: Iterable[Broken]) -> None:
        """Record and log images of this rank; TrainingError if there are too many."""
        for broken in images:
            if self._record(broken):
                self._not_shared.append(broken)
        if len(self._broken) > self.limit:
            self._write()
            raise TrainingError(self._too_many())

    def share(self, world: World) -> None:
        """Gather the new images of all ranks. A collective call at the end of an epoch."""
        new, self._not_shared = all_gather(self._not_shared, world), []
        for broken in new:
            self._record(broken)
        if new and world.first:
            self._write()
        if len(self._broken) > self.limit:
            raise AllRanksError(self._too_many())

    def summary(self) -> str:
        """Sentence for the end of the log; '' if all images could be read."""
        count, storage = len(self._broken), len(self._storage_failures())
        if not count:
            return ""
        text = f"{_images(count)} could not be read and {'was' if count == 1 else 'were'} replaced. {self._file()} "
        text += "lists them for DATA.EXCLUDE"
        return text + (f", except for {storage} with storage errors" if storage else "")

    def _storage_failures(self) -> list[Broken]:
        return [broken for broken in self._broken.values() if broken.storage]

    def _record(self, broken: Broken) -> bool:
        """Record and log an image; False if it was known. Damage replaces an earlier storage error of the image."""
        before = self._broken.get(broken.sample)
        if before and (broken.storage or not before.storage):
            return False
        self._broken[broken.sample] = broken
        log.warning(
            "The training image %s cannot be read: %s.%s (%d so far; DATA.MAX_BAD allows %d.)",
            broken.name,
            broken.reason,
            " The next image replaces it." if len(self._broken) <= self.limit else "",
            len(self._broken),
            self.limit,
        )
        return True

    def _write(self) -> None:
        """Append new images to the list, which may have lines of an earlier start of this run."""
        if self._folder is None:
            return
        file = self._file()
        before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        known = {line.partition(REMARK)[0] for line in before}
        new = [one.line for one in self._broken.values() if one.line.partition(REMARK)[0] not in known]
        write_atomically(file, "".join(f"{line}\n" for line in [*before, *new]))

    def _file(self) -> Path:
        return (self._folder or Path()) / LIST

    def _too_many(self) -> str:
        storage = self._storage_failures()
        damaged = [broken for broken in self._broken.values() if not broken.storage]
        if len(damaged) <= self.limit:
            return (
                f"{_images(len(self._broken))} could not be read, and DATA.MAX_BAD allows {self.limit}. {len(storage)} "
                f"of them failed with storage errors, the last: {_last(storage)}. The files may be intact: when the "
                "storage is back, resume from the last checkpoint with -resume."
            )
        return (
            f"{_images(len(damaged))} cannot be read, and DATA.MAX_BAD allows {self.limit}. The last: "
            f"{_last(damaged)}. Repair them, exclude them with DATA.EXCLUDE={self._file()}, which lists them "
            f"({started_as('scripts/check_data.py')} finds all broken images), or raise DATA.MAX_BAD. Then resume from "
            "the last checkpoint with -resume; after excluding images, from one saved at the end of an epoch "
            "(-last_epoch)."
        )


def _last(broken: list[Broken]) -> str:
    return _names(broken[-MOST_NAMED_IN_TRAINING:])


def _names(broken: list[Broken]) -> str:
    return "; ".join(f"{one.name} ({one.reason})" for one in broken)


def _images(count: int) -> str:
    return counted(count, "training image")


class BrokenInValidation:
    """Unreadable images of one validation. A single one is an error: every validation image counts once."""

    def __init__(self) -> None:
        self._broken: list[Broken] = []

    def add(self, images: Iterable[Broken]) -> None:
        self._broken += images

    def raise_together(self, world: World) -> None:
        """At the end of a validation, raise the same error on all ranks if any of them could not read an image."""
        broken, self._broken = all_gather(self._broken, world), []
        if not broken:
            return
        count = len(broken)
        text = f"{counted(count, 'validation image')} cannot be read: "
        text += _names(broken[:MOST_NAMED_IN_VALIDATION]) + ("; ..." if count > MOST_NAMED_IN_VALIDATION else "")
        if all(one.storage for one in broken):
            raise AllRanksError(
                f"{text}. These are storage errors, and the files may be intact: when the storage is back, repeat the "
                "command, or resume a training run with -resume."
            )
        raise AllRanksError(
            f"{text}. Every validation image counts once, so none is replaced. Repair them, or list them in the file "
            f"of DATA.EXCLUDE ({started_as('scripts/check_data.py')} -fix FILE writes it)."
        )


MARK = re.compile(r"(?:^|\s)#")
MOST_NAMED, MOST_COMPARED = 5, 2000


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
    if data.EXCLUDE is None:
        return samples
    excluded, prefix = _read(data), name_prefix(data)
    line_of_sample = [excluded.get(samples.name(index).removeprefix(prefix), 0) for index in range(len(samples))]
    remaining = np.flatnonzero(np.array(line_of_sample) == 0)
    if not len(remaining):
        raise UserError(f"DATA.EXCLUDE {data.EXCLUDE} lists all {len(samples)} images of a split; none is left.")
    return samples if len(remaining) == len(samples) else Remaining(samples, remaining, {*line_of_sample} - {0})


def check_exclude(data: DataConfig) -> None:
    """Raise UserError if the file of DATA.EXCLUDE cannot be read."""
    if data.EXCLUDE is not None:
        _read(data)


def line_of(name: str, remark: str, data: DataConfig) -> str:
    """A line of the list. Names are relative to DATA_PATH, so that the list stays valid when the data moves."""
    return f"{name.removeprefix(name_prefix(data))}{REMARK}{' '.join(remark.split())}"


def warn_unmatched(data: DataConfig, splits: Iterable[Samples | None]) -> None:
    """Warn of lines that match no image of any split. None stands for a split in memory."""
    if data.EXCLUDE is None:
        return
    read_singly = [split for split in splits if split is not None]
    if not read_singly:
        log.warning("DATA.EXCLUDE has no effect on the data set %s: its images have no names.", data.DATASET)
        return
    matched = set[int]().union(*(split.lines for split in read_singly if isinstance(split, Remaining)))
    # Reversed, so that of the names that one line may mean, the shortest remains: the one without its comment.
    unmatched = {number: name for name, number in reversed(_read(data).items()) if number not in matched}
    if not unmatched:
        return
    numbers = sorted(unmatched)
    log.warning(
        "DATA.EXCLUDE %s: %d of its lines match no image: %s%s.%s",
        data.EXCLUDE,
        len(unmatched),
        "; ".join(f"line {number}, {unmatched[number]}" for number in numbers[:MOST_NAMED]),
        "; ..." if len(unmatched) > MOST_NAMED else "",
        _closest(unmatched[numbers[0]], read_singly, name_prefix(data)),
    )


def _read(data: DataConfig) -> dict[str, int]:
    """Names in the file -> their line numbers, from 1. A # may be part of a name, so a line can mean several names."""
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


def _closest(name: str, splits: Sequence[Samples], prefix: str) -> str:
    """' Did you mean X?', from images of the same file name and images in the same folder; '' if none is close."""
    folder, base = os.path.split(name)
    candidates: list[str] = []
    for split in splits:
        for index in range(len(split)):
            other = split.name(index).removeprefix(prefix)
            if other.endswith(base) or other.startswith(f"{folder}/"):
                candidates.append(other)
    return nearest(name, candidates[:MOST_COMPARED])
