"""Images in files of their own, and list files that name them, one per line: `relative/path.JPEG label`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.base import Part, Samples
from datasets.labels import check_label, log_unused_outputs, warn_empty_classes
from datasets.sources.split import split_rows
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import kind_of_path, only_regular, read_regular


class PathTable:
    """Paths in one block of bytes: a million strings would be copied into every worker as soon as it reads them."""

    def __init__(self, paths: Iterable[str]) -> None:
        block, ends = bytearray(), array("q", [0])
        for path in paths:
            block += os.fsencode(path)
            ends.append(len(block))
        self._block, self._ends = bytes(block), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        begin, end = self._ends[index : index + 2]
        return os.fsdecode(self._block[begin:end])

    def blocks(self) -> Iterator[bytes]:
        """All paths and where each one ends, as bytes."""
        yield self._block
        yield self._ends.tobytes()


class FileSamples(Samples):
    """Image files below one folder."""

    def __init__(
        self, root: Path, paths: PathTable, labels: np.ndarray, classes: list[str] | None, links: int = 0
    ) -> None:
        self.root, self.paths, self.labels, self.classes, self.links = root, paths, labels, classes, links

    def read(self, index: int) -> bytes:
        return read_regular(self.name(index))

    def name(self, index: int) -> str:
        return f"{self.root}/{self.paths[index]}"

    def names(self) -> Iterator[bytes]:
        yield from self.paths.blocks()


class FileList(NamedTuple):
    """Labelled image files of a split, or of a data set that is to be split."""

    root: Path
    paths: list[str]
    """Relative to `root`"""
    labels: np.ndarray
    classes: list[str] | range
    """Names of the classes, or their numbers if they have no names"""
    links: int = 0
    """See `Samples.links`."""
    groups: list[str] | None = None
    """Of the images, if a column names them (DATA.GROUP); None: a pattern finds them in the paths"""

    def samples(self) -> FileSamples:
        names = self.classes if isinstance(self.classes, list) else None
        return FileSamples(self.root, PathTable(self.paths), self.labels, names, self.links)


def split_files(files: FileList, data: DataConfig, part: Part) -> FileSamples:
    """One split of these files, as `split_rows` chooses it."""
    chosen = split_rows(files.labels, data, part, files.root, files.classes, lambda: _groups_of(files, data))
    return files._replace(paths=[files.paths[index] for index in chosen], labels=files.labels[chosen]).samples()


def _groups_of(files: FileList, data: DataConfig) -> list[str]:
    from datasets.sources.groups import groups_in_paths

    return groups_in_paths(files.paths, data) if files.groups is None else files.groups


def data_folder(data: DataConfig) -> Path:
    """DATA_PATH as a folder that exists and can be read."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET {data.DATASET} needs DATA.DATA_PATH (-data_path): the folder its images are in.")
    return readable_folder(data.DATA_PATH)


def readable_folder(path: str) -> Path:
    """`path`, given as DATA_PATH, as a folder that exists and can be read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = kind_of_path(folder)
        what = f"is {kind}, not a folder" if kind else "does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {what}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): no permission to read {folder}.")
    return folder


def no_file(path: Path) -> str:
    """Half a sentence for a path that is not a file: 'there is no file X' or 'X is a folder, not a file'."""
    kind = kind_of_path(path)
    return f"{path} is {kind}, not a file" if kind else f"there is no file {path}"


PROBED = 8
"""Images of a list whose existence is checked before the run: enough to notice a list for another folder."""

_checked_lists: dict[tuple[str, int, int, int], tuple[PathTable, np.ndarray]] = {}
"""Lists that `check_list` has read, for `read_list`: reading a million lines twice would delay the first update."""


def read_list(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    """Paths and labels of a list file, with every line checked."""
    return _checked_lists.pop(_version(file, num_classes), None) or _read_list(file, num_classes)


def _version(file: Path, num_classes: int) -> tuple[str, int, int, int]:
    """Key of a list file in `_checked_lists`, which changes when the file does."""
    try:
        stat = file.stat()
    except OSError:
        return str(file), num_classes, 0, 0  # opening the file reports the error
    return str(file), num_classes, stat.st_size, stat.st_mtime_ns


def _read_list(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    labels = array("q")
    paths = PathTable(_paths(file, num_classes, labels))
    if not labels:
        raise UserError(f"{file} is empty: it needs one image per line, as in 'train/n01440764/image.JPEG 0'.")
    return paths, np.array(labels, dtype=np.int64)


def _paths(file: Path, num_classes: int, labels: array[int]) -> Iterator[str]:
    """Yield the paths and append to `labels`, so that a million lines never exist as Python strings at once."""
    for where, line in _lines(file):
        path, label = _parse(line, where)
        check_label(label, num_classes, where)
        labels.append(label)
        yield path


def check_list(file: Path, num_classes: int) -> None:
    """Check a list like `read_list`, and that its first images exist."""
    paths, labels = _read_list(file, num_classes)
    _checked_lists[_version(file, num_classes)] = paths, labels
    check_first_files(file, paths)
    classes = int(labels.max()) + 1
    log_unused_outputs(classes, num_classes, f"The list {file}")
    warn_empty_classes(labels, range(classes), f"The list {file}")


def check_first_files(file: Path, paths: PathTable | Sequence[str]) -> None:
    """Raise UserError unless the first images that `file` names exist."""
    for index in range(min(PROBED, len(paths))):
        image = file.parent / paths[index]
        if not image.is_file():
            raise UserError(
                f"{file} names {paths[index]}, but {no_file(image)}. Paths in this file are relative to its folder."
            )


def leads_out(path: str) -> bool:
    """Whether a path can leave the folder that it is relative to: it is absolute or has a '..'."""
    return path.startswith("/") or (".." in path and ".." in path.split("/"))


def check_path(path: str, where: str) -> str:
    """The path; UserError if it is empty or leaves the data folder."""
    if not path:
        raise UserError(f"{where}: the path is empty.")
    if leads_out(path):
        raise UserError(
            f"{where}: {path} leads out of the data folder; give a path relative to the file's folder, without '..'."
        )
    return path


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """('file:number', line) of each line that is not blank."""
    name = str(file)
    try:
        with open(file, encoding="utf-8-sig", opener=only_regular) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield f"{name}:{number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The list {file} cannot be read: {error}.") from None


def _parse(line: str, where: str) -> tuple[str, int]:
    try:
        path, label = line.rsplit(maxsplit=1)
        number = int(label)
    except ValueError:
        raise UserError(
            f"{where}: {line.strip()!r} must be 'relative/path.JPEG label'; the label is a whole number."
        ) from None
    return check_path(path.strip(), where), number
