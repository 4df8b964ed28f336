"""What the data sets share that are published on a page of their own, and that torchvision can fetch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from datasets.base import Source
from datasets.images import Images
from datasets.labels import check_class_count, tell_empty_classes, tell_spare_classes
from datasets.sources.download import fetch_once
from datasets.sources.files import FileSamples, PathTable, data_folder
from utils.config.data import DataConfig
from utils.errors import UserError


class Listed(NamedTuple):
    """One part, as the lists of a data set have it."""

    paths: list[str]
    """Below the data set's folder"""
    labels: np.ndarray
    classes: list[str] | range
    """Names, or numbers where there are none"""


@dataclass(frozen=True)
class Published:
    """One such data set."""

    folder: str
    """Its folder below DATA_PATH, as torchvision makes it"""
    marks: tuple[str, ...]
    """Files and folders in it that must be there"""
    layout: str
    """Further lines of the layout, below the folder"""
    fetcher: str
    """The class of torchvision.datasets that fetches it"""
    megabytes: int
    """Of the download"""
    page: str

    def prepare(self, data: DataConfig) -> Path:
        """Its folder, fetched if it is not there and DATA.DOWNLOAD says so."""
        if data.DOWNLOAD and data.DATA_PATH is not None:
            root = Path(data.DATA_PATH).expanduser()
            if self._place(root) is None:
                fetch_once(root / self.folder, self._fetch, self._by_hand(root))
        return self.found(data)

    def found(self, data: DataConfig) -> Path:
        """Its folder: one in DATA_PATH, or DATA_PATH itself."""
        root = data_folder(data)
        folder = self._place(root)
        if folder is None:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): there is no {data.DATASET} in {root}. {self._layout(root)}\n"
                f"DATA.DOWNLOAD=true fetches it ({self.megabytes:,} MB)."
            )
        missing = [mark for mark in self.marks if not (folder / mark).exists()]
        if missing:
            raise UserError(self.broken(folder, f"there is no {missing[0]}"))
        return folder

    def broken(self, folder: Path, why: str) -> str:
        """The message for a data set of which something is missing."""
        return (
            f"{folder} is not whole: {why}. {self._layout(folder.parent)}\n"
            f"Remove the folder, and DATA.DOWNLOAD=true fetches it anew ({self.megabytes:,} MB)."
        )

    def check_files(self, folder: Path, paths: Sequence[str]) -> None:
        """Every file a list names must be there: a download that was broken off lacks some."""
        by_folder: dict[str, set[str]] = defaultdict(set)
        for path in paths:
            inside, _, name = path.rpartition("/")
            by_folder[inside].add(name)
        missing = sorted(
            f"{inside}/{name}" for inside, names in by_folder.items() for name in names - _names(folder / inside)
        )
        if missing:
            raise UserError(
                self.broken(folder, f"{len(missing):,} of {len(paths):,} images missing, first {missing[0]}")
            )

    def source(self, listed: Callable[[Path, bool], Listed]) -> Source:
        """The data set, where `listed` reads one part's lists: (folder, train)."""

        def part(folder: Path, data: DataConfig, train: bool, num_classes: int) -> Listed:
            found = listed(folder, train)
            check_class_count(len(found.classes), num_classes, f"The data set {data.DATASET}")
            return found

        def open_part(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
            folder = self.found(data)
            paths, labels, classes = part(folder, data, train, num_classes)
            names = classes if isinstance(classes, list) else None
            return Images(FileSamples(folder, PathTable(paths), labels, names), data, train, seed)

        def check(data: DataConfig, num_classes: int, train: bool) -> None:
            folder, classes = self.prepare(data), range(0)
            for training in [True, False] if train else [False]:
                paths, labels, classes = part(folder, data, training, num_classes)
                self.check_files(folder, paths)
                title = "training" if training else "validation"
                tell_empty_classes(labels, classes, f"The {title} part of the data set {data.DATASET}")
            tell_spare_classes(len(classes), num_classes, f"The data set {data.DATASET}")

        return Source(open_part, check, fetches=True)

    def _place(self, root: Path) -> Path | None:
        if (root / self.folder).is_dir():
            return root / self.folder
        own = root.name == self.folder or all((root / mark).exists() for mark in self.marks)
        return root if own and root.is_dir() else None

    def _fetch(self, scratch: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.fetcher)(str(scratch), download=True)

    def _layout(self, root: Path) -> str:
        lines = "\n".join(f"  {root}/{self.folder}/{line}" for line in self.layout.splitlines())
        return f"Expected layout:\n{lines}"

    def _by_hand(self, root: Path) -> str:
        return f"Try again, or fetch it yourself from {self.page} and unpack it. {self._layout(root)}"


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
