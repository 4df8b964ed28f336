"""Handle images that cannot be read: retry, list them, and stop if there are more than DATA.MAX_BAD allows."""

import errno
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from datasets.base import NO_MEMORY, Broken, Unreadable, name_prefix
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
"""Storage failures in a row that end training, or in validation the retries: so many do not come from single images."""
NOT_RETRIED = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, NotRegular)
WHEN_BACK = "When the storage is back, resume with -resume; if nothing is saved yet, start again."
LISTS = "broken.txt", "broken-2.txt"
MOST_NAMED_IN_TRAINING = 3
MOST_NAMED_IN_VALIDATION = 10


class Failure(NamedTuple):
    """The reason why an image cannot be read."""

    reason: str
    kind: Literal["missing", "storage", "damaged"]
    """storage: reading failed, but the image may be intact"""


def failure_or(read: Callable[[], Value], storage_failures: int = 0) -> Failure | Value:
    """Call `read` and return its result, or the failure. Errors that may pass are retried.

    `storage_failures`: number of images in a row before this one that the storage did not return. After
    FAILURES_OF_STORAGE of them, storage errors are not retried.
    """
    retries_storage = storage_failures < FAILURES_OF_STORAGE
    pauses = iter(PAUSES if retries_storage else ())
    decoded_before = False
    while True:
        try:
            return read()
        except Unreadable as error:
            # Read damaged data once more: the storage may have returned wrong bytes.
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


def is_gone(data: DataConfig) -> bool:
    """Tell whether the folder DATA_PATH is missing or empty: it was removed, or its file system is unmounted."""
    folder = name_prefix(data)
    if not folder or "://" in folder:
        return False
    try:
        with os.scandir(folder) as entries:
            return not any(entries)
    except OSError:
        return True


def allowed(max_bad: float, samples: int) -> int:
    """Return DATA.MAX_BAD as a number of images. Fractions are rounded up, so that one bad image in 50 is allowed."""
    return math.ceil(round(max_bad * samples, 6)) if max_bad < 1 else int(max_bad)


class BrokenImages:
    """The unreadable training images of a run, on all ranks. Each is logged once, however often it is read."""

    def __init__(self, data: DataConfig, samples: int) -> None:
        """Read the list DATA.EXCLUDE, to which this run adds. `samples`: number of training samples."""
        self._data = data
        self.limit = allowed(data.MAX_BAD, samples)
        """Most images that may be unreadable"""
        # The file DATA.EXCLUDE and its lines, as the run found them when it began.
        self._list_of_settings = Path(data.EXCLUDE or "").expanduser()
        self._lines_of_settings = list[str]()
        if data.EXCLUDE:
            from datasets.exclude import text_of

            self._lines_of_settings = text_of(data).splitlines()
        self.folder: Path | None = None
        """The run's folder, in which the list is written; None in a dry run, which writes none"""
        self._broken: dict[int, Broken] = {}
        """All images of this run, by their index"""
        self._not_shared: list[Broken] = []
        """Images of this rank that other ranks do not know yet"""
        self._list_is_incomplete = False
        """Whether the list in the run's folder lacks images because it could not be written"""

    def add(self, images: list[Broken]) -> None:
        """Record and log images that this rank could not read; TrainingError if there are too many.

        If all of the data is gone, none is recorded: the images may be intact.
        """
        if images and is_gone(self._data):
            raise TrainingError(f"The data is gone: {self._data.DATA_PATH} is missing or empty. {WHEN_BACK}")
        self._not_shared += [broken for broken in images if self._record(broken)]
        if len(self._broken) > self.limit:
            self._write()
            raise TrainingError(self._too_many_message())

    def share(self, world: World) -> None:
        """Gather the new images of all ranks, and write the list. A collective call at the end of an epoch.

        Also writes the list if the last attempt failed. Raises AllRanksError if there are too many images.
        """
        new_images = all_gather(self._not_shared, world)
        self._not_shared = []
        for broken in new_images:
            self._record(broken)
        if (new_images or self._list_is_incomplete) and world.first:
            self._write()
        if len(self._broken) > self.limit:
            raise AllRanksError(self._too_many_message())

    def summary(self) -> str:
        """Describe the images for the end of the log; '' if all could be read."""
        count = len(self._broken)
        if count == 0:
            return ""
        verb = "was" if count == 1 else "were"
        text = f"{counted(count, 'training image')} could not be read and {verb} replaced. "
        return f"{text}{self._file} lists them for DATA.EXCLUDE"

    @property
    def _file(self) -> Path:
        """The list to write.

        It is not the list that the run reads: to be resumed within an epoch, the run needs that one unchanged.
        """
        first, second = ((self.folder or Path()) / name for name in LISTS)
        return second if first.resolve() == self._list_of_settings.resolve() else first

    def _record(self, broken: Broken) -> bool:
        """Record and log an image; False if it was recorded before."""
        if broken.sample in self._broken:
            return False
        self._broken[broken.sample] = broken
        replaced = " The next image replaces it." if len(self._broken) <= self.limit else ""
        count = f"({len(self._broken)} so far; DATA.MAX_BAD allows {self.limit}.)"
        log.warning("The training image %s cannot be read: %s.%s %s", broken.name, broken.reason, replaced, count)
        return True

    def _write(self) -> None:
        """Write the list: the lines of DATA.EXCLUDE, the lines of an earlier start of this run, and the new images.

        If the disk fails, a warning is logged once.
        """
        if self.folder is None:
            return
        try:
            earlier_text = ""
            if self._file.exists():
                earlier_text = read_regular(self._file).decode("utf-8", "surrogateescape")
            lines = self._lines_of_settings + earlier_text.splitlines()
            lines += [broken.line for broken in self._broken.values()]
            from datasets.exclude import REMARK

            # Of several lines for one image, the last one is kept.
            line_of_name = {line.partition(REMARK)[0]: line for line in lines}
            write_atomically(self._file, "".join(f"{line}\n" for line in line_of_name.values()))
        except OSError as error:
            if not self._list_is_incomplete:
                log.warning("%s cannot be written (%s); retried after each epoch.", self._file, error.strerror)
            self._list_is_incomplete = True
        else:
            self._list_is_incomplete = False

    def _too_many_message(self) -> str:
        """Return the error that more images are broken than DATA.MAX_BAD allows, with advice for what comes next."""
        last_images = list(self._broken.values())[-MOST_NAMED_IN_TRAINING:]
        tool = started_as("scripts/check_data.py")
        if self.folder is None:  # a dry run, which writes no list
            how_to_exclude = f"list them in DATA.EXCLUDE ({tool} -fix FILE does)"
            next_step = "repeat the command."
        else:
            how_to_exclude = f"exclude them with DATA.EXCLUDE={self._file}, which lists them ({tool} finds all)"
            next_step = (
                "use -resume; after excluding images, from the end of an epoch (-last_epoch). If nothing is saved yet, "
                "start again."
            )
        return (
            f"{counted(len(self._broken), 'training image')} cannot be read, and DATA.MAX_BAD allows {self.limit}. The "
            f"last: {_names(last_images)}. Repair them, {how_to_exclude}, or raise DATA.MAX_BAD. Then (after storage "
            f"errors, when the storage is back) {next_step}"
        )


def _names(images: list[Broken]) -> str:
    """List the names of broken images with the reasons, for an error."""
    return some_of([f"{broken.name} ({broken.reason})" for broken in images], MOST_NAMED_IN_VALIDATION, "; ")


class BrokenInValidation:
    """The unreadable images of one validation. A single one is an error: every validation image counts once."""

    def __init__(self, title: str = "validation image") -> None:
        """`title`: what an image is called in the error."""
        self.images: dict[int, Broken] = {}
        """The images by their index"""
        self._title = title

    def add(self, images: Iterable[Broken]) -> None:
        self.images |= {broken.sample: broken for broken in images}

    def raise_together(self, world: World) -> None:
        """Raise the same error on all ranks if any of them could not read an image. A collective call at the end."""
        broken = all_gather(list(self.images.values()), world)
        self.images = {}
        if not broken:
            return
        raise AllRanksError(
            f"{counted(len(broken), self._title)} cannot be read: {_names(broken)}. Repair them, "
            f"or list them in DATA.EXCLUDE ({started_as('scripts/check_data.py')} -fix FILE does)."
            " After storage errors, when the storage is back, repeat the command, or resume a training with -resume."
        )
