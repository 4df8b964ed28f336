"""Base of the published data sets, which torchvision can download."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datasets.sources.download import fetch_once
from datasets.sources.files import data_folder
from utils.config.data import DataConfig
from utils.errors import UserError


@dataclass(frozen=True)
class Published:
    """Folder, download and error messages of a published data set."""

    folder: str
    """Folder below DATA_PATH, named as torchvision names it"""
    required: tuple[str, ...]
    """Files and folders that it must contain"""
    layout: str
    """Further lines of the layout, below the folder"""
    fetcher: str
    """Class in torchvision.datasets that downloads it"""
    megabytes: int
    """Size of the download"""
    page: str

    def fetched_folder(self, data: DataConfig) -> Path:
        """The folder of the data set, downloaded if it is missing and DATA.DOWNLOAD is set."""
        if data.DOWNLOAD and data.DATA_PATH is not None:
            root = Path(data.DATA_PATH).expanduser()
            if self._find(root) is None:
                fetch_once(root / self.folder, self._fetch, self._by_hand(root))
        return self.existing_folder(data)

    def existing_folder(self, data: DataConfig) -> Path:
        """The folder of the data set: one in DATA_PATH, or DATA_PATH itself."""
        root = data_folder(data)
        folder = self._find(root)
        if folder is None:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): there is no {data.DATASET} in {root}. {self._expected(root)}\n"
                f"DATA.DOWNLOAD=true fetches it ({self.megabytes:,} MB)."
            )
        missing = [name for name in self.required if not (folder / name).exists()]
        if missing:
            raise self.damaged(folder, f"there is no {missing[0]}")
        return folder

    def damaged(self, folder: Path, why: str) -> UserError:
        """The error for a data set that is incomplete or damaged."""
        return UserError(
            f"{folder} is incomplete or damaged: {why}. {self._expected(folder.parent)}\n"
            f"Remove the folder, and DATA.DOWNLOAD=true fetches it again ({self.megabytes:,} MB)."
        )

    @contextlib.contextmanager
    def reading(self, folder: Path, name: str) -> Iterator[None]:
        """Report any error while the file `name` is read: a damaged file can raise nearly anything."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise self.damaged(folder, f"{name} cannot be read ({type(error).__name__}: {error})") from None

    def _find(self, root: Path) -> Path | None:
        if (root / self.folder).is_dir():
            return root / self.folder
        is_root = root.name == self.folder or all((root / name).exists() for name in self.required)
        return root if is_root and root.is_dir() else None

    def _fetch(self, scratch: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.fetcher)(str(scratch), download=True)

    def _expected(self, root: Path) -> str:
        lines = "\n".join(f"  {root}/{self.folder}/{line}" for line in self.layout.splitlines())
        return f"Expected layout:\n{lines}"

    def _by_hand(self, root: Path) -> str:
        return f"Try again, or fetch it yourself from {self.page} and unpack it. {self._expected(root)}"
