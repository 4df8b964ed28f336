"""Training images that cannot be read: which they are, when they are too many, and the list of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from datasets.base import Broken
from datasets.damage.exclude import REMARK
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksError, TrainingError
from utils.files import write_atomically
from utils.log import log

LIST = "broken.txt"
LAST_NAMED, MOST_NAMED = 3, 10


def allowed(max_bad: float, samples: int) -> int:
    """DATA.MAX_BAD as a number of images. Shares are rounded up: one bad image among fifty is no reason to stop."""
    return math.ceil(max_bad * samples) if max_bad < 1 else int(max_bad)


class BrokenImages:
    """What the processes of a run have met so far. Each image is named once, however often it is met."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._found: dict[int, Broken] = {}
        self._mine: list[Broken] = []
        self._folder: Path | None = None

    def write_into(self, folder: Path) -> None:
        """Where the list of them is to lie."""
        self._folder = folder

    def met(self, found: Iterable[Broken]) -> None:
        """Name what is new; TrainingError when they are too many."""
        for broken in found:
            if self._add(broken):
                self._mine.append(broken)
        if len(self._found) > self.limit:
            self._write()
            raise TrainingError(self._too_many())

    def share(self, world: World) -> None:
        """Let every rank know what the others have met. All of them come here together, at the end of an epoch."""
        everyones, self._mine = all_gather(self._mine, world), []
        for broken in everyones:
            self._add(broken)
        if everyones and world.first:
            self._write()
        if len(self._found) > self.limit:
            raise AllRanksError(self._too_many())

    def summary(self) -> str:
        """What is to be said at the end; '' where all could be read."""
        if not self._found:
            return ""
        held_back = len(self._held_back())
        return (
            f"{_images(len(self._found))} could not be read and {'were' if len(self._found) > 1 else 'was'} replaced "
            f"by {'their neighbours' if len(self._found) > 1 else 'its neighbour'}; listed for DATA.EXCLUDE in "
            f"{self._file()}" + (f", but for {held_back} that the storage did not give" if held_back else "")
        )

    def _held_back(self) -> list[Broken]:
        return [broken for broken in self._found.values() if broken.storage]

    def _add(self, broken: Broken) -> bool:
        before = self._found.get(broken.sample)
        if before and (broken.storage or not before.storage):
            return False
        self._found[broken.sample] = broken
        log.warning(
            "The training image %s cannot be read: %s.%s (%d so far; DATA.MAX_BAD allows %d.)",
            broken.name,
            broken.reason,
            " Its neighbour takes its place." if len(self._found) <= self.limit else "",
            len(self._found),
            self.limit,
        )
        return True

    def _write(self) -> None:
        """Add what is new to the list, which an earlier start of the same run may have begun."""
        if self._folder is None:
            return
        file = self._file()
        before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        known = {line.partition(REMARK)[0] for line in before}
        new = [one.line for one in self._found.values() if one.line.partition(REMARK)[0] not in known]
        write_atomically(file, "".join(f"{line}\n" for line in [*before, *new]))

    def _file(self) -> Path:
        return (self._folder or Path()) / LIST

    def _too_many(self) -> str:
        held_back = self._held_back()
        damaged = [broken for broken in self._found.values() if not broken.storage]
        if len(damaged) <= self.limit:
            return (
                f"{_images(len(self._found))} could not be read, and DATA.MAX_BAD allows {self.limit}. The storage "
                f"did not give {len(held_back)} of them, the last: {_last(held_back)}. That is no fault of the files: "
                "when the storage is back, go on from the last checkpoint by -resume."
            )
        return (
            f"{_images(len(damaged))} cannot be read, and DATA.MAX_BAD allows {self.limit}. The last: "
            f"{_last(damaged)}. Repair them, or leave them out by DATA.EXCLUDE={self._file()}, which lists them "
            "(scripts/check_data.py finds all there are), or raise DATA.MAX_BAD. Then go on from the last checkpoint "
            "by -resume."
        )


def _last(broken: list[Broken]) -> str:
    return _named(broken[-LAST_NAMED:])


def _named(broken: list[Broken]) -> str:
    return "; ".join(f"{one.name} ({one.reason})" for one in broken)


def _images(count: int) -> str:
    return f"{count} training image{'s' if count != 1 else ''}"


class BrokenInValidation:
    """What the processes of a run have met in one validation. None may be: every image counts once."""

    def __init__(self) -> None:
        self._found: list[Broken] = []

    def met(self, found: Iterable[Broken]) -> None:
        self._found += found

    def raise_together(self, world: World) -> None:
        """At the end of a validation, on all ranks alike: an error that names what any of them could not read."""
        everyones, self._found = all_gather(self._found, world), []
        if not everyones:
            return
        text = f"Of the validation images, {len(everyones)} cannot be read: {_named(everyones[:MOST_NAMED])}"
        text += "; ..." if len(everyones) > MOST_NAMED else ""
        if all(broken.storage for broken in everyones):
            raise AllRanksError(f"{text}. That is no fault of the files: go on by -resume when the storage is back.")
        raise AllRanksError(
            f"{text}. Every validation image counts once, so none is replaced. Repair them, or name them in the file "
            "of DATA.EXCLUDE (scripts/check_data.py -out FILE writes one)."
        )
