"""Cache whole tar files of a remote store on a disk, for all processes of a machine and for later runs.

DATA.CACHE_GB limits its size. A thread in each loading process downloads the files that coming batches need; a lock
leaves each file to one of them. Nobody waits for a download: if a file is not there yet, its images are requested one
by one.
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
"""Time without downloads after the disk failed or was full"""
SECONDS_ABANDONED = 600.0
"""Time without use after which an unfinished file may be removed to make room"""
TRIED = 64 << 10
"""Bytes of a file that are requested to see whether the store answers"""
MARK = "written-by-vitamp.txt"
MARK_TEXT = """vitamp writes tar files here, named by 32 hexadecimal digits and a size, and removes them.
DATA.CACHE_GB is their most. It leaves all other files alone.
"""
OWN_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{1,18})\.(tar|part)")
BEGAN = "VITAMP_CACHE_BEGAN"
"""Environment variable with the time when this run first used the cache, for the processes that it starts"""


def tar_folder(data: DataConfig) -> Path:
    """Return the folder in DATA.CACHE that holds tar files, and mark a new one as ours by the file MARK.

    A folder with other files and no mark belongs to someone else, so another name is tried. UserError if none is left.
    """
    for name in ("tars", "tars-vitamp"):
        folder = cache_folder(data, name)
        try:
            content = os.listdir(folder)
            is_new = len(content) == 0
            if is_new:
                (folder / MARK).write_text(MARK_TEXT)
        except OSError as error:
            raise UserError(f"DATA.CACHE: {folder} cannot be used: {error}. Name a writable folder.") from None
        if is_new or MARK in content:
            return folder
        warn_once(f"{folder} has files that this cache did not write; they are left alone.", logging.INFO)
    raise UserError(f"DATA.CACHE: {folder} has files that vitamp did not write. Name another folder.")


class ShardCache:
    """The tar files of one split, as far as they are in the cache's folder. Files are numbered as in the split.

    Other splits, stores and runs share the folder. The file that was not used for the longest time is removed first.
    A file's atime is the time of its last use. If its hash is known, its mtime is the time of the last check.
    """

    def __init__(self, store: Remote, files: Sequence[ShardFile], folder: Path, limit: float) -> None:
        """Use `folder` as the cache of a split. `files`: all its tar files. `limit`: most bytes in the folder."""
        self.folder = folder
        self.limit = limit
        self._store = store
        self._files = files
        self._needed = list[int]()
        """Numbers of the files that coming batches need; they are not removed"""
        self._to_download = list[int]()
        """Numbers of the needed files at which the thread that downloads has not looked yet"""
        self._changed: threading.Condition | None = None
        """Wakes the thread that downloads; None until the thread is started"""
        self._began = float(os.environ.setdefault(BEGAN, str(time.time())))
        """Time when this run began. It is in the environment, so that loading processes have the same time."""
        self._checked = set[int]()
        """Numbers of the files of earlier runs whose hash is right"""
        self.refusal = ""
        """Why no file of the store can be trusted: one has another hash than in dataset.json; '' if all can"""

    def has(self, number: int) -> bool:
        """Tell whether a file is in the cache, complete and undamaged, and note that it was just used.

        The time of the use is the file's atime. If its hash is known, it is checked at the first use in a run on this
        machine, and its mtime is the time of that check. Raises TrainingError if there is a `refusal`.
        """
        if self.refusal:
            raise TrainingError(self.refusal)
        path = self._path(number)
        try:
            stat_result = path.stat()
            if stat_result.st_size != self._files[number].size:
                return False
            hash_is_known = self._hash(number) != ""
            checked_in_this_run = stat_result.st_mtime >= self._began or number in self._checked
            if not hash_is_known:
                os.utime(path)
            elif not checked_in_this_run:
                return self._check(number, path)
            else:
                # Set only the atime. Any other user than the owner may set both times to now, but not keep one.
                with contextlib.suppress(PermissionError):
                    os.utime(path, (time.time(), stat_result.st_mtime))
        except OSError:
            return False
        return True

    def range(self, number: int, offset: int, size: int) -> np.ndarray | None:
        """Read bytes of a file from the cache; None if the file is not in it, or no longer."""
        if not self.has(number):
            return None
        content = np.empty(size, dtype=np.uint8)
        try:
            with open(self._path(number), "rb", buffering=0, opener=only_regular) as file:
                bytes_read = os.preadv(file.fileno(), [content.data], offset)
                return content if bytes_read == size else None
        except OSError:
            return None

    def room(self) -> float:
        """Return how many bytes of tar files the folder can hold, by its limit and by the free space of the disk."""
        return min(self.limit, self._free() + self.bytes_used())

    def bytes_used(self) -> int:
        """Return how many bytes the tar files in the folder have, when those that are being downloaded are complete."""
        return sum(size for _, size, _ in self._files_by_last_use())

    def __str__(self) -> str:
        return f"{self.folder}, of at most {self.limit / 1e9:g} GB (DATA.CACHE_GB)"

    def announce(self, numbers: Sequence[int], most: int) -> None:
        """Have files downloaded by a thread: first these, then those that were announced before.

        The last `most` files that were announced count as needed: only they are downloaded, and they are not removed
        to make room.
        """
        if self._changed is None:  # the thread is not started yet
            self._changed = threading.Condition()
            threading.Thread(target=self._download_announced, args=(self._changed,), daemon=True).start()
        with self._changed:
            needed = list(numbers) + self._needed
            self._needed = list(dict.fromkeys(needed))[:most]  # each number once
            # The thread takes numbers out of this list, and skips files that it finds in the cache.
            self._to_download = self._needed.copy()
            self._changed.notify()

    def _download_announced(self, changed: threading.Condition) -> None:
        """Download the announced files that are missing, one after another. Runs in a thread of its own, for ever.

        It ends if a file has a wrong hash: then `_download` sets `refusal`, and no file of the store is used.
        """
        while True:
            with changed:
                changed.wait_for(lambda: self._to_download)
                number = self._to_download.pop(0)
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
                with contextlib.suppress(OSError):  # the disk may refuse this, too; then the thread continues
                    unfinished.unlink()
                time.sleep(SECONDS_TO_REST)

    def check(self, number: int) -> None:
        """Download a file and compare its hash before training begins. A file whose hash is not known is left alone.

        Raises UserError if the hash differs, and OSError if the store fails or is too slow. If the disk has no space,
        nothing is checked.
        """
        if not self._hash(number) or self.has(number):
            return
        file = self._files[number]
        # Request the first bytes, for the error of a store that fails: `_download` raises only those of the disk.
        self._store.range((file.name, 0, min(file.size, TRIED)))
        with contextlib.suppress(OSError):
            self._download(number, self._path(number).with_suffix(".part"))
        if self.refusal:  # set by `_download` if the hash differs
            raise UserError(self.refusal)

    def _download(self, number: int, unfinished: Path) -> None:
        """Download what is missing of a file, check its hash, and rename it from `unfinished` to its name.

        Returns without the file if another process downloads it, or if the store fails. Raises OSError if the disk has
        no space. If the hash is wrong twice, `refusal` is set.
        """
        file = self._files[number]
        with open(unfinished, "a+b", opener=only_regular) as opened:
            try:
                # The lock ends with the process, even if it is killed.
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process downloads the file
                return
            # Another process may have finished and renamed it before the lock was taken: then the path no longer leads
            # to the opened file.
            if not leads_to(unfinished, opened.fileno()):
                return
            os.utime(unfinished)  # so that it does not count as abandoned
            self._make_room(file.size)
            for _ in range(2):  # a file that was damaged by the network or the disk is downloaded once more
                if not self._fetch_rest(file, opened):
                    return  # the store fails: the bytes so far stay for the next time
                if self._has_listed_hash(number, opened):
                    os.fsync(opened.fileno())
                    os.utime(unfinished)
                    os.replace(unfinished, self._path(number))
                    return
                opened.truncate(0)
            # The hash was wrong twice.
            unfinished.unlink()
            self.refusal = (
                f"{self._store.root}/{file.name} has another hash (sha256) than in dataset.json: it was changed or "
                "damaged after it was packed. Copy or pack it again."
            )

    def _fetch_rest(self, file: ShardFile, opened: BufferedRandom) -> bool:
        """Download the missing end of a file and append it. Returns False if the store fails."""
        while (begin := os.fstat(opened.fileno()).st_size) < file.size:
            wanted = (file.name, begin, min(BLOCK, file.size - begin))
            content = self._store.ranges([wanted]).get(wanted)
            if content is None:
                return False
            opened.write(content.data)
            opened.flush()
        return True

    def _hash(self, number: int) -> str:
        """Return the hash of a file in dataset.json; '' if it is not known."""
        stamp = self._files[number].stamp
        return stamp.removeprefix(HASH) if stamp.startswith(HASH) else ""

    def _has_listed_hash(self, number: int, opened: BufferedRandom) -> bool:
        """Tell whether a file has the hash that dataset.json lists; True if the hash is not known."""
        expected = self._hash(number)
        if not expected:
            return True
        opened.seek(0)
        return hashlib.file_digest(opened, "sha256").hexdigest() == expected

    def _check(self, number: int, path: Path) -> bool:
        """Tell whether a file from an earlier run has the right hash, and remove it if not.

        A file with the right hash gets the present time as its mtime. Other processes that want to check the file wait
        for the lock, and then see by the mtime that it was checked in this run.
        """
        with open(path, "r+b", opener=only_regular) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            was_checked = os.fstat(opened.fileno()).st_mtime >= self._began  # by another process, meanwhile
            if was_checked or self._has_listed_hash(number, opened):
                self._checked.add(number)
                os.utime(path)
                return True
            remark(f"{path} is damaged (its sha256 is not the one in dataset.json), so it is downloaded again.")
            path.unlink(missing_ok=True)
        return False

    def _make_room(self, size: int) -> None:
        """Remove files until one of `size` bytes fits on the disk and the folder is within its limit.

        The folder's size includes the file that is being downloaded. Raises OSError if no file may be removed.
        """
        while self.bytes_used() > self.limit or self._free() < size:
            self._remove_oldest()

    def _free(self) -> float:
        return shutil.disk_usage(self.folder).free

    def _files_by_last_use(self) -> list[tuple[float, int, Path]]:
        """List our files in the folder, those that were not used for the longest time first.

        Each is (time of the last use, bytes when it is complete, path). Files that are being downloaded count, too.
        """
        files = []
        for path in self.folder.glob("*-*.*"):
            name = OWN_NAME.fullmatch(path.name)
            if name is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat_result = path.lstat()
                size = int(name[1])
                is_valid = path.suffix == ".part" or stat_result.st_size == size
                if is_valid and stat.S_ISREG(stat_result.st_mode):
                    last_use = max(stat_result.st_atime, stat_result.st_mtime)
                    files.append((last_use, size, path))
        return sorted(files)

    def _remove_oldest(self) -> None:
        """Remove the file that was not used for the longest time. OSError if all are needed or being downloaded.

        Unfinished files (.part) are removed only if they seem abandoned.
        """
        needed = {self._path(number) for number in self._needed}
        for last_use, _size, path in self._files_by_last_use():
            is_abandoned = path.suffix == ".part" and last_use < time.time() - SECONDS_ABANDONED
            if is_abandoned or (path.suffix == ".tar" and path not in needed):
                return self._remove(path)
        raise OSError("there is no room")

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        """Return the path of a file in the cache. It changes when the store's file does, and names the size."""
        file = self._files[number]
        identity = "\0".join((redacted(self._store.root), file.name, file.stamp)).encode(errors="surrogateescape")
        return self.folder / f"{hashlib.sha256(identity).hexdigest()[:32]}-{file.size}.tar"
