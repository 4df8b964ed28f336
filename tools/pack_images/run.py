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
    """Resizes and encodes an image, or keeps its bytes.

    `settings`: those that are stored with the packed data set, such as kind (jpeg, raw or keep) and short_side.
    """

    def __init__(self, data: DataConfig, settings: dict[str, int | str | bool]) -> None:
        self.reader = Reader(data)
        self.kind = settings["kind"]
        self.short_side = int(settings.get("short_side", 0))
        self.quality = int(settings.get("quality", 0))

    def __call__(self, encoded: Encoded, name: str) -> tuple[str, bytes]:
        """Return ending and content of the packed file: the image as JPEG (kind jpeg) or as an array of pixels (raw).

        Bytes are copied unchanged with kind keep, and with kind jpeg if neither resizing nor settings would change
        them. `encoded`: the stored image, bytes or an array of pixels; an array stays one. `name`: the image's name.
        Raises Unreadable if training could not read the image either.
        """
        # With kind keep too, the image is decoded, so that an unreadable one is left out.
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            pixels = stored.cut(Box(0, 0, stored.width, stored.height))
        height, width, channels = pixels.shape
        as_array = self.kind == "raw" or isinstance(encoded, np.ndarray)
        keeps_size = self.kind == "keep" or min(height, width) <= self.short_side
        # Rotation by EXIF data and background are applied now. In bytes that are copied, they would follow the settings
        # of training, not those of the other packed images.
        is_changed_by_settings = isinstance(stored, Turned) or stored.transparent
        keeps_pixels = self.kind == "keep" or not is_changed_by_settings
        if keeps_size and keeps_pixels and not as_array:
            content = bytes(encoded)
            return self._ending(name, content), content

        image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
        if not keeps_size:  # Pillow's filter averages over all pixels, so there is no aliasing
            scale = self.short_side / min(image.size)
            new_width, new_height = (max(self.short_side, round(side * scale)) for side in image.size)
            image = image.resize((new_width, new_height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        if as_array:
            array = np.asarray(image).reshape(image.height, image.width, channels)
            np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            return "npy", file.getvalue()
        # Baseline JPEG with 4:2:0 subsampling decodes fastest.
        image.save(file, "JPEG", quality=self.quality, subsampling="4:2:0", progressive=False, optimize=False)
        return "jpg", file.getvalue()

    def _ending(self, name: str, content: bytes) -> str:
        """Return the ending for a file that is kept: that of its name if training knows it, else by its first bytes."""
        if content.startswith(ZIP):  # perhaps several files, of which the name is the first's
            return "npz"
        ending = name.rpartition(".")[2].lower()
        is_known = ending in IMAGE_KINDS + ARRAY_KINDS and (ending != "npy" or not self.reader.is_plain)
        return ending if is_known else kind_of(content)


RECORDS = ".packing"
"""Folder in DST while packing is unfinished, with a record of each finished shard"""


@dataclass
class Record:
    """Summary of a finished shard, stored as JSON until all are finished."""

    name: str
    """Path of the tar file in DST"""
    bytes: int = 0
    """Its size"""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each unreadable image"""


class Work(NamedTuple):
    """The images to pack, where to, and how."""

    folder: Path
    """DST"""
    splits: dict[str, Samples]
    data: DataConfig
    settings: dict[str, Any]
    """Stored with the packed data set"""


_state: tuple[Work, Encoder, Any] | None = None
"""In a packing process: its work, its encoder, and an event shared by all that stops it at the next image"""


def start_process(work: Work, stop: Any) -> None:
    """Initialise a packing process: it ignores Ctrl-C, which the main process handles, and dies with that process."""
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    _state = work, Encoder(work.data, work.settings), stop


def make_shard(name: str, indices: np.ndarray) -> Record:
    """Pack images of one split into the tar file `name`, and return its record; keep a file that is finished already.

    `name`: such as 'train/00000.tar'. `indices`: those of the images in the split, in the order in which they are
    packed. Called in a packing process, which `start_process` has prepared.
    """
    assert _state is not None
    work, encoder, stop = _state
    path = work.folder / name
    split = path.parent.name
    samples = work.splits[split]
    record_path = work.folder / RECORDS / f"{split}-{path.stem}.json"

    # A finished file has a record with its size. Any error of reading either of them means that there is none.
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Record(**parse_json(record_path.read_bytes()))
        if path.stat().st_size == record.bytes:
            return record

    record = Record(name)
    try:
        with replacing(path, sync=False, one_writer=True) as unfinished:
            with contextlib.closing(TarWriter(unfinished)) as writer:
                for index in indices.tolist():
                    if stop.is_set():  # another process has failed
                        raise CancelledError
                    _add(index, samples, encoder, writer=writer, record=record)
            record.bytes = unfinished.stat().st_size
            # The record comes first, so that every tar file under its final name has one.
            write_atomically(record_path, json.dumps(asdict(record)))
    except OSError as error:
        why = error.strerror or error
        raise TrainingError(
            f"{path} cannot be written: {why}. Finished files stay; the same command resumes."
        ) from None
    return record


def _add(index: int, samples: Samples, encoder: Encoder, writer: TarWriter, record: Record) -> None:
    """Add one image to a shard, or to the record of those left out if it is unreadable.

    A storage error ends packing, because the image may be intact.
    """
    name = samples.name(index)
    result = failure_or(lambda: encoder(samples.read(index), name))
    if not isinstance(result, Failure):
        ending, content = result
        writer.add(f"{index:08d}", ending, content, int(samples.labels[index]))
        return
    if result.kind == "storage":
        problem = f"{name} cannot be read: {result.reason}."
        raise TrainingError(f"{problem} When the storage is back, the same command resumes.")
    record.left_out.append((name, result.reason))


SETTINGS = "settings.json"
"""File in RECORDS with the settings and the identity of the images that are packed"""
LOCK = ".lock"
KEYS = {"channels": "DATA.IMAGE_CHANNELS", "upright": "DATA.EXIF_ROTATE", "background": "DATA.BACKGROUND"}
"""Entries of a packed data set -> the settings that they are from"""
ANY_CLASSES = 1 << 31
"""Number of classes to open the data with: packing has no classifier, so no label may be out of range"""


def pack(data: DataConfig, folder: Path, settings: dict[str, Any], jobs: int | None, world: World = ALONE) -> None:
    """Pack both splits of a data set into `folder`, which all ranks see; each rank makes some of the tar files.

    `settings`: those that the packed bytes depend on. `jobs`: packing processes per rank; None for one per core.
    """
    work = Work(folder, on_every_rank(world, lambda: _open(data)), data, settings)
    lock = FileLock(folder / LOCK)
    try:
        # Rank 0 makes and locks the folder.
        identity = broadcast(on_rank_0(world, lambda: _prepare_folder(work, lock)), world)
        if identity is None:  # packed already
            return
        shards = _shards(work)
        shards_of_rank = dict(list(shards.items())[world.rank :: world.size])
        images = sum(map(len, work.splits.values()))
        most_unreadable = allowed(data.MAX_BAD, images)
        records = gather(_make_shards(shards_of_rank, work, jobs, most_unreadable, world), world)
        if world.first:
            # Each rank has checked its own images only.
            _check_unreadable(sum(len(record.left_out) for record in records), most_unreadable)
            _finish(work, list(shards), records, identity)
    finally:
        lock.release()  # does nothing if it was not acquired, as on the other ranks


def _shards(work: Work) -> dict[str, np.ndarray]:
    """Divide the images of each split among tar files: name of each file -> indices of its images."""
    shards: dict[str, np.ndarray] = {}
    shard_images = work.settings["shard_images"]
    for split, samples in work.splits.items():
        order = np.arange(len(samples))
        if split == "train":  # shuffled, so that each shard has all classes
            order = generator_of("pack", len(samples)).permutation(order)
        index_arrays = np.split(order, range(shard_images, len(order), shard_images))
        shards |= {f"{split}/{number:05d}.tar": indices for number, indices in enumerate(index_arrays)}
    return shards


def _open(data: DataConfig) -> dict[str, Samples]:
    """Open and check the splits to pack: name -> images. A data set with too few images to split has only 'train'."""
    splits: dict[str, Samples] = {}
    try:
        for split in ("train", "val"):
            is_training = split == "train"
            # With so many classes, no label is out of range.
            dataset = open_dataset(data, is_training, ANY_CLASSES, seed=0, device=torch.device("cpu"))
            samples = dataset.single_images()
            if samples is None:
                raise UserError(f"DATA.DATASET {data.DATASET} is held in memory: packing cannot make it faster.")
            splits[split] = samples
        check_dataset(data, ANY_LABEL)  # as before training, but without a number of classes, for packing has no model
    except TooFewToSplit as error:
        log.warning("%s Here all images are packed as training images.", error)
    warn_of_splits(data, splits["train"], splits.get("val"))
    return splits


def _prepare_folder(work: Work, lock: BaseFileLock) -> dict[str, Any] | None:
    """Make the folder for packing, acquire `lock` on it, and write the file SETTINGS into it.

    Returns the identity of this packing, for the manifest: its settings ("how") and a summary of the images of each
    split ("source"). Returns None, without the lock, if everything is packed already.
    """
    folder = work.folder
    source = {split: _summarise_split(samples, work.data) for split, samples in work.splits.items()}
    identity = {"how": work.settings, "source": source}
    if _is_done(folder, identity, work.data):
        log.info("%s is packed already, with these settings from these images.", folder)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=3)  # seconds, in which processes of a killed run exit
        except Timeout:
            raise UserError(f"DST {folder}: another process packs into it. Wait, or name another folder.") from None
        except (NotImplementedError, OSError) as error:  # a file system without locks can still be packed into
            log.warning("%s cannot be locked (%s): let no second process pack into it.", folder, error)
        (folder / RECORDS).mkdir(exist_ok=True)
        write_atomically(folder / RECORDS / SETTINGS, json.dumps({"made_by": MADE_BY, **identity}, indent=1))
        for split in work.splits:
            (folder / split).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None
    return identity


def _make_shards(
    shards: dict[str, np.ndarray], work: Work, jobs: int | None, most_unreadable: int, world: World
) -> list[Record]:
    """Make this rank's tar files in several processes, and return their records.

    `shards`: name of each file -> indices of its images. `jobs`: processes; None for one per core. `most_unreadable`:
    number of unreadable images that DATA.MAX_BAD allows; packing ends with an error once there are more.
    """
    log.setLevel("INFO" if world.first else "WARNING")  # each rank warns of the images that it leaves out
    stop = multiprocessing.Event()  # set at the end, so that after an error the processes stop at their next image
    unreadable = 0
    processes = max(1, min(jobs or world.own_cores, len(shards)))
    pool = ProcessPoolExecutor(processes, initializer=start_process, initargs=(work, stop))
    try:
        image_counts = {pool.submit(make_shard, name, indices): len(indices) for name, indices in shards.items()}
        with Progress(None, sum(image_counts.values()), "images", what="packing", shown=world.first) as bar:
            for future in as_completed(image_counts):
                record = future.result()
                bar.update(image_counts[future])
                for name, reason in record.left_out:
                    unreadable += 1
                    counts = f"{unreadable} so far; DATA.MAX_BAD allows {most_unreadable}"
                    log.warning("left out: %s: %s (%s)", name, reason, counts)
                _check_unreadable(unreadable, most_unreadable)
        return [future.result() for future in image_counts]  # in the order of `shards`
    except BrokenProcessPool:
        problem = "A packing process was killed, probably by the out-of-memory killer."
        raise TrainingError(f"{problem} Resume with the same command and a smaller -num_workers.") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _check_unreadable(unreadable: int, most_unreadable: int) -> None:
    """Raise TrainingError if more images cannot be read than the number that DATA.MAX_BAD allows."""
    if unreadable > most_unreadable:
        raise TrainingError(
            f"{unreadable} images cannot be read, and DATA.MAX_BAD allows {most_unreadable}. To resume, raise it and "
            "repeat; or repair them or list them in DATA.EXCLUDE, and pack into another folder."
        )


def _finish(work: Work, shards: list[str], records: list[Record], identity: dict[str, Any]) -> None:
    """Write index and manifest, remove the records, and log the result.

    `shards`: names of all tar files. `identity`: from `_prepare_folder`, for the manifest.
    """
    folder = work.folder
    names_by_split: dict[str, list[str]] = {split: [] for split in work.splits}
    for name in shards:
        split = name.partition("/")[0]
        names_by_split[split].append(name)
    left_out = []
    for record in records:
        left_out += [redacted(f"{name}: {reason}") for name, reason in record.left_out]
    manifest = {"classes": work.splits["train"].classes, **identity, "left_out": left_out}
    try:
        samples = finish_set(folder, names_by_split, manifest)
    except OSError as error:
        raise TrainingError(f"{folder}: the index cannot be written: {error}. The same command resumes.") from None
    shutil.rmtree(folder / RECORDS)
    megabytes = sum(record.bytes for record in records) / 1e6
    packed = f"{counted(samples, 'image')} in {counted(len(records), 'tar file')}, {megabytes:,.1f} MB"
    log.info("%s, %d left out. Train with: -dataset shards -data_path %s", packed, len(left_out), folder)


def _summarise_split(samples: Samples, data: DataConfig) -> dict[str, Any]:
    """Summarise a split by number, names and labels of its images, which must be the same when packing resumes.

    Names are without the path of SRC, which may have moved.
    """
    digest = hashlib.sha256(samples.labels.tobytes())
    prefix = name_prefix(data)
    for index in range(len(samples)):
        name = samples.name(index).removeprefix(prefix)
        digest.update(name.encode(errors="surrogateescape") + b"\n")
    return {"dataset": data.DATASET, "images": len(samples), "sha256": digest.hexdigest()}


def _is_done(folder: Path, identity: dict[str, Any], data: DataConfig) -> bool:
    """Return whether everything is packed already; False if packing begins or resumes.

    `identity`: settings and images of this packing. UserError if the folder has another packing or other content.
    The folder says so in its manifest once everything is packed, and before in the file SETTINGS.
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f"DST {folder} is a file; name a new or empty folder.")
    finished = (folder / MANIFEST).exists()
    record_path = folder / MANIFEST if finished else folder / RECORDS / SETTINGS
    try:
        recorded = parse_json(record_path.read_bytes())
    except (OSError, ValueError):
        # No packing has begun: an interruption before SETTINGS is written leaves at most the lock and the folder of
        # records. Anything else in the folder is not from packing.
        for path in sorted(folder.iterdir()):
            if path.name not in (RECORDS, LOCK):
                problem = f"has other content, such as {path.name}. Name a new or empty folder."
                raise UserError(f"DST {folder} {problem}") from None
        return False
    recorded_identity = {name: recorded.get(name) for name in identity}
    if recorded.get("made_by") != MADE_BY or recorded_identity != identity:
        difference = _describe_difference(recorded.get("how"), identity["how"])
        raise UserError(f"DST {folder} has a data set packed {difference}. Name another folder.")
    if finished:
        ShardSet(Folder(folder), data)  # raises UserError if a tar file is missing or has another size
        left_out = recorded.get("left_out")
        if left_out:
            log.warning("%s lacks %s; pack repaired images into another folder.", folder, some_of(left_out))
    else:
        log.info("%s: packing resumes; finished tar files are verified and kept.", folder)
    return finished


def _describe_difference(earlier: Any, settings: dict[str, Any]) -> str:
    """Say how an earlier packing differs: by the first setting with another value, or else by its images.

    `earlier`: the settings of the earlier packing, as read from a file, which may be damaged: it may be no dictionary.
    `settings`: those of this packing.
    """
    for name, value in settings.items():
        if isinstance(earlier, dict) and earlier.get(name) != value:
            values = f"{earlier.get(name)}, not {value}".lower()  # true, as in a settings file
            return f"with {KEYS.get(name, name)} {values}"
    return "from other images"
