"""What the data sets share that are published on a page of their own, and that torchvision can fetch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.config.schema import DataConfig
from utils.errors import UserError

from .download import fetch_once
from .files import data_folder


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
