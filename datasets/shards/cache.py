"""Whole tar files of a store on a disk of this machine, for all of its processes and for later runs (DATA.CACHE_GB).

A thread in each loading process downloads the files that coming batches need; a lock leaves each file to one of them.
Nobody waits for a download: images of a file that is not there yet are requested by themselves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.base import remark
from datasets.shards.index import ShardIndex, precedes
from datasets.shards.stores import BLOCK, HEADER, Folder, Remote, ShardFile, StoreError
from utils.text import redacted
from vitamp.files import leads_to, only_regular

HASH = "sha256:"
"""Beginning of the stamp of a file whose hash is known"""
FIRST_REST, LONGEST_REST = 1.0, 60.0
"""Seconds without downloads after the disk failed or was full, or a file was not what it should be"""


class _Kept(NamedTuple):
    """A file in the folder."""

    used: float
    """When"""
    size: int
    """Of an unfinished one, what it will have"""
    path: Path


class ShardCache:
    """The tar files of a split that are on this machine.

    The folder is shared with other splits, stores and runs. The file that was not used for the longest time makes room.
    """

    def __init__(
        self, store: Remote, files: Sequence[ShardFile], index: ShardIndex, folder: Path, limit: float
    ) -> None:
        """`index`: of the files. `limit`: most bytes in the folder."""
        self._store, self._files, self._index = store, files, index
        self.folder, self.limit = folder, limit
        self._local = Folder(folder)
        self._owner, self._coming = 0, list[int]()
        self._changed: threading.Condition | None = None

    def has(self, number: int) -> bool:
        """Whether a file is here in full. From now on it counts as just used."""
        path = self.folder / self._name(number)
        try:
            whole = os.stat(path).st_size == self._files[number].size
            os.utime(path)
        except OSError:
            return False
        return whole

    def range(self, number: int, offset: int, size: int) -> np.ndarray | None:
        """Bytes of a file; None if it is not here, or no longer."""
        try:
            content = self._local.range((self._name(number), offset, size))
        except OSError:
            return None
        return content if len(content) == size else None

    def close_removed(self) -> None:
        self._local.close_removed()

    def room(self) -> float:
        """Bytes that this folder may have: fewer than the limit on a disk that others have filled."""
        status = os.statvfs(self.folder)
        return min(self.limit, status.f_bavail * status.f_frsize + sum(kept.size for kept in self._kept()))

    def announce(self, numbers: Sequence[int], most: int) -> None:
        """Download these files, and then those that were announced before: in all so many."""
        if self._changed is None or self._owner != os.getpid():  # a forked process has no thread yet
            self._owner, self._coming, self._changed = os.getpid(), [], threading.Condition()
            threading.Thread(target=self._work, args=(self._changed,), daemon=True).start()
        with self._changed:
            self._coming = list(dict.fromkeys([*numbers, *self._coming]))[:most]
            self._changed.notify()

    def _work(self, changed: threading.Condition) -> None:
        rest = FIRST_REST
        while True:
            with changed:
                changed.wait_for(lambda: self._coming)
                number = self._coming.pop(0)
            if self.has(number):
                continue
            unfinished = (self.folder / self._name(number)).with_suffix(".part")
            try:
                self._download(number, unfinished)
                rest = FIRST_REST
            except OSError as error:
                remark(
                    f"{self.folder}: tar files of {self._store.root} cannot be kept: {error.strerror or error}. Their "
                    "images are requested by themselves meanwhile; the download is repeated."
                )
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                time.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)

    def _download(self, number: int, unfinished: Path) -> None:
        """Fetch the rest of a file, unless another process does. OSError: it cannot be kept."""
        size, path = self._files[number].size, unfinished.with_suffix(".tar")
        with _locked(unfinished, os.O_CREAT) as handle:
            if handle is None:
                return
            if self.has(number):  # it was finished while this process opened it anew
                unfinished.unlink()
                return
            while sum(kept.size for kept in self._kept()) > self.limit:
                if not self._remove_oldest(unfinished):
                    raise OSError(errno.ENOSPC, "DATA.CACHE_GB is used up by files that are being downloaded")
            while (begin := os.fstat(handle).st_size) < size:
                [content] = self._store.ranges([(self._files[number].name, begin, min(BLOCK, size - begin))])
                if content is None:  # the store fails: what there is stays for the next time
                    return
                self._append(handle, content, unfinished)
            self._verify(number, handle)
            os.fsync(handle)
            os.replace(unfinished, path)

    def _append(self, handle: int, content: np.ndarray, unfinished: Path) -> None:
        left = content.data
        while len(left):
            try:
                left = left[os.write(handle, left) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._remove_oldest(unfinished):
                    raise

    def _verify(self, number: int, handle: int) -> None:
        """OSError if a downloaded file is another one, by its hash or else by the headers of its images."""
        stamp = self._files[number].stamp
        if stamp.startswith(HASH):
            with open(handle, "rb", closefd=False) as file:
                file.seek(0)
                if hashlib.file_digest(file, "sha256").hexdigest() != stamp.removeprefix(HASH):
                    raise StoreError("the store sent one whose hash is not that in dataset.json")
            return
        first, last = np.searchsorted(self._index.shard, (number, number + 1)).tolist()
        for row in range(first, last):
            begin = int(self._index.offset[row]) - HEADER
            header = np.frombuffer(os.pread(handle, HEADER, begin), dtype=np.uint8)
            if not precedes(header, int(self._index.size[row])):
                raise StoreError("the store sent one that does not agree with the index")

    def _kept(self) -> list[_Kept]:
        """All files in the folder, also of other stores, those first that were not used for the longest time."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                stem, ending = os.path.splitext(entry.name)
                with contextlib.suppress(OSError, ValueError):  # removed meanwhile; a file of someone else
                    if ending in (".tar", ".part"):
                        found.append(_Kept(entry.stat().st_mtime, int(stem.rpartition("-")[2]), Path(entry.path)))
        return sorted(found)

    def _remove_oldest(self, but: Path) -> bool:
        """Make room by a file that no process downloads; False if there is none."""
        for kept in self._kept():
            if kept.path == but:
                continue
            with contextlib.suppress(FileNotFoundError), _locked(kept.path) as handle:
                if handle is not None:
                    kept.path.unlink()
                    return True
        return False

    def _name(self, number: int) -> str:
        """It also says the size, and changes with the content as far as the store shows that."""
        file = self._files[number]
        of = "\0".join((redacted(self._store.root), file.name, file.stamp))
        return f"{hashlib.sha256(of.encode(errors='surrogateescape')).hexdigest()[:32]}-{file.size}.tar"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": 0, "_coming": [], "_changed": None}


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int | None]:
    """Open a file, and lock it for this process; None if another one has it, or moved it. A kill ends the lock."""
    handle = only_regular(path, os.O_RDWR | os.O_APPEND | flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle if leads_to(path, handle) else None
    except BlockingIOError:
        yield None
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile may have it open
        os.close(handle)
