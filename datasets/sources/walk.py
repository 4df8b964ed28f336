"""The images below a folder, by the endings of their names."""

from __future__ import annotations

import os
from collections.abc import Iterator

from datasets.decoding.stored import ENDINGS
from datasets.sources.passed_over import PassedOver
from utils.log import log

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
