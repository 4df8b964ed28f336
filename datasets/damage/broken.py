"""Unreadable images of a run: logging them, listing them, and stopping when there are too many."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from datasets.base import Broken
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksError, TrainingError
from utils.files import write_atomically
from utils.log import log
from utils.text import counted

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
            "(scripts/check_data.py finds all broken images), or raise DATA.MAX_BAD. Then resume from the last "
            "checkpoint with -resume; after excluding images, from one saved at the end of an epoch (-last_epoch)."
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
            "of DATA.EXCLUDE (scripts/check_data.py -out FILE writes it)."
        )
