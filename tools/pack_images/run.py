"""Packing of a data set: plans the shards, runs the packing processes, and writes index and manifest."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets import check_dataset, open_dataset
from datasets.base import Samples
from datasets.damage import allowed, name_prefix
from datasets.shards.index import TarSamples, read_shard
from datasets.shards.source import MADE_BY, MANIFEST, ShardSet, finish_set
from datasets.shards.stores import Folder, ShardFile
from tools.common.turns import progress_bar
from tools.pack_images.shard import RECORDS, Record, Shard, Stopped, Work, make_shard, start_process
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.machine.cpus import cores
from utils.parent import die_with_parent
from utils.seeding import key
from utils.text import counted
from vitamp.files import parse_json, write_atomically

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
    work = Work(folder, splits, data, settings, multiprocessing.Value("q", 0), multiprocessing.Event())
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
        futures = [pool.submit(make_shard, shard) for shard in shards]
        for record in _finished_shards(futures, work, sum(len(shard.indices) for shard in shards)):
            for name, reason in record.left_out:
                bad += 1
                log.warning("left out: %s: %s (%d so far; DATA.MAX_BAD allows %d)", name, reason, bad, limit)
            if bad > limit:
                raise TrainingError(
                    f"{bad} images cannot be read, and DATA.MAX_BAD allows {limit}. Raise DATA.MAX_BAD and "
                    "repeat the command, which resumes; or repair them, or exclude them with DATA.EXCLUDE, and pack "
                    "into another folder."
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


def _finished_shards(futures: list[Future[Record]], work: Work, images: int) -> Iterable[Record]:
    """Records of shards as they finish, with a progress bar that counts images."""
    pending = set(futures)
    with progress_bar(images, "images", "packing") as bar:
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.update(work.done.value - bar.n)
            failed = [future.exception() for future in finished if future.exception()]
            for error in sorted(failed, key=lambda error: isinstance(error, Stopped)):
                assert error is not None
                raise error
            yield from (future.result() for future in finished)


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
