"""Packing of a data set: plans the shards (tar files), runs the packing processes, and writes index and manifest.

A shard appears under its name only when it is complete, so packing can be interrupted and resumed.
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
    """Resizes and encodes an image, or keeps its bytes; raises Unreadable if training could not read it either."""

    def __init__(self, data: DataConfig, settings: dict[str, int | str | bool]) -> None:
        self.reader = Reader(data)
        self.kind = settings["kind"]
        self.short_side = int(settings.get("short_side", 0))
        self.quality = int(settings.get("quality", 0))

    def __call__(self, encoded: Encoded, name: str) -> tuple[str, bytes]:
        """Encode an image, and return the ending and the content of its packed file.

        `encoded` is the stored image, and `name` its name, whose ending a file that is kept may keep.
        """
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        as_pixels = self.kind == "raw" or isinstance(encoded, np.ndarray)
        keeps_size = self.kind == "keep" or min(pixels.shape[:2]) <= self.short_side
        # If such bytes were kept, they would be turned and filled by the settings of training, unlike other images.
        settings_change_it = isinstance(stored, Turned) or stored.transparent
        can_keep_bytes = self.kind == "keep" or not settings_change_it
        if keeps_size and can_keep_bytes and not as_pixels:
            content = bytes(encoded)
            return self._ending_of_kept(name, content), content

        channels = pixels.shape[2]
        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        if not keeps_size:  # Pillow's filter averages over all pixels, so there is no aliasing
            scale = self.short_side / min(image.size)
            width, height = (max(self.short_side, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)

        file = io.BytesIO()
        if as_pixels:
            resized = np.asarray(image).reshape(image.height, image.width, channels)
            np.lib.format.write_array(file, np.ascontiguousarray(resized), version=(1, 0), allow_pickle=False)
            return "npy", file.getvalue()
        # Baseline JPEG with 4:2:0 subsampling decodes fastest.
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return "jpg", file.getvalue()

    def _ending_of_kept(self, name: str, content: bytes) -> str:
        """Return the ending for a file whose bytes are kept: that of its name, or of its content if that misleads."""
        if content.startswith(ZIP):  # perhaps of several files, and then the name is that of the first one
            return "npz"
        ending = name.rpartition(".")[2].lower()
        usable = ending in IMAGE_KINDS + ARRAY_KINDS and (ending != "npy" or not self.reader.is_plain)
        return ending if usable else kind_of(content)


RECORDS = ".packing"
"""Folder in DST while packing is unfinished, with a record of each finished shard"""


@dataclass
class Record:
    """Summary of a finished shard, written as JSON when the shard is complete."""

    name: str
    """Path of the tar file in DST"""
    bytes: int = 0
    """Size of the tar file"""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each unreadable image"""


class Work(NamedTuple):
    """The data set to pack, where to, and how."""

    folder: Path
    """DST"""
    splits: dict[str, Samples]
    """train, and val if there is a validation split"""
    data: DataConfig
    settings: dict[str, Any]
    """Settings that the packed bytes depend on"""


_state: tuple[Work, Encoder, Any] | None = None
"""State of a packing process: its work, its encoder, and an event of all processes that stops it at the next image"""


def start_process(work: Work, stop: Any) -> None:
    """Initialise a packing process: it ignores Ctrl-C, which the main process handles, and dies with that process.

    `stop` is an event that tells it to stop at the next image.
    """
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    _state = work, Encoder(work.data, work.settings), stop


def make_shard(name: str, indices: np.ndarray) -> Record:
    """Pack these images into the tar file `name`, such as train/00000.tar, and return its record.

    A tar file that an earlier command has finished is kept. Runs in a packing process.
    """
    assert _state is not None
    work, encoder, stop = _state
    path = work.folder / name
    samples = work.splits[path.parent.name]
    record_path = work.folder / RECORDS / f"{path.parent.name}-{path.stem}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # without a valid record, the tar file is made again
        earlier_record = Record(**parse_json(record_path.read_bytes()))
        if path.stat().st_size == earlier_record.bytes:
            return earlier_record

    record = Record(name)
    try:
        with replacing(path, sync=False, one_writer=True) as unfinished:
            with contextlib.closing(TarWriter(unfinished)) as writer:
                for image in indices.tolist():
                    if stop.is_set():  # another process has failed
                        raise CancelledError
                    _add_image(image, samples, encoder, writer=writer, record=record)
            record.bytes = unfinished.stat().st_size
            # The record is written before the tar file gets its final name, so that every finished file has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(
            f"{path} cannot be written: {reason}. Finished files stay; the same command resumes."
        ) from None
    return record


def _add_image(image: int, samples: Samples, encoder: Encoder, writer: TarWriter, record: Record) -> None:
    """Encode an image and write it into the tar file; if it cannot be read, note in the record that it is left out.

    Raises TrainingError for a storage error, because the image may be intact.
    """
    name = samples.name(image)
    packed = failure_or(lambda: encoder(samples.read(image), name))
    if not isinstance(packed, Failure):
        ending, content = packed
        writer.add(f"{image:08d}", ending, content, int(samples.labels[image]))
        return
    if packed.kind == "storage":
        failure = f"{name} cannot be read: {packed.reason}."
        raise TrainingError(f"{failure} When the storage is back, the same command resumes.")
    record.left_out.append((name, packed.reason))


SETTINGS = "settings.json"
"""File in RECORDS with the settings of an unfinished packing"""
LOCK = ".lock"
"""File in DST that only one command at a time may lock"""
KEYS = {"channels": "DATA.IMAGE_CHANNELS", "upright": "DATA.EXIF_ROTATE", "background": "DATA.BACKGROUND"}
"""Names of packing settings -> the settings of a run that they are from"""
ANY_CLASSES = 1 << 31
"""Number of classes for which no label is out of range, since packing has no classifier"""


def pack(data: DataConfig, folder: Path, settings: dict[str, Any], jobs: int | None, world: World = ALONE) -> None:
    """Pack all splits of a data set into `folder`, which all ranks see; each rank makes some of the tar files.

    `settings` are those that the packed bytes depend on. `jobs` is the number of packing processes; None: one per core.
    """
    work = Work(folder, on_every_rank(world, lambda: _open_splits(data)), data, settings)
    lock = FileLock(folder / LOCK)
    try:
        manifest_entries = broadcast(on_rank_0(world, lambda: _prepare(work, lock)), world)
        if manifest_entries is None:
            return
        shards = _plan_shards(work)
        shards_of_rank = dict(list(shards.items())[world.rank :: world.size])
        limit = allowed(data.MAX_BAD, sum(map(len, work.splits.values())))
        records = gather(_make_shards(shards_of_rank, work, jobs, limit=limit, world=world), world)
        if world.first:
            _check_unreadable(sum(len(record.left_out) for record in records), limit)
            _finish(work, list(shards), records, manifest_entries)
    finally:
        lock.release()


def _plan_shards(work: Work) -> dict[str, np.ndarray]:
    """Return the name of each tar file, such as train/00000.tar, with the indices of its images."""
    shards: dict[str, np.ndarray] = {}
    images_per_shard = work.settings["shard_images"]
    for split, samples in work.splits.items():
        order = np.arange(len(samples))
        if split == "train":  # shuffled, so that each shard has all classes
            order = generator_of("pack", len(samples)).permutation(order)
        parts = np.split(order, range(images_per_shard, len(order), images_per_shard))
        shards |= {f"{split}/{number:05d}.tar": images for number, images in enumerate(parts)}
    return shards


def _open_splits(data: DataConfig) -> dict[str, Samples]:
    """Open the splits to pack: train and val, or train alone if there are too few images to split."""
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
    """Make and lock the folder. Returns the entries of the manifest that say what is packed, and how.

    Returns None if everything is packed already. Raises UserError if the folder cannot be used.
    """
    folder = work.folder
    source = {split: _identity(samples, work.data) for split, samples in work.splits.items()}
    manifest_entries = {"how": work.settings, "source": source}
    if _is_done(folder, manifest_entries, work.data):
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
        write_atomically(folder / RECORDS / SETTINGS, json.dumps({"made_by": MADE_BY, **manifest_entries}, indent=1))
        for split in work.splits:
            (folder / split).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None
    return manifest_entries


def _make_shards(shards: dict[str, np.ndarray], work: Work, jobs: int | None, limit: int, world: World) -> list[Record]:
    """Make this rank's tar files in several processes, and return their records in the order of `shards`.

    Raises TrainingError as soon as more than `limit` images cannot be read. `jobs` as in `pack`.
    """
    log.setLevel("INFO" if world.first else "WARNING")  # each rank names the images that it leaves out
    stop = multiprocessing.Event()
    unreadable = 0
    processes = max(1, min(jobs or world.own_cores, len(shards)))
    pool = ProcessPoolExecutor(processes, initializer=start_process, initargs=(work, stop))
    try:
        images_of = {pool.submit(make_shard, name, images): len(images) for name, images in shards.items()}
        with Progress(None, sum(images_of.values()), "images", what="packing", shown=world.first) as bar:
            for future in as_completed(images_of):
                record = future.result()
                bar.update(images_of[future])
                for name, reason in record.left_out:
                    unreadable += 1
                    log.warning("left out: %s: %s (%d so far; DATA.MAX_BAD allows %d)", name, reason, unreadable, limit)
                _check_unreadable(unreadable, limit)
        return [future.result() for future in images_of]
    except BrokenProcessPool:
        cause = "A packing process was killed, probably by the out-of-memory killer."
        raise TrainingError(f"{cause} Resume with the same command and a smaller -num_workers.") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _check_unreadable(unreadable: int, limit: int) -> None:
    """Raise TrainingError if more images than `limit` cannot be read."""
    if unreadable > limit:
        raise TrainingError(
            f"{unreadable} images cannot be read, and DATA.MAX_BAD allows {limit}. To resume, raise it and repeat;"
            " or repair them or list them in DATA.EXCLUDE, and pack into another folder."
        )


def _finish(work: Work, shards: list[str], records: list[Record], manifest_entries: dict[str, Any]) -> None:
    """Write index and manifest, remove the records of shards, and log what was packed and how to train with it."""
    folder = work.folder
    shards_of_split: dict[str, list[str]] = {split: [] for split in work.splits}
    for shard in shards:
        split, _, _ = shard.partition("/")
        shards_of_split[split].append(shard)
    left_out = []
    for record in records:
        left_out += [redacted(f"{name}: {reason}") for name, reason in record.left_out]
    manifest = {"classes": work.splits["train"].classes, **manifest_entries, "left_out": left_out}
    try:
        images = finish_set(folder, shards_of_split, manifest)
    except OSError as error:
        raise TrainingError(f"{folder}: the index cannot be written: {error}. The same command resumes.") from None
    shutil.rmtree(folder / RECORDS)
    megabytes = sum(record.bytes for record in records) / 1e6
    packed = f"{counted(images, 'image')} in {counted(len(records), 'tar file')}, {megabytes:,.1f} MB"
    log.info("%s, %d left out. Train with: -dataset shards -data_path %s", packed, len(left_out), folder)


def _identity(samples: Samples, data: DataConfig) -> dict[str, Any]:
    """Return what identifies the images of a split: their number, and a hash of their names and labels.

    It is compared when packing resumes. Names count without the path of SRC, which may have moved.
    """
    digest = hashlib.sha256(samples.labels.tobytes())
    prefix = name_prefix(data)
    for image in range(len(samples)):
        digest.update(samples.name(image).removeprefix(prefix).encode(errors="surrogateescape") + b"\n")
    return {"dataset": data.DATASET, "images": len(samples), "sha256": digest.hexdigest()}


def _is_done(folder: Path, manifest_entries: dict[str, Any], data: DataConfig) -> bool:
    """Say whether this data set is packed in the folder already, in the same way.

    False means that packing can begin or resume there. Raises UserError if the folder has other content.
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f"DST {folder} is a file; name a new or empty folder.")
    finished = (folder / MANIFEST).exists()
    earlier_file = folder / MANIFEST if finished else folder / RECORDS / SETTINGS
    try:
        earlier = parse_json(earlier_file.read_bytes())
    except (OSError, ValueError):
        # The settings are written first, so an interruption before them leaves at most the folder of records.
        for path in sorted(folder.iterdir()):
            if path.name not in (RECORDS, LOCK):
                problem = f"has other content, such as {path.name}. Name a new or empty folder."
                raise UserError(f"DST {folder} {problem}") from None
        return False
    same = earlier.get("made_by") == MADE_BY
    same = same and {name: earlier.get(name) for name in manifest_entries} == manifest_entries
    if not same:
        difference = _difference_in_words(earlier.get("how"), manifest_entries["how"])
        raise UserError(f"DST {folder} has a data set packed {difference}. Name another folder.")
    if finished:
        ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
        left_out = earlier.get("left_out")
        if left_out:
            log.warning("%s lacks %s; pack repaired images into another folder.", folder, some_of(left_out))
    else:
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
    return finished


def _difference_in_words(earlier_settings: Any, settings: dict[str, Any]) -> str:
    """Name the first setting in which an earlier packing differs; if none does, it is of other images.

    `earlier_settings` are read from a file, so they may be anything.
    """
    for name, value in settings.items():
        if isinstance(earlier_settings, dict) and earlier_settings.get(name) != value:
            both_values = f"{earlier_settings.get(name)}, not {value}".lower()  # true, as in a settings file
            return f"with {KEYS.get(name, name)} {both_values}"
    return "from other images"
