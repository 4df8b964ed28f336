"""Storage of shards: a local folder, or a URL that fsspec supports, such as s3://bucket/imagenet."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from datasets.sources.files import readable_folder
from utils.errors import UserError
from utils.text import is_redacted
from vitamp.files import only_regular, read_regular

MOST_OPEN = 64
"""Files that a process keeps open: the shards of a window are read alternately, and opening one per image is slow."""

STAMPS = ("ETag", "etag", "LastModified", "mtime", "created")
"""Entries of a listing that change when the file is rewritten, by protocol"""

Range = tuple[str, int, int]
"""(file, first byte, number of bytes)"""


class ShardFile(NamedTuple):
    """A tar file in a store."""

    name: str
    """Relative to the store's root, with /"""
    size: int
    stamp: str
    """Changes when the file is rewritten; '' if the store does not record it"""


class Folder:
    """Files below a local folder."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()

    def tars(self, folder: str = "") -> list[ShardFile]:
        """Tar files in `folder`, in the order of their names; none if the folder does not exist."""
        files = [file for file in Path(self.root, folder).glob("*.tar") if file.is_file()]
        stats = [(file.name, file.stat()) for file in files if not file.name.startswith(".")]
        prefix = f"{folder}/" if folder else ""
        return sorted(ShardFile(prefix + name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats)

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist. Raises OSError."""
        try:
            return read_regular(os.path.join(self.root, name))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self.root, name), "rb", opener=only_regular)

    def range(self, wanted: Range) -> np.ndarray:
        """Bytes of a range, fewer if the file ends early. Raises OSError."""
        name, offset, size = wanted
        content, length = np.empty(size, dtype=np.uint8), 0
        try:
            if name not in self._files:
                if len(self._files) >= MOST_OPEN:
                    self._files.popitem(last=False)[1].close()
                self._files[name] = self.open(name)
            self._files.move_to_end(name)
            handle = self._files[name].fileno()
            while length < size and (got := os.preadv(handle, [content[length:].data], offset + length)):
                length += got
        finally:
            # When a file system is mounted again, old handles stay invalid; a complete file may replace a short one.
            if length < size and name in self._files:
                with contextlib.suppress(OSError):
                    self._files.pop(name).close()
        return content[:length]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}


class Remote:
    """Files below a URL, read with fsspec."""

    remote = True

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._place()

    def _place(self, name: str = "") -> tuple[Any, str]:
        """The file system, of which fsspec keeps one in each process, and a path in it."""
        import fsspec

        try:
            files, root = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # each protocol needs its own package
            raise UserError(f"DATA.DATA_PATH (-data_path): {self.root} cannot be opened: {error}") from None
        return files, f"{root.rstrip('/')}/{name}" if name else root.rstrip("/")

    def tars(self, folder: str = "") -> list[ShardFile]:
        files, place = self._place(folder)
        try:
            with _as_os_error():
                entries = files.ls(place, detail=True)
        except FileNotFoundError:
            return []
        shards = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if not name.endswith(".tar") or name.startswith("."):
                continue
            size = entry["size"] if entry.get("size") is not None else files.size(entry["name"])
            stamp = next((str(entry[key]) for key in STAMPS if entry.get(key)), "")
            shards.append(ShardFile(f"{folder}/{name}" if folder else name, int(size or 0), stamp))
        return sorted(shards)

    def read_file(self, name: str) -> bytes | None:
        files, place = self._place(name)
        try:
            with _as_os_error():
                return cast(bytes, files.cat_file(place))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        files, place = self._place(name)
        with _as_os_error():
            return cast(BinaryIO, files.open(place, "rb"))

    def range(self, wanted: Range) -> np.ndarray:
        name, offset, size = wanted
        files, place = self._place(name)
        with _as_os_error():
            content = files.cat_file(place, start=offset, end=offset + size)
        if len(content) > size:
            raise OSError(
                f"the server ignores requests for a part of a file (Range): it sent {len(content):,} bytes, not "
                f"{size:,}. Use a server that supports them, or copy the files to a disk"
            )
        return np.frombuffer(bytearray(content), dtype=np.uint8)  # a bytearray can be written to, as torch wants it

    def ranges(self, wanted: Sequence[Range]) -> list[np.ndarray | None]:
        """Many ranges at once, with None for those that failed; an empty list if the whole request fails."""
        files, root = self._place()
        names, starts = [f"{root}/{name}" for name, _, _ in wanted], [offset for _, offset, _ in wanted]
        try:
            contents = files.cat_ranges(names, starts, [offset + size for _, offset, size in wanted], on_error="return")
        except Exception:  # the ranges are read again one by one, and report their errors then
            return []
        return [None if isinstance(one, Exception) else np.frombuffer(bytearray(one), np.uint8) for one in contents]


Store = Folder | Remote


def open_store(place: str | None) -> Store:
    """Open DATA_PATH, a folder or a URL."""
    if place is None:
        raise UserError("DATA.DATASET shards needs DATA.DATA_PATH (-data_path): the folder or URL of its tar files.")
    if is_redacted(place):
        raise UserError(
            f"DATA.DATA_PATH: {place} is without its password, which no file of a run has. Give the whole URL: "
            "-data_path."
        )
    if "://" in place:
        return Remote(place)
    return Folder(readable_folder(place))


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise errors of a protocol's own types as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
