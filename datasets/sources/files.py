"""Images in files: those below a folder, and those that a list names, one per line: `relative/path.JPEG label`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from datasets.base import Samples
from datasets.labels import check_label, tell_empty_classes, tell_spare_classes
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import kind_of_path, only_regular, read_regular


class PathTable:
    """Paths in one block of bytes. A million strings would be copied into every worker as soon as it reads them."""

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


class FileSamples(Samples):
    """Images that are files of their own below one folder."""

    def __init__(self, root: Path, paths: PathTable, labels: np.ndarray, classes: list[str] | None) -> None:
        self.root, self.paths, self.labels, self.classes = root, paths, labels, classes

    def read(self, index: int) -> bytes:
        return read_regular(self.name(index))

    def name(self, index: int) -> str:
        return f"{self.root}/{self.paths[index]}"


def data_folder(data: DataConfig) -> Path:
    """DATA_PATH as a folder that exists."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET {data.DATASET} needs DATA.DATA_PATH (-data_path): the folder its images are in.")
    return readable_folder(data.DATA_PATH)


def readable_folder(path: str) -> Path:
    """DATA_PATH as a folder that exists and can be read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = kind_of_path(folder)
        what = f"is {kind}, not a folder" if kind else "does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {what}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} may not be read by this user.")
    return folder


PROBED = 8
"""Images of a list that the check before the run looks for: enough to find a list made for another folder."""


_read: dict[tuple[str, int, int, int], tuple[PathTable, np.ndarray]] = {}
"""Lists that were checked, until they are opened: to read a million lines twice would delay the first update."""


def read_list(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    """Paths and labels of a list file, each line checked; if that was just done, what came of it."""
    return _read.pop(_as_it_is(file, num_classes), None) or _read_all(file, num_classes)


def _as_it_is(file: Path, num_classes: int) -> tuple[str, int, int, int]:
    """A list that was written anew is another one."""
    try:
        found = file.stat()
    except OSError:
        return str(file), num_classes, 0, 0  # told where it is opened
    return str(file), num_classes, found.st_size, found.st_mtime_ns


def _read_all(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    labels = array("q")
    paths = PathTable(_paths(file, num_classes, labels))
    if not labels:
        raise UserError(f"{file} is empty: it needs one image a line, as in 'train/n01440764/image.JPEG 0'.")
    return paths, np.array(labels, dtype=np.int64)


def _paths(file: Path, num_classes: int, labels: array[int]) -> Iterator[str]:
    """The paths one by one, so that a list of a million is never there as Python's strings; fills `labels` beside."""
    for where, line in _lines(file):
        path, label = _parse(line, where)
        check_label(label, num_classes, where)
        labels.append(label)
        yield path


def check_list(file: Path, num_classes: int) -> None:
    """Everything `read_list` checks, and that the first images are where the list says."""
    paths, labels = _read_all(file, num_classes)
    _read[_as_it_is(file, num_classes)] = paths, labels
    check_first_files(file, paths)
    classes = int(labels.max()) + 1
    tell_spare_classes(classes, num_classes, f"The list {file}")
    tell_empty_classes(labels, range(classes), f"The list {file}")


def check_first_files(file: Path, paths: PathTable | Sequence[str]) -> None:
    """The first images must be where `file` says."""
    for index in range(min(PROBED, len(paths))):
        image = file.parent / paths[index]
        if not image.is_file():
            kind = kind_of_path(image)
            there = f"{image} is {kind}, not a file" if kind else f"there is no file {image}"
            raise UserError(f"{file} names {paths[index]}, but {there}. Its paths are relative to the folder it is in.")


def check_path(path: str, where: str) -> str:
    """The path, if it stays in the folder."""
    if not path:
        raise UserError(f"{where}: the path is empty.")
    if path.startswith("/") or (".." in path and ".." in path.split("/")):
        raise UserError(
            f"{where}: {path} leads out of the data folder; give a path relative to the file's folder, without '..'."
        )
    return path


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, the line) of those that are not blank."""
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
            f"{where}: {line.strip()!r} is not 'relative/path.JPEG label' with a whole number as label."
        ) from None
    return check_path(path.strip(), where), number
