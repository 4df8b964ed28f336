"""Whole tar files of a store on a disk of this machine, for all of its processes and for later runs (DATA.CACHE_GB).

A thread in each loading process downloads the files that coming batches need; a lock leaves each file to one of them.
Nobody waits for a download: images of a file that is not there yet are requested by themselves.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datasets.base import remark
from datasets.shards.index import BLOCK, Remote, ShardFile
from utils.text import redacted
from vitamp.files import leads_to, only_regular

HASH = "sha256:"
"""Beginning of the stamp of a file whose hash is known"""
SECONDS_TO_REST = 5.0
"""Without downloads after the disk failed or was full, or a file was not what it should be"""
SECONDS_ABANDONED = 600.0
"""After which an unfinished file may make room"""


class ShardCache:
    """The tar files of a split that are in a folder.

    Other splits, stores and runs share the folder. The file that was not used for the longest time makes room.
    """

    def __init__(self, store: Remote, files: Sequence[ShardFile], folder: Path, limit: float) -> None:
        """`limit`: most bytes in the folder."""
        self.folder, self.limit = folder, limit
        self._store, self._files = store, files
        self._needed, self._coming = list[int](), list[int]()
        self._changed: threading.Condition | None = None

    def has(self, number: int) -> bool:
        """Whether a file is here in full. From now on it counts as just used."""
        path = self._path(number)
        try:
            os.utime(path)
            return path.stat().st_size == self._files[number].size
        except OSError:
            return False

    def range(self, number: int, offset: int, size: int) -> np.ndarray | None:
        """Bytes of a file; None if it is not here, or no longer."""
        content = np.empty(size, dtype=np.uint8)
        try:
            with open(self._path(number), "rb", buffering=0, opener=only_regular) as file:
                return content if os.preadv(file.fileno(), [content.data], offset) == size else None
        except OSError:
            return None

    def room(self) -> float:
        """Bytes that the folder may have."""
        return min(self.limit, self._free() + self.bytes_used())

    def bytes_used(self) -> int:
        return sum(size for _, size, _ in self._kept())

    def __str__(self) -> str:
        return f"{self.folder}, of at most {self.limit / 1e9:g} GB (DATA.CACHE_GB)"

    def announce(self, numbers: Sequence[int], most: int) -> None:
        """Download these files, then those that were announced before: in all so many, none of which makes room."""
        if self._changed is None:
            self._changed = threading.Condition()
            threading.Thread(target=self._work, args=(self._changed,), daemon=True).start()
        with self._changed:
            self._needed = list(dict.fromkeys([*numbers, *self._needed]))[:most]
            self._coming = self._needed.copy()
            self._changed.notify()

    def _work(self, changed: threading.Condition) -> None:
        while True:
            with changed:
                changed.wait_for(lambda: self._coming)
                number = self._coming.pop(0)
            if self.has(number):
                continue
            unfinished = self._path(number).with_suffix(".part")
            try:
                self._download(number, unfinished)
            except OSError as error:
                remark(
                    f"{self.folder}: tar files of {self._store.root} cannot be kept: {error.strerror or error}. Their "
                    "images are requested by themselves meanwhile; the download is repeated."
                )
                with contextlib.suppress(OSError):  # the disk may allow nothing; this thread goes on
                    unfinished.unlink()
                time.sleep(SECONDS_TO_REST)

    def _download(self, number: int, unfinished: Path) -> None:
        """Fetch the rest of a file, unless another process does. OSError: it cannot be kept."""
        name, size, stamp = self._files[number]
        with open(unfinished, "a+b", opener=only_regular) as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a kill ends it
            except BlockingIOError:
                return
            if not leads_to(unfinished, opened.fileno()):  # another process has finished it meanwhile
                return
            os.utime(unfinished)
            self._make_room(size)
            while (begin := os.fstat(opened.fileno()).st_size) < size:
                wanted = (name, begin, min(BLOCK, size - begin))
                if (content := self._store.ranges([wanted]).get(wanted)) is None:
                    return  # the store fails: what there is stays for the next time
                opened.write(content.data)
                opened.flush()
            opened.seek(0)
            if stamp.startswith(HASH) and hashlib.file_digest(opened, "sha256").hexdigest() != stamp[len(HASH) :]:
                raise OSError("what was sent has another hash than in dataset.json")
            os.fsync(opened.fileno())
            os.replace(unfinished, self._path(number))

    def _make_room(self, size: int) -> None:
        """Remove files until the folder, with the one that is being downloaded, is within its limit."""
        while self.bytes_used() > self.limit or self._free() < size:
            self._remove_oldest()

    def _free(self) -> float:
        return shutil.disk_usage(self.folder).free

    def _kept(self) -> list[tuple[float, int, Path]]:
        """When each file in the folder was used, its size when it is finished, and path; the oldest first."""
        found = []
        for path in self.folder.glob("*-*.*"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # removed meanwhile; of someone else
                found.append((path.stat().st_mtime, int(path.stem.rpartition("-")[2]), path))
        return sorted(found)

    def _remove_oldest(self) -> None:
        """Remove a file. OSError: all are needed, or are being downloaded."""
        needed = {self._path(number) for number in self._needed}
        for used, _, path in self._kept():
            abandoned = path.suffix == ".part" and used < time.time() - SECONDS_ABANDONED
            if abandoned or (path.suffix == ".tar" and path not in needed):
                return self._remove(path)
        raise OSError("there is no room")

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        """The name changes with the file as far as the store shows that, and also says the size."""
        file = self._files[number]
        of = "\0".join((redacted(self._store.root), file.name, file.stamp)).encode(errors="surrogateescape")
        return self.folder / f"{hashlib.sha256(of).hexdigest()[:32]}-{file.size}.tar"
