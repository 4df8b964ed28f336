"""Packing of a data set: plans the shards, runs the packing processes, and writes index and manifest.

A shard appears only when it is complete.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import shutil
import signal
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import BaseFileLock, FileLock, Timeout
from PIL import Image

from datasets import check_dataset, open_dataset, warn_of_splits
from datasets.base import Box, Encoded, Samples, name_prefix
from datasets.damage import Failure, allowed, failure_or
from datasets.decoding import Reader, Turned, decoding_errors
from datasets.labels import ANY_LABEL
from datasets.shards.hub import kind_of
from datasets.shards.index import ARRAY_KINDS, IMAGE_KINDS, Folder, TarWriter
from datasets.shards.source import MADE_BY, MANIFEST, ShardSet, finish_set
from datasets.sources.split import TooFewToSplit
from tools.common.ranks import gather
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World, broadcast, on_every_rank, on_rank_0
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.program import die_with_parent
from utils.progress import Progress
from utils.seeding import generator_of
from utils.text import counted, redacted, some_of
from vitamp.files import ZIP, parse_json, replacing, write_atomically


class Encoder:
    """Resizes and encodes an image, or keeps it; raises Unreadable if training could not read it either."""

    def __init__(self, data: DataConfig, settings: dict[str, int | str | bool]) -> None:
        self.reader = Reader(data)
        self.kind = settings["kind"]
        self.short_side = int(settings.get("short_side", 0))
        self.quality = int(settings.get("quality", 0))

    def __call__(self, encoded: Encoded, name: str) -> tuple[str, bytes]:
        """Ending and content of the packed file."""
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        raw = self.kind == "raw" or isinstance(encoded, np.ndarray)
        small = self.kind == "keep" or min(pixels.shape[:2]) <= self.short_side
        # A file that is kept would follow the settings of training, not those of the other packed images.
        plain = self.kind == "keep" or not (isinstance(stored, Turned) or stored.transparent)
        if small and plain and not raw:
            content = bytes(encoded)
            return self._ending(name, content), content

        channels = pixels.shape[2]
        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        if not small:  # Pillow's filter averages over all pixels, so there is no aliasing
            scale = self.short_side / min(image.size)
            width, height = (max(self.short_side, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        if raw:
            kept = np.asarray(image).reshape(image.height, image.width, channels)
            np.lib.format.write_array(file, np.ascontiguousarray(kept), version=(1, 0), allow_pickle=False)
            return "npy", file.getvalue()
        # Baseline JPEG with 4:2:0 subsampling decodes fastest.
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return "jpg", file.getvalue()

    def _ending(self, name: str, content: bytes) -> str:
        """Of a file that is kept."""
        if content.startswith(ZIP):  # perhaps several files, of which the name is the first's
            return "npz"
        ending = name.rpartition(".")[2].lower()
        known = ending in IMAGE_KINDS + ARRAY_KINDS and (ending != "npy" or not self.reader.is_plain)
        return ending if known else kind_of(content)


RECORDS = ".packing"
"""Folder in DST while packing is unfinished, with a record of each finished shard"""


@dataclass
class Record:
    """Summary of a finished shard."""

    name: str
    bytes: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each unreadable image"""


class Work(NamedTuple):
    """What packing needs."""

    folder: Path
    """DST"""
    splits: dict[str, Samples]
    data: DataConfig
    settings: dict[str, Any]


_state: tuple[Work, Encoder, Any] | None = None
"""Of a packing process, with a shared event, to stop at the next image"""


def start_process(work: Work, stop: Any) -> None:
    """Initialise a packing process: it ignores Ctrl-C, which the main process handles, and dies with that process."""
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    _state = work, Encoder(work.data, work.settings), stop


def make_shard(name: str, indices: np.ndarray) -> Record:
    """Pack these images into the tar file `name`, or keep it if it is finished already."""
    assert _state is not None
    work, encoder, stop = _state
    path = work.folder / name
    samples = work.splits[path.parent.name]
    record_path = work.folder / RECORDS / f"{path.parent.name}-{path.stem}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Record(**parse_json(record_path.read_bytes()))
        if path.stat().st_size == record.bytes:
            return record
    record = Record(name)
    try:
        with replacing(path, sync=False, one_writer=True) as unfinished:
            with contextlib.closing(TarWriter(unfinished)) as writer:
                for number in indices.tolist():
                    if stop.is_set():  # another process has failed
                        raise CancelledError
                    _add(number, samples, encoder, writer=writer, record=record)
            record.bytes = unfinished.stat().st_size
            # The record comes first, so that every tar file under its final name has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        why = error.strerror or error
        raise TrainingError(
            f"{path} cannot be written: {why}. Finished files stay; the same command resumes."
        ) from None
    return record


def _add(number: int, samples: Samples, encoder: Encoder, writer: TarWriter, record: Record) -> None:
    """Add an image to a shard, or to the record of those left out."""
    name = samples.name(number)
    found = failure_or(lambda: encoder(samples.read(number), name))
    if not isinstance(found, Failure):
        ending, content = found
        writer.add(f"{number:08d}", ending, content, int(samples.labels[number]))
        return
    if found.kind == "storage":
        why = f"{name} cannot be read: {found.reason}."
        raise TrainingError(f"{why} When the storage is back, the same command resumes.")
    record.left_out.append((name, found.reason))


SETTINGS = "settings.json"
LOCK = ".lock"
KEYS = {"channels": "DATA.IMAGE_CHANNELS", "upright": "DATA.EXIF_ROTATE", "background": "DATA.BACKGROUND"}
"""Entries of a packed data set -> the settings that they are from"""
ANY_CLASSES = 1 << 31
"""Packing has no classifier, so no label is out of range"""


def pack(data: DataConfig, folder: Path, settings: dict[str, Any], jobs: int | None, world: World = ALONE) -> None:
    """Pack both splits of a data set into `folder`, which all ranks see; each rank makes some of the tar files."""
    work = Work(folder, on_every_rank(world, lambda: _open(data)), data, settings)
    lock = FileLock(folder / LOCK)
    try:
        about = broadcast(on_rank_0(world, lambda: _prepare(work, lock)), world)
        if about is None:
            return
        shards = _shards(work)
        own = dict(list(shards.items())[world.rank :: world.size])
        limit = allowed(data.MAX_BAD, sum(map(len, work.splits.values())))
        records = gather(_make_shards(own, work, jobs, limit=limit, world=world), world)
        if world.first:
            _check_number(sum(len(record.left_out) for record in records), limit)
            _finish(work, list(shards), records, about)
    finally:
        lock.release()


def _shards(work: Work) -> dict[str, np.ndarray]:
    """Name of each tar file -> indices of its images."""
    shards: dict[str, np.ndarray] = {}
    size = work.settings["shard_images"]
    for split, samples in work.splits.items():
        order = np.arange(len(samples))
        if split == "train":  # shuffled, so that each shard has all classes
            order = generator_of("pack", len(samples)).permutation(order)
        parts = np.split(order, range(size, len(order), size))
        shards |= {f"{split}/{number:05d}.tar": part for number, part in enumerate(parts)}
    return shards


def _open(data: DataConfig) -> dict[str, Samples]:
    """The splits to pack; the images of a data set that cannot be split are for training."""
    splits: dict[str, Samples] = {}
    try:
        for split in ("train", "val"):
            samples = open_dataset(data, split == "train", ANY_CLASSES, 0, torch.device("cpu")).single_images()
            if samples is None:
                raise UserError(f"DATA.DATASET {data.DATASET} is held in memory: packing cannot make it faster.")
            splits[split] = samples
        check_dataset(data, ANY_LABEL)  # as before training; there is no model whose outputs could stay unused
    except TooFewToSplit as error:
        log.warning("%s Here all images are packed as training images.", error)
    warn_of_splits(data, splits["train"], splits.get("val"))
    return splits


def _prepare(work: Work, lock: BaseFileLock) -> dict[str, Any] | None:
    """Lock and make the folder; returns what the manifest says of the packing, None if everything is packed already."""
    folder = work.folder
    source = {split: _identity(samples, work.data) for split, samples in work.splits.items()}
    about = {"how": work.settings, "source": source}
    if _is_done(folder, about, work.data):
        log.info("%s is packed already, with these settings from these images.", folder)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=3)  # seconds, in which processes of a killed run exit
        except Timeout:
            raise UserError(f"DST {folder}: another process packs into it. Wait, or name another folder.") from None
        except (NotImplementedError, OSError) as error:
            log.warning("%s cannot be locked (%s): let no second process pack into it.", folder, error)
        (folder / RECORDS).mkdir(exist_ok=True)
        write_atomically(folder / RECORDS / SETTINGS, json.dumps({"made_by": MADE_BY, **about}, indent=1))
        for name in work.splits:
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None
    return about


def _make_shards(shards: dict[str, np.ndarray], work: Work, jobs: int | None, limit: int, world: World) -> list[Record]:
    """Make this rank's tar files in several processes."""
    log.setLevel("INFO" if world.first else "WARNING")  # each rank names the images that it leaves out
    stop = multiprocessing.Event()
    bad = 0
    count = max(1, min(jobs or world.own_cores, len(shards)))
    pool = ProcessPoolExecutor(count, initializer=start_process, initargs=(work, stop))
    try:
        futures = {pool.submit(make_shard, name, indices): len(indices) for name, indices in shards.items()}
        with Progress(None, sum(futures.values()), "images", what="packing", shown=world.first) as bar:
            for future in as_completed(futures):
                record = future.result()
                bar.update(futures[future])
                for name, reason in record.left_out:
                    bad += 1
                    log.warning("left out: %s: %s (%d so far; DATA.MAX_BAD allows %d)", name, reason, bad, limit)
                _check_number(bad, limit)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        why = "A packing process was killed, probably by the out-of-memory killer."
        raise TrainingError(f"{why} Resume with the same command and a smaller -num_workers.") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _check_number(bad: int, limit: int) -> None:
    """Raise an error if too many images cannot be read."""
    if bad > limit:
        raise TrainingError(
            f"{bad} images cannot be read, and DATA.MAX_BAD allows {limit}. To resume, raise it and repeat;"
            " or repair them or list them in DATA.EXCLUDE, and pack into another folder."
        )


def _finish(work: Work, shards: list[str], records: list[Record], about: dict[str, Any]) -> None:
    """Write index and manifest, and report."""
    folder = work.folder
    names: dict[str, list[str]] = {split: [] for split in work.splits}
    for name in shards:
        names[name.partition("/")[0]].append(name)
    left_out = []
    for record in records:
        left_out += [redacted(f"{name}: {reason}") for name, reason in record.left_out]
    manifest = {"classes": work.splits["train"].classes, **about, "left_out": left_out}
    try:
        samples = finish_set(folder, names, manifest)
    except OSError as error:
        raise TrainingError(f"{folder}: the index cannot be written: {error}. The same command resumes.") from None
    shutil.rmtree(folder / RECORDS)
    size = sum(record.bytes for record in records) / 1e6
    packed = f"{counted(samples, 'image')} in {counted(len(records), 'tar file')}, {size:,.1f} MB"
    log.info("%s, %d left out. Train with: -dataset shards -data_path %s", packed, len(left_out), folder)


def _identity(samples: Samples, data: DataConfig) -> dict[str, Any]:
    """Names and labels of the images, compared when packing resumes; SRC itself may have moved."""
    names = hashlib.sha256(samples.labels.tobytes())
    prefix = name_prefix(data)
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
        for path in sorted(folder.iterdir()):
            if path.name not in (RECORDS, LOCK):
                why = f"has other content, such as {path.name}. Name a new or empty folder."
                raise UserError(f"DST {folder} {why}") from None
        return False
    if before.get("made_by") != MADE_BY or {name: before.get(name) for name in about} != about:
        how = _other_way(before.get("how"), about["how"])
        raise UserError(f"DST {folder} has a data set packed {how}. Name another folder.")
    if finished:
        ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
        left_out = before.get("left_out")
        if left_out:
            log.warning("%s lacks %s; pack repaired images into another folder.", folder, some_of(left_out))
    else:
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
    return finished


def _other_way(before: Any, now: dict[str, Any]) -> str:
    """In what the settings of an earlier packing differ."""
    for name, value in now.items():
        if isinstance(before, dict) and before.get(name) != value:
            both = f"{before.get(name)}, not {value}".lower()  # true, as in a settings file
            return f"with {KEYS.get(name, name)} {both}"
    return "from other images"
