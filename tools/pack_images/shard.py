"""Packing process: writes shard after shard, each of which appears only when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.base import Samples
from datasets.damage.retry import failure_of
from datasets.shards.tar import TarWriter
from tools.pack_images.encode import Encoder, Packed
from utils.config.data import DataConfig
from utils.errors import TrainingError
from utils.files import parse_json, replacing, write_atomically
from utils.parent import die_with_parent

RECORDS = ".packing"
"""Folder in DST while packing is unfinished, with a record of each finished shard"""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Shard(NamedTuple):
    """Tar file to write."""

    split: str
    number: int
    indices: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.split}/{self.number:05d}.tar"


@dataclass
class Record:
    """Summary of a finished shard."""

    name: str
    bytes: int = 0
    sha256: str = ""
    samples: int = 0
    small: int = 0
    transparent: int = 0
    bytes_before: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each unreadable image"""


class Stopped(Exception):
    """Raised where another process has failed."""


@dataclass
class Work:
    """State that every packing process gets at its start."""

    folder: Path
    splits: dict[str, Samples]
    data: DataConfig
    settings: dict[str, Any]
    done: Any
    """Number of images done, shared, for the progress bar"""
    stop: Any
    """Shared event: stop at the next image"""


_state: tuple[Work, Encoder] | None = None


def start_process(work: Work) -> None:
    """Initialise a packing process: it ignores Ctrl-C, which the main process handles, and dies with that process."""
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    _state = work, Encoder(work.data, work.settings)


def make_shard(shard: Shard) -> Record:
    """Pack a shard, or keep it if it is finished already."""
    assert _state is not None
    work, encoder = _state
    path, record_path = work.folder / shard.name, record_file(work.folder, shard)
    record = finished_record(path, record_path)
    if record is not None:
        _count(work, len(shard.indices))
        return record
    try:
        with replacing(path, sync=False, one_writer=True) as unfinished:
            record = _write(shard, unfinished, work, encoder)
            # The record comes first, so that every tar file under its final name has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        if error.errno in DISK_FULL:
            raise TrainingError(
                f"The disk has no space for {path}: {error.strerror}. Finished tar files stay; free some space, and "
                "the same command resumes."
            ) from None
        raise TrainingError(
            f"{path} cannot be written: {error}. Once it can be written, the same command resumes."
        ) from None
    return record


def _write(shard: Shard, path: Path, work: Work, encoder: Encoder) -> Record:
    record, samples = Record(shard.name), work.splits[shard.split]
    writer = TarWriter(path)
    try:
        for number in shard.indices.tolist():
            if work.stop.is_set():
                raise Stopped
            name, found = samples.name(number), list[tuple[Packed, int]]()
            problem = failure_of(partial(_encode, found, samples, number, name, encoder))
            if problem is not None and problem.kind == "storage":
                raise TrainingError(
                    f"{name} cannot be read: {problem.reason}. The storage failed, not the image. When the storage is "
                    "back, the same command resumes."
                )
            if problem is not None:
                record.left_out.append((name, problem.reason))
            else:
                packed, before = found[-1]
                writer.add(f"{number:08d}", packed.kind, packed.content, int(samples.labels[number]))
                record.samples += 1
                record.small += packed.small
                record.transparent += packed.transparent
                record.bytes_before += before
            _count(work, 1)
    finally:
        writer.close()
    record.bytes, record.sha256 = path.stat().st_size, digest(path)
    return record


def _encode(found: list[tuple[Packed, int]], samples: Samples, number: int, name: str, encoder: Encoder) -> None:
    """Append the encoded image and its size before."""
    encoded = samples.read(number)
    found.append((encoder(encoded, name), encoded.nbytes if isinstance(encoded, np.ndarray) else len(encoded)))


def _count(work: Work, images: int) -> None:
    with work.done.get_lock():
        work.done.value += images


def finished_record(path: Path, record_path: Path) -> Record | None:
    """Record of a shard that is complete and unchanged, else None."""
    try:
        record = Record(**parse_json(record_path.read_bytes()))
        if path.stat().st_size == record.bytes and digest(path) == record.sha256:
            return record
    except (OSError, ValueError, TypeError):
        pass
    return None


def record_file(folder: Path, shard: Shard) -> Path:
    return folder / RECORDS / f"{shard.split}-{shard.number:05d}.json"


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
