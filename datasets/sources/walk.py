"""The images below a folder, by the endings of their names; other files are counted, and reported in one line."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from datasets.decoding.stored import ENDINGS
from utils.log import log

NAMED = 2
"""Files of each ending that are named"""
ENDINGS_NAMED = 8


class PassedOver:
    """What was passed over in one place, by ending."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, name: str, ending: str | None = None) -> None:
        """Count a file. `ending`: what it is counted as, where that is more than its last dot tells."""
        ending = ending or os.path.splitext(name)[1].lower() or "without an ending"
        self._counts[ending] = self._counts.get(ending, 0) + 1
        named = self._first.setdefault(ending, [])
        if len(named) < NAMED:
            named.append(name)

    def merge(self, other: PassedOver) -> None:
        """Add what was passed over elsewhere."""
        for ending, count in other._counts.items():
            self._counts[ending] = self._counts.get(ending, 0) + count
            named = self._first.setdefault(ending, [])
            named += other._first[ending][: NAMED - len(named)]

    def line(self) -> str:
        """'passed over 3 files: .heic 3 (photo.heic, ...)'; '' where there is nothing to tell."""
        if not self._counts:
            return ""
        count = sum(self._counts.values())
        endings = sorted(self._counts, key=lambda ending: (-self._counts[ending], ending))
        told = [self._of_ending(ending) for ending in endings[:ENDINGS_NAMED]]
        more = ["..."] if len(endings) > ENDINGS_NAMED else []
        return f"passed over {count:,} file{'s' if count > 1 else ''}: {', '.join(told + more)}"

    def _of_ending(self, ending: str) -> str:
        count, named = self._counts[ending], self._first[ending]
        return f"{ending} {count:,} ({', '.join([*named, '...'] if count > len(named) else named)})"

    def tell(self, where: str) -> None:
        """Log the line, once a process for each place."""
        if line := self.line():
            tell_once(f"{where}: {line}")


@functools.cache
def tell_once(text: str) -> None:
    """Warn, but only once in this process."""
    log.warning("%s", text)


Place = tuple[int, int]


def images_below(folder: str, passed: PassedOver | None = None, hidden: bool = False) -> Iterator[str]:
    """Paths relative to `folder`: its own images in the order of names, then those of each folder in it.

    Links to folders are followed, but for those that lead back to a folder above. `hidden`: look into folders whose
    name begins with a dot, too. What does not end as an image does is counted in `passed`.
    """
    return _images(folder, "", (), passed, hidden)


def _images(
    folder: str, inside: str, above: tuple[Place, ...], passed: PassedOver | None, hidden: bool
) -> Iterator[str]:
    try:
        found = os.stat(folder)
        place = found.st_dev, found.st_ino
        if place in above:
            return
        with os.scandir(folder) as entries:
            names = sorted((entry.name, _is_folder(entry)) for entry in entries)
    except OSError as error:
        log.warning("The folder %s cannot be read (%s); what is in it is passed over.", folder, error.strerror)
        return
    for name, is_folder in names:
        if is_folder or name.startswith("."):
            continue
        if name.lower().endswith(ENDINGS):
            yield f"{inside}{name}"
        elif passed is not None:
            passed.add(name)
    for name, is_folder in names:
        if is_folder and (hidden or not name.startswith(".")):
            yield from _images(f"{folder}/{name}", f"{inside}{name}/", (*above, place), passed, hidden)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link that leads nowhere, or in a circle, counts as a file: reading it says what is wrong."""
    try:
        return entry.is_dir()
    except OSError:
        return False
