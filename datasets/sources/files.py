"""Images that lie in files: what list files and class folders have in common."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from datasets.samples import Samples
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.regular_file import kind_of_path, read_regular


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
    folder = Path(data.DATA_PATH).expanduser()
    if not folder.is_dir():
        kind = kind_of_path(folder)
        what = f"is {kind}, not a folder" if kind else "does not exist"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {what}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} may not be read by this user.")
    return folder
