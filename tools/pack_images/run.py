"""Packing of a data set: plans the shards, runs the packing processes, and writes index and manifest.

A shard appears only when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import multiprocessing
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from datasets import check_dataset, open_dataset
from datasets.base import Box, Encoded, Samples
from datasets.damage import allowed, failure_of, name_prefix
from datasets.decoding import Reader, Turned, decoding_errors, take_transparent
from datasets.shards.hub import kind_of
from datasets.shards.index import IMAGE_KINDS, TarSamples, TarWriter, read_shard
from datasets.shards.source import MADE_BY, MANIFEST, ShardSet, finish_set
from datasets.shards.stores import Folder, ShardFile
from tools.common.turns import progress_bar
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.machine.cpus import cores
from utils.program import die_with_parent
from utils.seeding import key
from utils.text import counted
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
            file, kept = io.BytesIO(), pixels if small or self.kind == "keep" else self._resized(pixels)
            np.lib.format.write_array(file, np.ascontiguousarray(kept), version=(1, 0), allow_pickle=False)
            return Packed("npy", file.getvalue(), small, transparent)
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
    path = work.folder / shard.name
    record_path = work.folder / RECORDS / f"{shard.split}-{shard.number:05d}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Record(**parse_json(record_path.read_bytes()))
        if path.stat().st_size == record.bytes and digest(path) == record.sha256:
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
    finally:
        writer.close()
    record.bytes, record.sha256 = path.stat().st_size, digest(path)
    return record


def _encode(found: list[tuple[Packed, int]], samples: Samples, number: int, name: str, encoder: Encoder) -> None:
    """Append the encoded image and its size before."""
    encoded = samples.read(number)
    found.append((encoder(encoded, name), encoded.nbytes if isinstance(encoded, np.ndarray) else len(encoded)))


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SPLITS = {"train": True, "val": False}
SETTINGS = "settings.json"
KEYS = {"channels": "DATA.IMAGE_CHANNELS", "upright": "DATA.EXIF_ROTATE", "background": "DATA.BACKGROUND"}
"""Entries of a packed data set -> the settings that they are from"""
ANY_CLASSES = 1 << 31
"""Packing has no classifier, so no label is out of range"""


def pack(data: DataConfig, num_classes: int, folder: Path, settings: dict[str, Any], jobs: int | None) -> None:
    """Pack both splits of a data set into `folder`."""
    if data.DOWNLOAD:
        check_dataset(data, num_classes)  # downloads it
    splits = {split: _samples(data, train) for split, train in SPLITS.items()}
    about = {"how": settings, "source": {split: _identity(samples, data) for split, samples in splits.items()}}
    if _is_done(folder, about, data):
        log.info("%s is packed already, with these settings from these images.", folder)
        return
    _create_folders(folder, about)
    shards = [shard for split, samples in splits.items() for shard in _plan(split, samples, settings["shard_images"])]
    work = Work(folder, splits, data, settings, multiprocessing.Event())
    records = _make_shards(work, shards, jobs or cores())
    _finish(folder, records, about, splits["train"].classes, jobs or cores())


def _samples(data: DataConfig, train: bool) -> Samples:
    samples = open_dataset(data, train, ANY_CLASSES, 0, torch.device("cpu")).single_images()
    if samples is None:
        raise UserError(f"DATA.DATASET {data.DATASET} is held in memory: packing cannot make it faster.")
    return samples


def _identity(samples: Samples, data: DataConfig) -> dict[str, Any]:
    """Names and labels of the images, compared when packing resumes; SRC itself may have moved."""
    names, prefix = hashlib.sha256(samples.labels.tobytes()), name_prefix(data)
    for index in range(len(samples)):
        names.update(samples.name(index).removeprefix(prefix).encode(errors="surrogateescape") + b"\n")
    return {"dataset": data.DATASET, "images": len(samples), "sha256": names.hexdigest()}


def _is_done(folder: Path, about: dict[str, Any], data: DataConfig) -> bool:
    """True if everything is packed already. UserError if the folder has other content."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f"DST {folder} is a file; name a new or empty folder.")
    before: dict[str, Any] | None = None
    for file in (folder / MANIFEST, folder / RECORDS / SETTINGS):
        try:
            before = parse_json(file.read_bytes())
            break
        except (OSError, ValueError):
            continue
    if before is None and (other := _foreign_entry(folder)):
        raise UserError(f"DST {folder} has other content, such as {other}. Name a new or empty folder.")
    if before is None:
        return False
    packed = {name: before.get(name) for name in about}
    if isinstance(packed["how"], dict) and "background" in about["how"]:
        packed["how"] = {"background": "drop", **packed["how"]}  # what version 0.1 did, and did not record
    if before.get("made_by") != MADE_BY or packed != about:
        raise UserError(f"DST {folder} has a data set packed {_difference(packed, about)}. Name another folder.")
    if not (folder / MANIFEST).exists():
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
        return False
    ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
    return True


def _foreign_entry(folder: Path) -> str | None:
    """Entry that `_create_folders` does not make: it may have been interrupted, and then the folder can be used."""
    for path in sorted(folder.iterdir()):
        if path.name not in (RECORDS, *SPLITS) or not path.is_dir():
            return path.name
        if path.name in SPLITS and (inside := next(path.iterdir(), None)):
            return f"{path.name}/{inside.name}"
    return None


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    old = before["how"] if isinstance(before.get("how"), dict) else {}
    for name, value in now["how"].items():
        if old.get(name) != value:
            before_and_now = f"{old.get(name)}, not {value}".lower()  # true, as in a settings file
            return f"with {KEYS.get(name, name)} {before_and_now}"
    return "from other images"


def _create_folders(folder: Path, about: dict[str, Any]) -> None:
    try:
        for name in (RECORDS, *SPLITS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        content = json.dumps({"made_by": MADE_BY, **about}, indent=1)
        write_atomically(folder / RECORDS / SETTINGS, content.encode())
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None


def _plan(split: str, samples: Samples, shard_images: int) -> list[Shard]:
    """Shards of a split. Training images are shuffled, so that each shard has all classes."""
    order = np.arange(len(samples))
    if split == "train":
        order = np.random.Generator(np.random.Philox(key=key("pack", len(samples)))).permutation(order)
    firsts = range(0, len(order), shard_images)
    return [Shard(split, number, order[first : first + shard_images]) for number, first in enumerate(firsts)]


def _make_shards(work: Work, shards: list[Shard], jobs: int) -> list[Record]:
    """Pack the shards in `jobs` processes; records in their order."""
    limit = allowed(work.data.MAX_BAD, sum(map(len, work.splits.values())))
    pool = ProcessPoolExecutor(min(jobs, len(shards)), initializer=start_process, initargs=(work,))
    bad = 0
    try:
        futures = {pool.submit(make_shard, shard): shard for shard in shards}
        with progress_bar(sum(len(shard.indices) for shard in shards), "images", "packing") as bar:
            for future in as_completed(futures):
                record = future.result()
                bar.update(len(futures[future].indices))
                for name, reason in record.left_out:
                    bad += 1
                    log.warning("left out: %s: %s (%d so far; DATA.MAX_BAD allows %d)", name, reason, bad, limit)
                if bad > limit:
                    raise TrainingError(
                        f"{bad} images cannot be read, and DATA.MAX_BAD allows {limit}. Raise DATA.MAX_BAD and "
                        "repeat the command, which resumes; or repair them, or exclude them with DATA.EXCLUDE, and "
                        "pack into another folder."
                    )
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise TrainingError(
            "A packing process was killed, probably by the out-of-memory killer. Resume with the same command and a "
            "smaller -num_workers."
        ) from None
    finally:
        work.stop.set()
        pool.shutdown(cancel_futures=True)


def _finish(folder: Path, records: list[Record], about: dict[str, Any], classes: list[str] | None, jobs: int) -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for record in records:
        names[record.name.partition("/")[0]].append(record.name)
    small, left_out = sum(record.small for record in records), [image for r in records for image in r.left_out]
    manifest = {"classes": classes, **about, "small": small, "left_out": [f"{n}: {why}" for n, why in left_out]}
    checksums = {record.name: {"sha256": record.sha256} for record in records}

    def read_all(found: Iterable[ShardFile]) -> Iterable[TarSamples]:
        with ProcessPoolExecutor(jobs, initializer=die_with_parent) as pool:
            yield from pool.map(partial(read_shard, Folder(folder)), found)

    try:
        samples = finish_set(folder, names, manifest, checksums, read_all)
    except OSError as error:
        raise TrainingError(f"{folder}: the index cannot be written: {error}. The same command resumes.") from None
    shutil.rmtree(folder / RECORDS)
    size, before = sum(record.bytes for record in records), sum(record.bytes_before for record in records)
    if small:
        log.info("Not larger than -short_side, so kept at their size: %s.", counted(small, "image"))
    if transparent := sum(record.transparent for record in records):
        kept = about["how"]["kind"] == "keep"
        words = "kept; DATA.BACKGROUND of the training decides" if kept else f"background {about['how']['background']}"
        log.info("%d images have transparent pixels: %s", transparent, words)
    log.info(
        "%s in %s, %s MB (%s MB before), %d left out. Train with: -dataset shards -data_path %s",
        counted(samples, "image"),
        counted(len(records), "tar file"),
        f"{size / 1e6:,.1f}",
        f"{before / 1e6:,.1f}",
        len(left_out),
        folder,
    )
