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
from collections.abc import Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import BaseFileLock, FileLock, Timeout
from PIL import Image

from datasets import check_dataset, open_dataset, warn_of_splits
from datasets.base import Box, Encoded, Samples
from datasets.damage import Failure, allowed, failure_or
from datasets.decoding import Reader, Turned, decoding_errors
from datasets.exclude import name_prefix
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
from vitamp.bands import ZIP
from vitamp.files import parse_json, replacing, write_atomically


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
        height, width, channels = pixels.shape
        small = self.kind == "keep" or min(height, width) <= self.short_side
        raw = self.kind == "raw" or isinstance(encoded, np.ndarray)
        # A file that is kept would follow the settings of training, not those of the other packed images.
        plain = self.kind == "keep" or not (isinstance(stored, Turned) or stored.transparent)
        if small and plain and not raw:
            ending = name.rpartition(".")[2].lower()
            content = bytes(encoded)
            if content.startswith(ZIP):  # perhaps several files, of which the name is the first's
                return "npz", content
            known = ending in (*IMAGE_KINDS, *ARRAY_KINDS) and (ending != "npy" or not self.reader.is_plain)
            return ending if known else kind_of(content), content

        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        file = io.BytesIO()
        if not small:  # Pillow's filter averages over all pixels, so there is no aliasing
            scale = self.short_side / min(height, width)
            size = max(self.short_side, round(width * scale)), max(self.short_side, round(height * scale))
            image = image.resize(size, Image.Resampling.BICUBIC)
        if raw:
            kept = np.asarray(image).reshape(image.height, image.width, channels)
            np.lib.format.write_array(file, np.ascontiguousarray(kept), version=(1, 0), allow_pickle=False)
            return "npy", file.getvalue()
        # Baseline JPEG with 4:2:0 subsampling decodes fastest.
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return "jpg", file.getvalue()


RECORDS = ".packing"
"""Folder in DST while packing is unfinished, with a record of each finished shard"""


@dataclass
class Record:
    """Summary of a finished shard."""

    name: str
    bytes: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each unreadable image"""


_state: tuple[Path, dict[str, Samples], Encoder, Any] | None = None
"""Of a packing process: DST, the splits, the encoder, and a shared event, to stop at the next image"""


def start_process(
    folder: Path, splits: dict[str, Samples], data: DataConfig, settings: dict[str, Any], stop: Any
) -> None:
    """Initialise a packing process: it ignores Ctrl-C, which the main process handles, and dies with that process."""
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    _state = folder, splits, Encoder(data, settings), stop


def make_shard(name: str, indices: np.ndarray) -> Record:
    """Pack these images into the tar file `name`, or keep it if it is finished already."""
    assert _state is not None
    folder, splits, encoder, stop = _state
    path = folder / name
    samples = splits[path.parent.name]
    record_path = folder / RECORDS / f"{path.parent.name}-{path.stem}.json"
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
                    _add(number, samples, encoder, writer, record)
            record.bytes = unfinished.stat().st_size
            # The record comes first, so that every tar file under its final name has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}. Finished files stay; the same command resumes."
        ) from None
    return record


def _add(number: int, samples: Samples, encoder: Encoder, writer: TarWriter, record: Record) -> None:
    """Add an image to a shard, or to the record of those left out."""
    name = samples.name(number)
    found = failure_or(lambda: encoder(samples.read(number), name))
    if not isinstance(found, Failure):
        writer.add(f"{number:08d}", *found, int(samples.labels[number]))
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
    splits = on_every_rank(world, lambda: _open(data))
    lock = FileLock(folder / LOCK)
    try:
        about = broadcast(on_rank_0(world, lambda: _prepare(data, folder, settings, splits, lock)), world)
        if about is None:
            return
        shards: dict[str, np.ndarray] = {}
        for split, samples in splits.items():
            order = np.arange(len(samples))
            if split == "train":  # shuffled, so that each shard has all classes
                order = generator_of("pack", len(samples)).permutation(order)
            parts = np.split(order, range(settings["shard_images"], len(order), settings["shard_images"]))
            shards |= {f"{split}/{number:05d}.tar": part for number, part in enumerate(parts)}
        own = dict(list(shards.items())[world.rank :: world.size])
        limit = allowed(data.MAX_BAD, sum(map(len, splits.values())))
        records = gather(_make_shards(own, (folder, splits, data, settings), jobs, limit, world), world)
        if world.first:
            _check_number(sum(len(record.left_out) for record in records), limit)
            _finish(folder, list(shards), records, splits["train"].classes, about)
    finally:
        lock.release()


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


def _prepare(
    data: DataConfig, folder: Path, settings: dict[str, Any], splits: dict[str, Samples], lock: BaseFileLock
) -> dict[str, Any] | None:
    """Lock and make the folder; returns what the manifest says of the packing, None if everything is packed already."""
    about = {"how": settings, "source": {split: _identity(samples, data) for split, samples in splits.items()}}
    if _is_done(folder, about, data):
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
        for name in splits:
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None
    return about


def _make_shards(shards: dict[str, np.ndarray], work: Any, jobs: int | None, limit: int, world: World) -> list[Record]:
    """Make this rank's tar files in several processes. `work`: for `start_process`."""
    log.setLevel("INFO" if world.first else "WARNING")  # each rank names the images that it leaves out
    stop = multiprocessing.Event()
    bad = 0
    arguments: Any = (*work, stop)
    count = max(1, min(jobs or world.own_cores, len(shards)))
    pool = ProcessPoolExecutor(count, initializer=start_process, initargs=arguments)
    try:
        futures = {pool.submit(make_shard, *shard): len(shard[1]) for shard in shards.items()}
        with Progress(None, sum(futures.values()), "images", "packing", world.first) as bar:
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


def _finish(
    folder: Path, shards: list[str], records: list[Record], classes: Sequence[str] | None, about: dict[str, Any]
) -> None:
    """Write index and manifest, and report."""
    names = {split: [name for name in shards if name.startswith(f"{split}/")] for split in about["source"]}
    left_out = [redacted(f"{name}: {reason}") for record in records for name, reason in record.left_out]
    try:
        samples = finish_set(folder, names, {"classes": classes, **about, "left_out": left_out})
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
        other = next((path.name for path in sorted(folder.iterdir()) if path.name not in (RECORDS, LOCK)), None)
        if other is not None:
            raise UserError(f"DST {folder} has other content, such as {other}. Name a new or empty folder.") from None
        return False
    if before.get("made_by") != MADE_BY or {name: before.get(name) for name in about} != about:
        old = before.get("how")
        now = about["how"]
        changed = [name for name in now if isinstance(old, dict) and old.get(name) != now[name]]
        how = "from other images"
        if changed:
            before_and_now = f"{old.get(changed[0])}, not {now[changed[0]]}".lower()  # true, as in a settings file
            how = f"with {KEYS.get(changed[0], changed[0])} {before_and_now}"
        raise UserError(f"DST {folder} has a data set packed {how}. Name another folder.")
    if finished:
        ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
        if left_out := before.get("left_out"):
            log.warning("%s lacks %s; pack repaired images into another folder.", folder, some_of(left_out))
    else:
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
    return finished
