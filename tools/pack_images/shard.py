"""The work of one packing process: shard after shard, each there whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.base import Samples
from datasets.damage.retry import failure_of
from datasets.shards.tar import TarWriter
from tools.pack_images.encode import Encoder, Packed
from utils.config.data import DataConfig
from utils.errors import TrainingError
from utils.files import write_whole

PR_SET_PDEATHSIG = 1
RECORDS = ".packing"
"""Folder in DST, as long as packing is not done: what each finished shard holds."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Shard(NamedTuple):
    """One tar file to be made."""

    part: str
    number: int
    indices: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.part}/{self.number:05d}.tar"


@dataclass
class Record:
    """What a shard holds."""

    name: str
    bytes: int = 0
    sha256: str = ""
    samples: int = 0
    small: int = 0
    bytes_before: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each broken image"""


class Stopped(Exception):
    """Another process found a reason to end."""


@dataclass
class Work:
    """What a packing process is given at its start."""

    folder: Path
    parts: dict[str, Samples]
    data: DataConfig
    how: dict[str, Any]
    done: Any
    """shared number of images, for the progress bar"""
    stop: Any
    """shared event: leave at the next image"""


_here: tuple[Work, Encoder] | None = None


def start_process(work: Work) -> None:
    """Begin a packing process. It leaves Ctrl-C to the one that started it, and does not outlive that one."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    _here = work, Encoder(work.data, work.how)


def make_shard(shard: Shard) -> Record:
    """Pack a shard, or take it as it is when it was finished before."""
    assert _here is not None
    work, encoder = _here
    path, kept = work.folder / shard.name, record_file(work.folder, shard)
    record = finished(path, kept)
    if record is not None:
        _count(work, len(shard.indices))
        return record
    part = path.with_name(f".{path.name}.part")
    try:
        record = _write(shard, part, work, encoder)
        # The record first: a tar file under its own name always has one.
        write_whole(kept, json.dumps(asdict(record)).encode())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)  # gives back room where there is none
        if error.errno in FULL:
            raise TrainingError(
                f"No room is left for {path}: {error.strerror}. The tar files that are finished stay; make room, and "
                f"the same command goes on."
            ) from None
        raise TrainingError(f"{path} cannot be written: {error}. The same command goes on once it can.") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return record


def _write(shard: Shard, path: Path, work: Work, encoder: Encoder) -> Record:
    record, samples = Record(shard.name), work.parts[shard.part]
    writer = TarWriter(path)
    try:
        for number in shard.indices.tolist():
            if work.stop.is_set():
                raise Stopped
            name, found = samples.name(number), list[tuple[Packed, int]]()
            problem = failure_of(_encoding(samples, number, name, encoder, found))
            if problem is not None and problem.kind == "storage":
                raise TrainingError(
                    f"{name} cannot be read: {problem.reason}. That is the storage, not the image. When the storage is "
                    f"back, the same command goes on."
                )
            if problem is not None:
                record.left_out.append((name, problem.reason))
            else:
                packed, before = found[-1]
                writer.add(f"{number:08d}", packed.kind, packed.content, int(samples.labels[number]))
                record.samples += 1
                record.small += packed.small
                record.bytes_before += before
            _count(work, 1)
    finally:
        writer.close()
    record.bytes, record.sha256 = path.stat().st_size, digest(path)
    return record


def _encoding(
    samples: Samples, number: int, name: str, encoder: Encoder, found: list[tuple[Packed, int]]
) -> Callable[[], None]:
    def encode() -> None:
        encoded = samples.read(number)
        found.append((encoder(encoded, name), encoded.nbytes if isinstance(encoded, np.ndarray) else len(encoded)))

    return encode


def _count(work: Work, images: int) -> None:
    with work.done.get_lock():
        work.done.value += images


def finished(path: Path, kept: Path) -> Record | None:
    """The record of a shard that is there whole and unchanged."""
    try:
        record = Record(**json.loads(kept.read_bytes()))
        if path.stat().st_size == record.bytes and digest(path) == record.sha256:
            return record
    except (OSError, ValueError, TypeError):
        pass
    return None


def record_file(folder: Path, shard: Shard) -> Path:
    return folder / RECORDS / f"{shard.part}-{shard.number:05d}.json"


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
