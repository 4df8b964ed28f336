"""Hashes of stored images, kept in the cache so that the next start reads only images that are new or changed."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from pathlib import Path

import numpy as np

from datasets.base import Samples, Stamp
from utils.cache import cache_folder
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import replacing

WORTH_KEEPING = 0.25
"""Seconds of hashing from which on hashes are kept: small data sets leave no file in the cache."""
RECENT = 2 * 10**9
"""Nanoseconds. A file changed so recently may change again without a new time, so its hash is not kept."""
COLUMNS = 3
"""Key and the two halves of the hash"""


class Hashes:
    """Hashes of images. A damaged, missing or read-only file of kept hashes only costs time."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.read = file, 0
        self._kept = _load(file)
        self._keys = np.ascontiguousarray(self._kept[:, 0])
        self._new: dict[int, bytes] = {}
        self._seconds = 0.0

    def of(self, samples: Samples, index: int, stamp: Stamp) -> bytes:
        """Hash of a stored image. Raises OSError if it cannot be read."""
        key = _key(samples.name(index), stamp)
        place = int(np.searchsorted(self._keys, np.uint64(key)))
        if place < len(self._keys) and int(self._keys[place]) == key:
            return self._kept[place, 1:].tobytes()
        begin = time.perf_counter()
        digest = hashlib.blake2b(bytes(samples.read(index)), digest_size=16).digest()
        self._seconds += time.perf_counter() - begin
        self.read += 1
        if time.time_ns() - stamp.changed > RECENT:
            self._new[key] = digest
        return digest

    def save(self) -> None:
        """Add new hashes to the kept ones. Failure is silent: the next start reads the images again."""
        if self.file is None or not self._new or self._seconds < WORTH_KEEPING:
            return
        new = np.empty((len(self._new), COLUMNS), dtype=np.uint64)
        new[:, 0] = np.fromiter(self._new, dtype=np.uint64, count=len(self._new))
        new[:, 1:] = np.frombuffer(b"".join(self._new.values()), dtype=np.uint64).reshape(-1, COLUMNS - 1)
        both = np.concatenate([self._kept, new])
        try:
            with replacing(self.file, sync=False) as place, place.open("wb") as file:
                np.save(file, both[np.argsort(both[:, 0], kind="stable")])
        except OSError:
            return


def hashes_of(data: DataConfig) -> Hashes:
    """The hashes kept of the data set in DATA_PATH."""
    if data.DATA_PATH is None:
        return Hashes(None)
    place = os.path.abspath(os.path.expanduser(data.DATA_PATH))
    try:
        folder = cache_folder(data, "hashes")
    except UserError:  # where nothing can be written, nothing is kept
        return Hashes(None)
    return Hashes(folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.npy")


def _key(name: str, stamp: Stamp) -> int:
    """64 bits that change with an image's name, size and time of change."""
    text = b"%b\0%d\0%d" % (os.fsencode(name), stamp.size, stamp.changed)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _load(file: Path | None) -> np.ndarray:
    nothing = np.empty((0, COLUMNS), dtype=np.uint64)
    if file is None:
        return nothing
    try:
        with file.open("rb") as opened:
            kept = np.lib.format.read_array(opened, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError, OverflowError, SyntaxError, zipfile.BadZipFile):
        return nothing
    sound = kept.dtype == np.uint64 and kept.ndim == 2 and kept.shape[1] == COLUMNS
    return kept if sound and (kept[1:, 0] >= kept[:-1, 0]).all() else nothing
