"""Storage of shards: a local folder, or a URL that fsspec supports, such as s3://bucket/imagenet."""

from __future__ import annotations

import contextlib
import mmap
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
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._mapped: dict[str, np.ndarray] = {}
        self._owner = os.getpid()

    def tars(self, folder: str = "") -> list[ShardFile]:
        """Tar files in `folder`, in the order of their names; none if the folder does not exist."""
        path = os.path.join(self.root, folder)
        if not os.path.isdir(path):
            return []
        with os.scandir(path) as entries:
            files = [entry for entry in entries if entry.name.endswith(".tar") and not entry.name.startswith(".")]
            stats = [(file.name, file.stat()) for file in files if file.is_file()]
        prefix = f"{folder}/" if folder else ""
        return sorted(ShardFile(prefix + name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats)

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist."""
        path = os.path.join(self.root, name)
        try:
            return read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self.root, name), "rb", opener=only_regular)

    def range(self, wanted: Range) -> np.ndarray:
        """Bytes of a range, fewer if the file ends early. Raises OSError."""
        name, offset, size = wanted
        content, length = np.empty(size, dtype=np.uint8), 0
        with self._closed_after_error(name):
            handle = self._handle(name)
            while length < size and (got := os.preadv(handle, [content[length:].data], offset + length)):
                length += got
        if length < size:
            self._close(name)  # a complete file may replace it
        return content[:length]

    def view(self, wanted: Range) -> np.ndarray:
        """Map the range: a crop needs half of the raw pixels or less, and the rest is never copied."""
        name, offset, size = wanted
        with self._closed_after_error(name):
            handle = self._handle(name)
            if os.fstat(handle).st_size < offset + size:
                return self.range(wanted)  # reading mapped memory beyond the end of the file would crash
            mapped = self._mapped.get(name)
            if mapped is None or len(mapped) < offset + size:
                mapped = np.frombuffer(mmap.mmap(handle, 0, prot=mmap.PROT_READ), dtype=np.uint8)
                self._mapped[name] = mapped
        return mapped[offset : offset + size]

    @contextlib.contextmanager
    def _closed_after_error(self, name: str) -> Iterator[None]:
        """Close the file after an error: when a file system is mounted again, old handles stay invalid."""
        try:
            yield
        except OSError:
            self._close(name)
            raise

    def _close(self, name: str) -> None:
        self._mapped.pop(name, None)  # slices of it keep the mapping alive
        handle = self._handles.pop(name, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _handle(self, name: str) -> int:
        if self._owner != os.getpid():
            # A forked loading process opens its own, so that closing a file affects no other process.
            self._handles, self._mapped, self._owner = OrderedDict(), {}, os.getpid()
        if name in self._handles:
            self._handles.move_to_end(name)
            return self._handles[name]
        if len(self._handles) >= MOST_OPEN:
            self._close(next(iter(self._handles)))
        handle = self._handles[name] = only_regular(os.path.join(self.root, name), os.O_RDONLY)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": OrderedDict(), "_mapped": {}}


class Remote:
    """Files below a URL, read with fsspec. Each process opens its own connections at its first use."""

    remote = True

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._connected: tuple[int, Any, str] | None = None
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        if self._connected is None or self._connected[0] != os.getpid():
            try:
                import fsspec
            except ImportError:
                raise UserError(f"{self.root}: reading over a network needs fsspec. Run: pip install fsspec") from None
            try:
                files, path = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
            except (ImportError, ValueError) as error:  # each protocol needs its own package
                raise UserError(f"DATA.DATA_PATH (-data_path): {self.root} cannot be opened: {error}") from None
            self._connected = os.getpid(), files, path.rstrip("/")
        return self._connected[1:]

    def _path(self, name: str) -> str:
        root = self._connect()[1]
        return f"{root}/{name}" if name else root

    def tars(self, folder: str = "") -> list[ShardFile]:
        files = self._connect()[0]
        try:
            entries = files.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # each protocol has its own types of errors
            raise UserError(f"{self.root}/{folder} cannot be listed: {_reason(error)}") from None
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
        try:
            return cast(bytes, self._connect()[0].cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise UserError(f"{self.root}/{name} cannot be read: {_reason(error)}") from None

    def open(self, name: str) -> BinaryIO:
        with _as_os_error():
            return cast(BinaryIO, self._connect()[0].open(self._path(name), "rb"))

    def range(self, wanted: Range) -> np.ndarray:
        name, offset, size = wanted
        with _as_os_error():
            content = self._connect()[0].cat_file(self._path(name), start=offset, end=offset + size)
        if len(content) > size:
            raise OSError(
                f"the server ignores requests for a part of a file (Range): it sent {len(content):,} bytes, not "
                f"{size:,}. Use a server that supports them, or copy the files to a disk"
            )
        return _writable(content)

    view = range

    def ranges(self, wanted: Sequence[Range]) -> list[np.ndarray | None]:
        """Many ranges at once, with None for those that failed; an empty list if the whole request fails."""
        files = self._connect()[0]
        names, starts = [self._path(name) for name, _, _ in wanted], [offset for _, offset, _ in wanted]
        try:
            contents = files.cat_ranges(names, starts, [offset + size for _, offset, size in wanted], on_error="return")
        except Exception:  # the ranges are read again one by one, and report their errors then
            return []
        return [None if isinstance(content, Exception) else _writable(content) for content in contents]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}


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
        raise OSError(_reason(error)) from None


def _writable(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), dtype=np.uint8)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
