"""Whole tar files of a store on a disk of this machine, for all of its processes and for later runs (DATA.CACHE_GB).

A thread in each loading process downloads the files that coming batches need; a lock leaves each file to one of them.
Nobody waits for a download: images of a file that is not there yet are requested by themselves.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from io import BufferedRandom
from pathlib import Path

import numpy as np

from datasets.base import remark
from datasets.shards.index import BLOCK, Remote, ShardFile
from utils.cache import cache_folder
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import warn_once
from utils.text import redacted
from vitamp.files import leads_to, only_regular

HASH = "sha256:"
"""Beginning of the stamp of a file whose hash is known"""
SECONDS_TO_REST = 5.0
"""Without downloads after the disk failed or was full, or a file was not what it should be"""
SECONDS_ABANDONED = 600.0
"""After which an unfinished file may make room"""
TRIED = 64 << 10
"""Bytes of a file that are requested to try the store"""
MARK = "written-by-vitamp.txt"
MARK_TEXT = """vitamp writes tar files here, named by 32 hexadecimal digits and a size, and removes them.
DATA.CACHE_GB is their most. It leaves all other files alone.
"""
OWN_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{1,18})\.(tar|part)")
BEGAN = "VITAMP_CACHE_BEGAN"
"""Environment variable with the time when this run first used the cache, for the processes that it starts"""


def tar_folder(data: DataConfig) -> Path:
    """The folder of tar files in the cache. It has a mark: without one, its files are someone else's."""
    for name in ("tars", "tars-vitamp"):
        folder = cache_folder(data, name)
        try:
            names = os.listdir(folder)
            if not names:
                (folder / MARK).write_text(MARK_TEXT)
        except OSError as error:
            raise UserError(f"DATA.CACHE: {folder} cannot be used: {error}. Name a writable folder.") from None
        if not names or MARK in names:
            return folder
        warn_once(f"{folder} has files that this cache did not write; they are left alone.", logging.INFO)
    raise UserError(f"DATA.CACHE: {folder} has files that vitamp did not write. Name another folder.")


class ShardCache:
    """The tar files of a split that are in a folder.

    Other splits, stores and runs share the folder. The file that was not used for the longest time makes room.
    A file's mtime is when its content was last checked, if its hash is known; its atime is when it was last used.
    """

    def __init__(self, store: Remote, files: Sequence[ShardFile], folder: Path, limit: float) -> None:
        """`limit`: most bytes in the folder."""
        self.folder = folder
        self.limit = limit
        self._store = store
        self._files = files
        self._needed = list[int]()
        self._coming = list[int]()
        self._changed: threading.Condition | None = None
        self._began = float(os.environ.setdefault(BEGAN, str(time.time())))
        self._checked = set[int]()
        """Files of earlier runs whose hash is right"""
        self.refusal = ""
        """Why no file of the store can be trusted: one is not what dataset.json lists"""

    def has(self, number: int) -> bool:
        """Whether a file is here in full. From now on it counts as just used.

        At its first use in a run on this machine, its hash is checked. TrainingError: see `refusal`.
        """
        if self.refusal:
            raise TrainingError(self.refusal)
        path = self._path(number)
        try:
            about = path.stat()
            if about.st_size != self._files[number].size:
                return False
            if not self._hash(number):
                os.utime(path)
            elif about.st_mtime < self._began and number not in self._checked:
                return self._check(number, path)
            else:
                with contextlib.suppress(PermissionError):  # only the owner may set times other than now
                    os.utime(path, (time.time(), about.st_mtime))
        except OSError:
            return False
        return True

    def range(self, number: int, offset: int, size: int) -> np.ndarray | None:
        """Bytes of a file; None if it is not here, or no longer."""
        if not self.has(number):
            return None
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
            needed = list(numbers) + self._needed
            self._needed = list(dict.fromkeys(needed))[:most]
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
                if self.refusal:
                    return
            except OSError as error:
                reason = error.strerror or error
                remark(
                    f"{self.folder}: tar files of {self._store.root} cannot be kept: {reason}. Their "
                    "images are requested by themselves meanwhile; the download is repeated."
                )
                with contextlib.suppress(OSError):  # the disk may allow nothing; this thread goes on
                    unfinished.unlink()
                time.sleep(SECONDS_TO_REST)

    def check(self, number: int) -> None:
        """Download a file whose hash is known, if the disk allows it.

        UserError if its content has another hash; OSError if the store fails, or is too slow.
        """
        if not self._hash(number) or self.has(number):
            return
        file = self._files[number]
        self._store.range((file.name, 0, min(file.size, TRIED)))
        with contextlib.suppress(OSError):
            self._download(number, self._path(number).with_suffix(".part"))
        if self.refusal:
            raise UserError(self.refusal)

    def _download(self, number: int, unfinished: Path) -> None:
        """Fetch the rest of a file, unless another process does. OSError: it cannot be kept."""
        file = self._files[number]
        with open(unfinished, "a+b", opener=only_regular) as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a kill ends it
            except BlockingIOError:
                return
            if not leads_to(unfinished, opened.fileno()):  # another process has finished it meanwhile
                return
            os.utime(unfinished)
            self._make_room(file.size)
            for _ in range(2):  # what is damaged on the way, or was on this disk, is fetched once more
                if not self._fetch_rest(file, opened):
                    return  # the store fails: what there is stays for the next time
                if self._is_listed(number, opened):
                    os.fsync(opened.fileno())
                    os.utime(unfinished)
                    os.replace(unfinished, self._path(number))
                    return
                opened.truncate(0)
            unfinished.unlink()
            self.refusal = (
                f"{self._store.root}/{file.name} has another hash (sha256) than in dataset.json: it was changed or "
                "damaged after it was packed. Copy or pack it again."
            )

    def _fetch_rest(self, file: ShardFile, opened: BufferedRandom) -> bool:
        """Append what a file lacks; False if the store fails."""
        while (begin := os.fstat(opened.fileno()).st_size) < file.size:
            wanted = (file.name, begin, min(BLOCK, file.size - begin))
            content = self._store.ranges([wanted]).get(wanted)
            if content is None:
                return False
            opened.write(content.data)
            opened.flush()
        return True

    def _hash(self, number: int) -> str:
        """The hash of a file in dataset.json; '' if it is not known."""
        stamp = self._files[number].stamp
        return stamp.removeprefix(HASH) if stamp.startswith(HASH) else ""

    def _is_listed(self, number: int, opened: BufferedRandom) -> bool:
        """Whether the content is that of dataset.json, as far as its hash is known."""
        expected = self._hash(number)
        if not expected:
            return True
        opened.seek(0)
        return hashlib.file_digest(opened, "sha256").hexdigest() == expected

    def _check(self, number: int, path: Path) -> bool:
        """Whether a file from an earlier run has the right content; else it is removed. Others wait meanwhile."""
        with open(path, "r+b", opener=only_regular) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            checked = os.fstat(opened.fileno()).st_mtime >= self._began  # by another process, meanwhile
            if checked or self._is_listed(number, opened):
                self._checked.add(number)
                os.utime(path)
                return True
            remark(f"{path} is damaged (its sha256 is not the one in dataset.json), so it is downloaded again.")
            path.unlink(missing_ok=True)
        return False

    def _make_room(self, size: int) -> None:
        """Remove files until the folder, with the one that is being downloaded, is within its limit."""
        while self.bytes_used() > self.limit or self._free() < size:
            self._remove_oldest()

    def _free(self) -> float:
        return shutil.disk_usage(self.folder).free

    def _kept(self) -> list[tuple[float, int, Path]]:
        """When each of our files in the folder was used, its size when it is finished, and path; the oldest first."""
        found = []
        for path in self.folder.glob("*-*.*"):
            name = OWN_NAME.fullmatch(path.name)
            if name is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                about = path.lstat()
                size = int(name[1])
                whole = path.suffix == ".part" or about.st_size == size
                if whole and stat.S_ISREG(about.st_mode):
                    found.append((max(about.st_atime, about.st_mtime), size, path))
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
