"""Finding the images below a folder by their file extensions. Other files are counted and reported in one line."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from datasets.decoding.stored import ENDINGS
from utils.log import log, warn_once

MOST_NAMES, MOST_KINDS = 2, 8
"""Files named of each kind, and kinds named, in one line"""
HIDDEN, HIDDEN_FOLDER = "hidden files", "hidden folders"
"""Kinds under which files and folders whose name begins with a dot are counted as skipped"""


class SkippedFiles:
    """Files that were skipped in one place, counted by kind, mostly their extension; and links that were found."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}
        self.links = 0
        """Symbolic links among all files and folders"""

    def add(self, name: str, kind: str | None = None) -> None:
        """Count a file. `kind`: what to count it as, if not its extension."""
        kind = kind or os.path.splitext(name)[1].lower() or "no extension"
        self._counts[kind] += 1
        names = self._names.setdefault(kind, [])
        if len(names) < MOST_NAMES:
            names.append(name)

    def merge(self, other: SkippedFiles) -> None:
        """Add the files that were skipped in another place."""
        self._counts += other._counts
        for kind, added in other._names.items():
            names = self._names.setdefault(kind, [])
            names += added[: MOST_NAMES - len(names)]

    def line(self) -> str:
        """'skipped 3 files: .heic 3 (photo.heic, ...)'; '' for none."""
        if not self._counts:
            return ""
        count = self._counts.total()
        kinds = sorted(self._counts, key=lambda kind: (-self._counts[kind], kind))
        parts = [self._of_kind(kind) for kind in kinds[:MOST_KINDS]] + ["..."] * (len(kinds) > MOST_KINDS)
        end = "s" * (count > 1)
        nouns = [f"file{end}"] * (count > self._counts[HIDDEN_FOLDER]) + [f"folder{end}"] * (HIDDEN_FOLDER in kinds)
        return f"skipped {count:,} {' and '.join(nouns)}: {', '.join(parts)}"

    def _of_kind(self, kind: str) -> str:
        count, names = self._counts[kind], self._names[kind]
        return f"{kind} {count:,} ({', '.join([*names, '...'] if count > len(names) else names)})"

    def warn(self, where: str) -> None:
        """Log the line, once per process and place."""
        if line := self.line():
            warn_once(f"{where}: {line}")


FileId = tuple[int, int]
"""Device and inode"""


def images_below(folder: str, skipped: SkippedFiles | None = None, hidden: bool = False) -> Iterator[str]:
    """Paths relative to `folder`: its own images in the order of names, then those of each subfolder.

    Links to folders are followed, unless they lead back to a folder above. `hidden`: also search folders whose name
    begins with a dot, as earlier versions did. What is not read is counted in `skipped`.
    """
    return _images(folder, "", (), skipped, hidden)


def _images(
    folder: str, inside: str, above: tuple[FileId, ...], skipped: SkippedFiles | None, hidden: bool
) -> Iterator[str]:
    try:
        stat = os.stat(folder)
        own_id = stat.st_dev, stat.st_ino
        if own_id in above:
            return
        with os.scandir(folder) as entries:
            found = [(entry.name, _is_folder(entry), entry.is_symlink()) for entry in entries]
    except FileNotFoundError:  # a split may lack the folder of a class, which is then reported as empty
        return
    except OSError as error:
        log.warning("Skipping the folder %s, which cannot be read: %s.", folder, error.strerror)
        return
    skipped = SkippedFiles() if skipped is None else skipped
    names = sorted((name, is_folder) for name, is_folder, _ in found)
    skipped.links += sum(is_link for *_, is_link in found)
    for name, is_folder in names:
        if name.startswith(".") and not (is_folder and hidden):
            skipped.add(name, HIDDEN_FOLDER if is_folder else HIDDEN)
        elif not is_folder and name.lower().endswith(ENDINGS):
            yield f"{inside}{name}"
        elif not is_folder:
            skipped.add(name)
    for name, is_folder in names:
        if is_folder and (hidden or not name.startswith(".")):
            yield from _images(f"{folder}/{name}", f"{inside}{name}/", (*above, own_id), skipped, hidden)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder. A broken or circular link counts as a file: reading it gives a clear error."""
    try:
        return entry.is_dir()
    except OSError:
        return False
