"""Where shards lie: a folder on disk, or a place that fsspec can reach, such as s3://bucket/imagenet."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from datasets.sources.files import readable_folder
from utils.errors import UserError
from utils.files import only_regular, read_regular

MOST_OPEN = 64
"""Files a process keeps open. A window of shards is read in turns, so that opening anew for each image would cost."""

Range = tuple[str, int, int]
"""(file, first byte, number of bytes)"""


class Found(NamedTuple):
    """A tar file of a store."""

    name: str
    """relative to the store's root, with /"""
    size: int
    stamp: str
    """changes when the file is written anew, where the store knows it; else empty"""


class Store(ABC):
    """Files below one root."""

    root: str
    remote: bool

    @abstractmethod
    def tars(self, folder: str = "") -> list[Found]:
        """The tar files in `folder`, in the order of their names; none where there is no such folder."""

    @abstractmethod
    def whole(self, name: str) -> bytes | None:
        """A small file, None where there is none."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO: ...

    @abstractmethod
    def range(self, part: Range) -> np.ndarray:
        """These bytes, fewer where the file ends before. Raises OSError."""

    def view(self, part: Range) -> np.ndarray:
        """The same, perhaps without copying what is not looked at; not to be written to."""
        return self.range(part)


class Folder(Store):
    """A folder on disk."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._mapped: dict[str, np.ndarray] = {}
        self._owner = os.getpid()

    def tars(self, folder: str = "") -> list[Found]:
        where = os.path.join(self.root, folder)
        if not os.path.isdir(where):
            return []
        with os.scandir(where) as entries:
            files = [entry for entry in entries if entry.name.endswith(".tar") and not entry.name.startswith(".")]
            found = [(file.name, file.stat()) for file in files if file.is_file()]
        prefix = f"{folder}/" if folder else ""
        return sorted(Found(prefix + name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in found)

    def whole(self, name: str) -> bytes | None:
        path = os.path.join(self.root, name)
        try:
            return read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from None

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self.root, name), "rb", opener=only_regular)

    def range(self, part: Range) -> np.ndarray:
        name, offset, size = part
        found, begin = np.empty(size, dtype=np.uint8), 0
        with self._dropped_if_it_fails(name):
            handle = self._handle(name)
            while begin < size and (got := os.preadv(handle, [found[begin:].data], offset + begin)):
                begin += got
        if begin < size:
            self._drop(name)  # a whole file may have taken its place
        return found[:begin]

    def view(self, part: Range) -> np.ndarray:
        """A crop of raw pixels needs half of them or less; the rest is never copied."""
        name, offset, size = part
        with self._dropped_if_it_fails(name):
            handle = self._handle(name)
            if os.fstat(handle).st_size < offset + size:
                return self.range(part)  # what is missing must not be looked at in mapped memory
            mapped = self._mapped.get(name)
            if mapped is None or len(mapped) < offset + size:
                mapped = np.frombuffer(mmap.mmap(handle, 0, prot=mmap.PROT_READ), dtype=np.uint8)
                self._mapped[name] = mapped
        return mapped[offset : offset + size]

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        """A handle stays dead once its file system was mounted again; the next try needs one of its own."""
        try:
            yield
        except OSError:
            self._drop(name)
            raise

    def _drop(self, name: str) -> None:
        self._mapped.pop(name, None)  # what was cut from it keeps it alive
        handle = self._handles.pop(name, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _handle(self, name: str) -> int:
        if self._owner != os.getpid():
            # Inherited by a loading process. They would serve, but closing one is each process's own affair.
            self._handles, self._mapped, self._owner = OrderedDict(), {}, os.getpid()
        if name in self._handles:
            self._handles.move_to_end(name)
            return self._handles[name]
        if len(self._handles) >= MOST_OPEN:
            self._drop(next(iter(self._handles)))
        handle = self._handles[name] = only_regular(os.path.join(self.root, name), os.O_RDONLY)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": OrderedDict(), "_mapped": {}}


class Remote(Store):
    """A place named by a URL, read by fsspec. A process makes its own connections at its first look."""

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
            except (ImportError, ValueError) as error:  # each kind of URL has a package of its own
                raise UserError(f"DATA.DATA_PATH (-data_path): {self.root} cannot be opened: {error}") from None
            self._connected = os.getpid(), files, path.rstrip("/")
        return self._connected[1:]

    def _path(self, name: str) -> str:
        root = self._connect()[1]
        return f"{root}/{name}" if name else root

    def tars(self, folder: str = "") -> list[Found]:
        files = self._connect()[0]
        try:
            entries = files.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # every kind of store has errors of its own
            raise UserError(f"{self.root}/{folder}: cannot be listed: {_reason(error)}") from None
        entries = [entry for entry in entries if entry["name"].endswith(".tar")]
        found = []
        for entry in entries:
            size = entry["size"] if entry.get("size") is not None else files.size(entry["name"])
            name = entry["name"].rstrip("/").rpartition("/")[2]
            found.append(Found(f"{folder}/{name}" if folder else name, int(size or 0), _stamp(entry)))
        return sorted(found)

    def whole(self, name: str) -> bytes | None:
        try:
            return cast(bytes, self._connect()[0].cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise UserError(f"{self.root}/{name}: cannot be read: {_reason(error)}") from None

    def open(self, name: str) -> BinaryIO:
        try:
            return cast(BinaryIO, self._connect()[0].open(self._path(name), "rb"))
        except OSError:
            raise
        except Exception as error:
            raise OSError(_reason(error)) from None

    def range(self, part: Range) -> np.ndarray:
        name, offset, size = part
        try:
            return _writable(self._connect()[0].cat_file(self._path(name), start=offset, end=offset + size))
        except OSError:
            raise
        except Exception as error:
            raise OSError(_reason(error)) from None

    def ranges(self, parts: Sequence[Range]) -> list[np.ndarray | None]:
        """Many ranges at once, None for what could not be had; nothing at all where that fails as a whole."""
        files = self._connect()[0]
        names, starts = [self._path(name) for name, _, _ in parts], [offset for _, offset, _ in parts]
        try:
            found = files.cat_ranges(names, starts, [offset + size for _, offset, size in parts], on_error="return")
        except Exception:  # each range is asked for again, and says then what is wrong
            return []
        return [None if isinstance(item, Exception) else _writable(item) for item in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}


def open_store(place: str | None) -> Store:
    """DATA_PATH as a folder or as a URL."""
    if place is None:
        raise UserError(
            "DATA.DATASET shards needs DATA.DATA_PATH (-data_path): the folder or URL its tar files lie in."
        )
    if "://" in place:
        return Remote(place)
    return Folder(readable_folder(place))


def _writable(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), dtype=np.uint8)


def _stamp(entry: dict[str, Any]) -> str:
    return next((str(entry[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if entry.get(key)), "")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
