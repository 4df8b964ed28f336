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
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from datasets import check_dataset, open_dataset
from datasets.base import Box, Encoded, Samples
from datasets.damage import allowed, failure_of
from datasets.decoding import Reader, Turned, decoding_errors, take_transparent
from datasets.exclude import name_prefix
from datasets.shards.hub import kind_of
from datasets.shards.index import IMAGE_KINDS, TarWriter
from datasets.shards.source import MADE_BY, MANIFEST, ShardSet, finish_set
from datasets.shards.stores import Folder
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
        take_transparent()  # of the image before
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        turned, transparent = isinstance(stored, Turned), bool(take_transparent())
        small = bool(self.short_side) and min(pixels.shape[:2]) <= self.short_side
        if self.kind == "raw" or isinstance(encoded, np.ndarray):
            file, kept = io.BytesIO(), pixels if small or self.kind == "keep" else self._resized(pixels)
            np.lib.format.write_array(file, np.ascontiguousarray(kept), version=(1, 0), allow_pickle=False)
            return Packed("npy", file.getvalue(), small, transparent)
        # A file that is kept would follow the settings of training, not those of the other packed images.
        if self.kind == "keep" or (small and not turned and not transparent):
            kind = name.rpartition(".")[2].lower()
            kind = kind if kind in IMAGE_KINDS and kind != "npy" else kind_of(encoded)
            return Packed(kind, encoded, small, transparent)
        # Baseline JPEG with 4:2:0 subsampling decodes fastest.
        kept, file = pixels if small else self._resized(pixels), io.BytesIO()
        image = Image.fromarray(kept if kept.shape[2] == 3 else kept[:, :, 0])
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return Packed("jpg", file.getvalue(), False, transparent)

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        """Resized down to the short side. Pillow's filter averages over all pixels, so there is no aliasing."""
        height, width, channels = pixels.shape
        scale = self.short_side / min(height, width)
        size = max(self.short_side, round(width * scale)), max(self.short_side, round(height * scale))
        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC)).reshape(size[1], size[0], channels)


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
    record = Record(shard.name)
    try:
        with replacing(path, sync=False, one_writer=True) as unfinished:
            with contextlib.closing(TarWriter(unfinished)) as writer:
                for number in shard.indices.tolist():
                    if work.stop.is_set():
                        raise Stopped
                    _add(number, work.splits[shard.split], encoder, writer, record)
            record.bytes, record.sha256 = unfinished.stat().st_size, digest(unfinished)
            # The record comes first, so that every tar file under its final name has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        full = error.errno in DISK_FULL
        what = f"The disk has no space for {path}" if full else f"{path} cannot be written"
        do = "free some space" if full else "mend this"
        raise TrainingError(
            f"{what}: {error.strerror or error}. Finished tar files stay; {do}, and the same command resumes."
        ) from None
    return record


def _add(number: int, samples: Samples, encoder: Encoder, writer: TarWriter, record: Record) -> None:
    """Add an image to a shard, or to the record of those left out."""
    name, found = samples.name(number), list[tuple[Packed, int]]()

    def encode() -> None:
        encoded = samples.read(number)
        found.append((encoder(encoded, name), encoded.nbytes if isinstance(encoded, np.ndarray) else len(encoded)))

    problem = failure_of(encode)
    if problem is not None and problem.kind == "storage":
        raise TrainingError(
            f"{name} cannot be read: {problem.reason}. The storage failed, not the image. When the storage is back, "
            "the same command resumes."
        )
    if problem is not None:
        record.left_out.append((name, problem.reason))
        return
    packed, before = found[-1]
    writer.add(f"{number:08d}", packed.kind, packed.content, int(samples.labels[number]))
    record.samples += 1
    record.small += packed.small
    record.transparent += packed.transparent
    record.bytes_before += before


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
    splits: dict[str, Samples] = {}
    for split, train in SPLITS.items():
        samples = open_dataset(data, train, ANY_CLASSES, 0, torch.device("cpu")).single_images()
        if samples is None:
            raise UserError(f"DATA.DATASET {data.DATASET} is held in memory: packing cannot make it faster.")
        splits[split] = samples
    about = {"how": settings, "source": {split: _identity(samples, data) for split, samples in splits.items()}}
    if _is_done(folder, about, data):
        log.info("%s is packed already, with these settings from these images.", folder)
        return
    try:
        (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        content = json.dumps({"made_by": MADE_BY, **about}, indent=1)
        write_atomically(folder / RECORDS / SETTINGS, content.encode())
        for name in SPLITS:
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None
    shards = [shard for split, samples in splits.items() for shard in _plan(split, samples, settings["shard_images"])]
    work = Work(folder, splits, data, settings, multiprocessing.Event())
    _finish(folder, _make_shards(work, shards, jobs or cores()), about, splits["train"].classes)


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
    finished = (folder / MANIFEST).exists()
    try:
        before = parse_json((folder / MANIFEST if finished else folder / RECORDS / SETTINGS).read_bytes())
    except (OSError, ValueError):
        # The settings are written first, so an interruption before them leaves at most the folder of records.
        other = next((path.name for path in sorted(folder.iterdir()) if path.name != RECORDS), None)
        if other is not None:
            raise UserError(f"DST {folder} has other content, such as {other}. Name a new or empty folder.") from None
        return False
    if before.get("made_by") != MADE_BY or {name: before.get(name) for name in about} != about:
        old, now = before.get("how"), about["how"]
        changed = [name for name in now if isinstance(old, dict) and old.get(name) != now[name]]
        how = "from other images"
        if changed:
            before_and_now = f"{old.get(changed[0])}, not {now[changed[0]]}".lower()  # true, as in a settings file
            how = f"with {KEYS.get(changed[0], changed[0])} {before_and_now}"
        raise UserError(f"DST {folder} has a data set packed {how}. Name another folder.")
    if finished:
        ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
    else:
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
    return finished


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


def _finish(folder: Path, records: list[Record], about: dict[str, Any], classes: list[str] | None) -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for record in records:
        names[record.name.partition("/")[0]].append(record.name)
    small, left_out = sum(record.small for record in records), [image for r in records for image in r.left_out]
    manifest = {"classes": classes, **about, "small": small, "left_out": [f"{n}: {why}" for n, why in left_out]}
    try:
        samples = finish_set(folder, names, manifest, {record.name: {"sha256": record.sha256} for record in records})
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
