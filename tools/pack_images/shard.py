"""Packing process: encodes images and writes shard after shard, each of which appears only when it is complete."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import signal
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from datasets.base import Box, Encoded, Samples
from datasets.damage import failure_of
from datasets.decoding import Reader, Turned, decoding_errors, take_transparent
from datasets.shards.hub import kind_of
from datasets.shards.index import IMAGE_KINDS, TarWriter
from utils.config.data import DataConfig
from utils.errors import TrainingError
from utils.parent import die_with_parent
from vitamp.files import parse_json, replacing, write_atomically


class Packed(NamedTuple):
    kind: str
    """File ending"""
    content: bytes
    small: bool
    """Not larger than the short side, so kept unchanged"""
    transparent: bool = False
    """Has transparent pixels"""


class Encoder:
    """Resizes and encodes an image, or keeps it; raises Unreadable if training could not read it either."""

    def __init__(self, data: DataConfig, settings: dict[str, int | str | bool]) -> None:
        self.reader = Reader(data)
        self.kind = settings["kind"]
        self.short_side, self.quality = int(settings.get("short_side", 0)), int(settings.get("quality", 0))

    def __call__(self, encoded: Encoded, name: str) -> Packed:
        pixels, turned, transparent = self._pixels(encoded)
        small = bool(self.short_side) and min(pixels.shape[:2]) <= self.short_side
        if self.kind == "raw" or isinstance(encoded, np.ndarray):
            content = as_npy(pixels if small or self.kind == "keep" else self._resized(pixels))
            return Packed("npy", content, small, transparent)
        # A file that is kept would follow the settings of training, not those of the other packed images.
        if self.kind == "keep" or (small and not turned and not transparent):
            return Packed(_kind(name, encoded), encoded, small, transparent)
        return Packed("jpg", self._jpeg(pixels if small else self._resized(pixels)), False, transparent)

    def _pixels(self, encoded: Encoded) -> tuple[np.ndarray, bool, bool]:
        """All pixels, whether EXIF rotated them, and whether some of them are transparent."""
        take_transparent()
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        return pixels, isinstance(stored, Turned), bool(take_transparent())

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        """Resized down to the short side. Pillow's filter averages over all pixels, so there is no aliasing."""
        height, width, channels = pixels.shape
        scale = self.short_side / min(height, width)
        size = max(self.short_side, round(width * scale)), max(self.short_side, round(height * scale))
        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC)).reshape(size[1], size[0], channels)

    def _jpeg(self, pixels: np.ndarray) -> bytes:
        """Baseline JPEG with 4:2:0 subsampling, which decodes fastest."""
        image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        file = io.BytesIO()
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return file.getvalue()


def as_npy(pixels: np.ndarray) -> bytes:
    """Pixels as a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _kind(name: str, content: bytes) -> str:
    kind = name.rpartition(".")[2].lower()
    return kind if kind in IMAGE_KINDS and kind != "npy" else kind_of(content)


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
