"""Where tar files are: a local folder, or a URL that fsspec supports, such as s3://bucket/imagenet.

Requests to a store fail now and then, or are throttled. Those that may succeed later are repeated after a pause.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

from datasets.base import remark
from datasets.sources.files import readable_folder
from utils.errors import UserError
from utils.text import is_redacted
from vitamp.files import only_regular, read_regular

Value = TypeVar("Value")

MOST_OPEN = 64
"""Files that a process keeps open: the shards of a window are read alternately, and opening one per image is slow."""

STAMPS = ("ETag", "etag", "LastModified", "mtime", "created")
"""Entries of a listing that change when the file is rewritten, by protocol"""

PAUSES = 0.1, 0.3, 1.0, 3.0, 10.0, 20.0
"""Seconds before a request is repeated, while images are read"""
PAUSES_AT_START = PAUSES[:4]
LONGEST_PAUSE = 60.0
"""Of those that a store asks for (Retry-After)"""
PASSING = HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS
"""The answers 4xx after which the same request may succeed"""
BLOCK = 8 << 20
"""Most bytes of a request"""
HEADER = 512
"""Bytes of the header before the content of a member of a tar file"""
GAP = 64 << 10
"""Ranges of a file that are so near each other are one request: these bytes cost less than another one."""

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

    def open(self, name: str, _: int = 0) -> BinaryIO:
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

    def close_removed(self) -> None:
        """Close files that were removed: until then they take space on the disk."""
        for name in [name for name, file in self._files.items() if not os.fstat(file.fileno()).st_nlink]:
            self._files.pop(name).close()

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
            entries = self._patiently(lambda: files.ls(place, detail=True), PAUSES_AT_START)
        except FileNotFoundError:
            return []
        shards = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if not name.endswith(".tar") or name.startswith("."):
                continue
            size = entry.get("size")
            if size is None:
                size = self._patiently(lambda path=entry["name"]: files.size(path), PAUSES_AT_START)
            stamp = next((str(entry[key]) for key in STAMPS if entry.get(key)), "")
            shards.append(ShardFile(f"{folder}/{name}" if folder else name, int(size or 0), stamp))
        return sorted(shards)

    def read_file(self, name: str) -> bytes | None:
        files, place = self._place(name)
        try:
            return cast(bytes, self._patiently(lambda: files.cat_file(place), PAUSES_AT_START))
        except FileNotFoundError:
            return None

    def open(self, name: str, size: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(self, name, size), BLOCK))

    def range(self, wanted: Range, pauses: Sequence[float] = ()) -> np.ndarray:
        """Bytes of a range, fewer if the file ends early. A request that fails is repeated after `pauses`."""
        name, offset, size = wanted
        files, place = self._place(name)

        def request() -> np.ndarray:
            return _array(wanted, files.cat_file(place, start=offset, end=offset + size))

        return self._patiently(request, pauses)

    def ranges(self, wanted: Sequence[Range]) -> list[np.ndarray | None]:
        """Many ranges at once. Those that fail are requested again; None for those that keep failing."""
        files, root = self._place()
        contents: dict[Range, np.ndarray] = {}

        def request() -> None:
            missing = [one for one in wanted if one not in contents]
            names, starts = [f"{root}/{name}" for name, _, _ in missing], [offset for _, offset, _ in missing]
            ends = [offset + size for _, offset, size in missing]
            failures: list[OSError] = []
            for one, answer in zip(missing, files.cat_ranges(names, starts, ends, on_error="return"), strict=True):
                try:
                    if isinstance(answer, BaseException):
                        raise _as_os_error(answer)
                    content = _array(one, answer)
                    if len(content) < one[2]:
                        raise StoreError("it sends fewer bytes than were requested")
                    contents[one] = content
                except OSError as error:
                    failures.append(error)
            if failures:
                raise max(failures, key=_may_pass)

        with contextlib.suppress(OSError):
            self._patiently(request, PAUSES)
        return [contents.get(one) for one in wanted]

    def _patiently(self, request: Callable[[], Value], pauses: Sequence[float]) -> Value:
        """Repeat a request that fails, after each of `pauses` or what the store asks for. Raises OSError."""
        for pause in pauses:
            try:
                return request()
            except Exception as failure:
                error = _as_os_error(failure)
            if not _may_pass(error):
                raise error from None
            remark(f"{self.root} fails at times: {str(error).partition(': ')[0]}. Such requests are repeated.")
            asked = error.pause if isinstance(error, StoreError) else 0.0
            # By chance up to twice as long, so that not all processes return at once; `random` itself is seeded.
            time.sleep(max(pause, min(asked, LONGEST_PAUSE)) * (1 + random.SystemRandom().random()))
        try:
            return request()
        except Exception as failure:
            raise _as_os_error(failure) from None


class StoreError(OSError):
    """What is wrong with an answer of a store."""

    def __init__(self, text: str, status: int = 0, pause: float = 0.0) -> None:
        """`pause`: seconds that the store asks to wait."""
        super().__init__(text)
        self.status, self.pause = status, pause


def _may_pass(error: OSError) -> bool:
    """Whether the same request may succeed later."""
    status = error.status if isinstance(error, StoreError) else 0
    return not isinstance(error, FileNotFoundError | PermissionError) and not (
        HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in PASSING
    )


def _as_os_error(error: BaseException) -> OSError:
    """An error of a protocol's own type as an OSError."""
    if isinstance(error, OSError):
        return error
    status, pause = getattr(error, "status", 0), 0.0
    if not isinstance(status, int) or status not in {*HTTPStatus}:
        return StoreError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    with contextlib.suppress(TypeError, ValueError):  # none, or a date
        pause = float((getattr(error, "headers", None) or {}).get("Retry-After", 0))
    return StoreError(f"it answers {status} ({HTTPStatus(status).phrase})", status, pause)


def _array(wanted: Range, content: bytes) -> np.ndarray:
    """Writable, as torch wants it. OSError if there is more than the range."""
    if len(content) > wanted[2]:
        raise StoreError(
            "the server ignores requests for a part of a file (Range) and sends more. Use a server that supports them, "
            "or copy the files to a disk"
        )
    return np.frombuffer(bytearray(content), dtype=np.uint8)


class _RemoteFile(io.RawIOBase):
    """A file of a store, to be read from its begin to its end."""

    def __init__(self, store: Remote, name: str, size: int) -> None:
        self._store, self._name, self._size, self._place = store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._place)
        if wanted <= 0:
            return 0
        content = self._store.range((self._name, self._place, wanted), PAUSES_AT_START)
        buffer[: len(content)] = content.tobytes()
        self._place += len(content)
        return len(content)


def joined(wanted: Sequence[Range]) -> list[tuple[Range, list[Range]]]:
    """Ranges that are near each other in a file as one request, with the ranges in it."""
    requests: list[tuple[Range, list[Range]]] = []
    for name, offset, size in sorted(wanted):
        if requests:
            (last, begin, length), parts = requests[-1]
            longer = max(begin + length, offset + size) - begin
            if last == name and offset - (begin + length) <= GAP and longer <= BLOCK:
                requests[-1] = (name, begin, longer), [*parts, (name, offset, size)]
                continue
        requests.append(((name, offset, size), [(name, offset, size)]))
    return requests


Store = Folder | Remote


def open_store(place: str | None) -> Store:
    """Open DATA_PATH, a folder or a URL."""
    if place is None:
        raise UserError("DATA.DATASET shards needs DATA.DATA_PATH (-data_path): the folder or URL of its tar files.")
    if is_redacted(place):
        raise UserError(f"DATA.DATA_PATH: {place} is without its password. Give the whole URL: -data_path.")
    if "://" in place:
        return Remote(place)
    return Folder(readable_folder(place))
