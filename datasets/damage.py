"""Images that cannot be read: retries, the list of them, and how many are allowed."""

import errno
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from datasets.base import NO_MEMORY, Broken, Unreadable
from utils.config.data import DataConfig
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksError, TrainingError
from utils.log import log
from utils.program import started_as
from utils.text import counted, some_of
from vitamp.files import NotRegular, read_regular, write_atomically

Value = TypeVar("Value")

PAUSES = (0.1, 1.0, 3.0)
"""Seconds between retries after a storage error; network file systems have temporary ones."""
FAILURES_OF_STORAGE = 8
"""Storage failures in a row that end training, elsewhere retries: so many are not a problem of single images."""
NOT_RETRIED = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, NotRegular)
LISTS = "broken.txt", "broken-2.txt"
MOST_NAMED_IN_TRAINING = 3
MOST_NAMED_IN_VALIDATION = 10


class Failure(NamedTuple):
    """Why an image cannot be read."""

    reason: str
    kind: Literal["missing", "storage", "damaged"]
    """storage: a storage error, after which the image may be intact."""


def failure_or(read: Callable[[], Value], storage_failures: int = 0) -> Failure | Value:
    """Call `read` until it succeeds or retries are used up; what it returns after success.

    `storage_failures`: so many images in a row failed before, and FAILURES_OF_STORAGE end the retries.
    """
    pauses = iter(PAUSES if storage_failures < FAILURES_OF_STORAGE else ())
    decoded_before = False
    while True:
        try:
            return read()
        except Unreadable as error:
            if decoded_before:
                return Failure(str(error), "damaged")
            decoded_before = True
        except OSError as error:
            text = error.strerror or str(error) or type(error).__name__
            text = " ".join(text.split())
            if error.errno == errno.ELOOP:
                return Failure("its symbolic links form a loop", "missing")
            if isinstance(error, NOT_RETRIED):
                return Failure("it does not exist" if isinstance(error, FileNotFoundError) else text, "missing")
            pause = next(pauses, None)
            if pause is None:
                return Failure(text, "storage")
            time.sleep(pause)
        except MemoryError:
            return Failure(NO_MEMORY, "damaged")


def allowed(max_bad: float, samples: int) -> int:
    """DATA.MAX_BAD as a number of images. Fractions are rounded up: one bad image of fifty is no reason to stop."""
    return math.ceil(round(max_bad * samples, 6)) if max_bad < 1 else int(max_bad)


class BrokenImages:
    """Unreadable training images of a run, on all ranks. Each is logged once, however often it is read."""

    def __init__(self, data: DataConfig, samples: int) -> None:
        self.limit = allowed(data.MAX_BAD, samples)
        self._list_read = Path(data.EXCLUDE or "").expanduser()
        self._lines_read = list[str]()
        if data.EXCLUDE:
            from datasets.exclude import text_of

            self._lines_read = text_of(data).splitlines()
        self.folder: Path | None = None
        """The run's, for the list of them"""
        self._broken: dict[int, Broken] = {}
        self._not_shared: list[Broken] = []
        self._unwritten = False
        """The list lacks images, because its disk did not take them."""

    def add(self, images: Iterable[Broken]) -> None:
        """Record and log images of this rank; TrainingError if there are too many."""
        self._not_shared += [broken for broken in images if self._record(broken)]
        if len(self._broken) > self.limit:
            self._write()
            raise TrainingError(self._too_many())

    def share(self, world: World) -> None:
        """Gather the new images of all ranks. A collective call at the end of an epoch."""
        new = all_gather(self._not_shared, world)
        self._not_shared = []
        for broken in new:
            self._record(broken)
        if (new or self._unwritten) and world.first:
            self._write()
        if len(self._broken) > self.limit:
            raise AllRanksError(self._too_many())

    def summary(self) -> str:
        """Sentence for the end of the log; '' if all images could be read."""
        count = len(self._broken)
        were = "was" if count == 1 else "were"
        text = f"{counted(count, 'training image')} could not be read and {were} replaced. "
        return f"{text}{self._file} lists them for DATA.EXCLUDE" if count else ""

    @property
    def _file(self) -> Path:
        """Not the list that the run reads: to be resumed within an epoch, it needs the same again."""
        first, second = ((self.folder or Path()) / name for name in LISTS)
        return second if first.resolve() == self._list_read.resolve() else first

    def _record(self, broken: Broken) -> bool:
        """Record and log an image; False if it was known."""
        if broken.sample in self._broken:
            return False
        self._broken[broken.sample] = broken
        replaced = " The next image replaces it." if len(self._broken) <= self.limit else ""
        count = f"({len(self._broken)} so far; DATA.MAX_BAD allows {self.limit}.)"
        log.warning("The training image %s cannot be read: %s.%s %s", broken.name, broken.reason, replaced, count)
        return True

    def _write(self) -> None:
        """Write the list: the lines of the one that the run reads, those of an earlier start, and new images."""
        if self.folder is None:
            return
        try:
            before = read_regular(self._file).decode("utf-8", "surrogateescape") if self._file.exists() else ""
            lines = self._lines_read + before.splitlines()
            lines += [one.line for one in self._broken.values()]
            from datasets.exclude import REMARK

            newest = {line.partition(REMARK)[0]: line for line in lines}
            write_atomically(self._file, "".join(f"{line}\n" for line in newest.values()))
        except OSError as error:
            if not self._unwritten:
                log.warning("%s cannot be written (%s); retried after each epoch.", self._file, error.strerror)
            self._unwritten = True
        else:
            self._unwritten = False

    def _too_many(self) -> str:
        last = list(self._broken.values())[-MOST_NAMED_IN_TRAINING:]
        tool = started_as("scripts/check_data.py")
        if self.folder is None:  # a dry run, which writes no list
            listed = f"list them in DATA.EXCLUDE ({tool} -fix FILE does)"
            then = "repeat the command."
        else:
            listed = f"exclude them with DATA.EXCLUDE={self._file}, which lists them ({tool} finds all)"
            then = "use -resume; after excluding images, from the end of an epoch (-last_epoch)."
        return (
            f"{counted(len(self._broken), 'training image')} cannot be read, and DATA.MAX_BAD allows {self.limit}. The "
            f"last: {_names(last)}. Repair them, {listed}, or raise DATA.MAX_BAD. Then (after storage errors, when the "
            f"storage is back) {then}"
        )


def _names(broken: list[Broken]) -> str:
    return some_of([f"{one.name} ({one.reason})" for one in broken], MOST_NAMED_IN_VALIDATION, "; ")


class BrokenInValidation:
    """Unreadable images of one validation. A single one is an error: every validation image counts once."""

    def __init__(self, what: str = "validation image") -> None:
        self.images: dict[int, Broken] = {}
        """By their index"""
        self._what = what

    def add(self, images: Iterable[Broken]) -> None:
        self.images |= {broken.sample: broken for broken in images}

    def raise_together(self, world: World) -> None:
        """At the end of a validation, raise the same error on all ranks if any of them could not read an image."""
        broken = all_gather(list(self.images.values()), world)
        self.images = {}
        if not broken:
            return
        raise AllRanksError(
            f"{counted(len(broken), self._what)} cannot be read: {_names(broken)}. Repair them, "
            f"or list them in DATA.EXCLUDE ({started_as('scripts/check_data.py')} -fix FILE does)."
            " After storage errors, when the storage is back, repeat the command, or resume a training with -resume."
        )
