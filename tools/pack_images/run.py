"""Packing as a whole: what is to be done, by how many processes, and what is said about it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from datasets import check_dataset, open_dataset
from datasets.base import Samples
from datasets.damage.broken import allowed
from datasets.damage.exclude import name_prefix
from datasets.shards.index import read_shard
from datasets.shards.layout import MADE_BY, MANIFEST, ShardSet, finish_set
from datasets.shards.stores import Folder, Found
from datasets.shards.tar import TarSamples
from tools.pack_images.shard import RECORDS, Record, Shard, Stopped, Work, make_shard, start_process
from utils.config.data import DataConfig
from utils.cpus import cores
from utils.errors import TrainingError, UserError
from utils.files import write_whole
from utils.log import log
from utils.seeding import key

PARTS = {"train": True, "val": False}
SETTINGS = "settings.json"
ANY_CLASSES = 1 << 31
"""Packing has no classifier that labels could be too large for."""


def pack(data: DataConfig, num_classes: int, folder: Path, how: dict[str, Any], jobs: int | None) -> None:
    """Pack both parts of a data set into `folder`."""
    if data.DOWNLOAD:
        check_dataset(data, num_classes)  # which fetches it
    parts = {part: _samples(data, train) for part, train in PARTS.items()}
    settings = {"how": how, "source": {part: _about(samples, data) for part, samples in parts.items()}}
    if _is_done(folder, settings, data):
        log.info("%s is packed already, with these settings from these images. -verify compares its checksums.", folder)
        return
    _begin(folder, settings)
    shards = [shard for part, samples in parts.items() for shard in _plan(part, samples, how["shard_images"])]
    work = Work(folder, parts, data, how, multiprocessing.Value("q", 0), multiprocessing.Event())
    records = _make(work, shards, jobs or cores())
    _finish(folder, records, settings, parts["train"].classes, jobs or cores())


def _samples(data: DataConfig, train: bool) -> Samples:
    samples = open_dataset(data, train, ANY_CLASSES, 0, torch.device("cpu")).single_images()
    if samples is None:
        raise UserError(f"DATA.DATASET {data.DATASET} lies in memory: no packing makes it faster.")
    return samples


def _about(samples: Samples, data: DataConfig) -> dict[str, Any]:
    """By this the images are known when packing goes on: their names and labels, wherever they lie by now."""
    names, prefix = hashlib.sha256(samples.labels.tobytes()), name_prefix(data)
    for index in range(len(samples)):
        names.update(samples.name(index).removeprefix(prefix).encode(errors="surrogateescape") + b"\n")
    return {"dataset": data.DATASET, "images": len(samples), "sha256": names.hexdigest()}


def _is_done(folder: Path, settings: dict[str, Any], data: DataConfig) -> bool:
    """Whether all was packed before; UserError where the folder holds something else."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f"DST {folder} is a file; it needs a folder, which is made.")
    before: dict[str, Any] | None = None
    for file in (folder / MANIFEST, folder / RECORDS / SETTINGS):
        try:
            before = json.loads(file.read_bytes())
            break
        except (OSError, ValueError):
            continue
    if before is None and (other := _something_else(folder)):
        raise UserError(f"DST {folder} holds something else, {other} for one. Name an empty folder, or a new one.")
    if before is None:
        return False
    told = {name: before.get(name) for name in settings}
    if before.get("made_by") != MADE_BY or told != settings:
        raise UserError(f"DST {folder} holds a data set packed {_difference(told, settings)}. Name another folder.")
    if not (folder / MANIFEST).exists():
        log.info("%s: packing goes on; what is finished is compared with its checksum and kept.", folder)
        return False
    ShardSet(Folder(folder), data)  # every tar file is there, and as long as it should be
    return True


def _something_else(folder: Path) -> str | None:
    """What lies there besides that which `_begin` makes, as it may have been stopped in the middle."""
    for path in sorted(folder.iterdir()):
        if path.name not in (RECORDS, *PARTS) or not path.is_dir():
            return path.name
        if path.name in PARTS and (inside := next(path.iterdir(), None)):
            return f"{path.name}/{inside.name}"
    return None


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    how = before["how"] if isinstance(before.get("how"), dict) else {}
    for name in now["how"]:
        if how.get(name) != now["how"][name]:
            return f"with {name} {how.get(name)}, not {now['how'][name]}"
    return "from other images"


def _begin(folder: Path, settings: dict[str, Any]) -> None:
    try:
        for name in (RECORDS, *PARTS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        content = json.dumps({"made_by": MADE_BY, **settings}, indent=1)
        write_whole(folder / RECORDS / SETTINGS, content.encode())
    except OSError as error:
        raise UserError(f"DST {folder} cannot be written: {error}.") from None


def _plan(part: str, samples: Samples, shard_images: int) -> list[Shard]:
    """Training images in an order that mixes their classes, so that a few shards are like all of them."""
    order = np.arange(len(samples))
    if part == "train":
        order = np.random.Generator(np.random.Philox(key=key("pack", len(samples)))).permutation(order)
    firsts = range(0, len(order), shard_images)
    return [Shard(part, number, order[first : first + shard_images]) for number, first in enumerate(firsts)]


def _make(work: Work, shards: list[Shard], jobs: int) -> list[Record]:
    """Records in the order of `shards`."""
    limit = allowed(work.data.MAX_BAD, sum(map(len, work.parts.values())))
    pool = ProcessPoolExecutor(min(jobs, len(shards)), initializer=start_process, initargs=(work,))
    bad = 0
    try:
        futures = [pool.submit(make_shard, shard) for shard in shards]
        for record in _as_they_come(futures, work, sum(len(shard.indices) for shard in shards)):
            for name, reason in record.left_out:
                bad += 1
                log.warning("left out, as it cannot be read: %s: %s (%d; DATA.MAX_BAD: %d)", name, reason, bad, limit)
            if bad > limit:
                raise TrainingError(
                    f"{bad} images cannot be read, and DATA.MAX_BAD allows {limit}. Repair them, or leave them out by "
                    f"DATA.EXCLUDE, or raise DATA.MAX_BAD; the same command goes on."
                )
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise TrainingError(
            "A packing process was killed, perhaps for lack of memory; lower -num_workers. The same command goes on."
        ) from None
    finally:
        work.stop.set()
        pool.shutdown(cancel_futures=True)


def _as_they_come(futures: list[Future[Record]], work: Work, images: int) -> Iterable[Record]:
    """Finished shards, with a bar that moves image by image meanwhile."""
    pending = set(futures)
    with tqdm(total=images, unit="img", desc="packing", smoothing=0.05, disable=None) as bar:
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.update(work.done.value - bar.n)
            failed = [future.exception() for future in finished if future.exception()]
            for error in sorted(failed, key=lambda error: isinstance(error, Stopped)):
                assert error is not None
                raise error
            yield from (future.result() for future in finished)


def _finish(
    folder: Path, records: list[Record], settings: dict[str, Any], classes: list[str] | None, jobs: int
) -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for record in records:
        names[record.name.partition("/")[0]].append(record.name)
    small, left_out = sum(record.small for record in records), [image for r in records for image in r.left_out]
    about = {"classes": classes, **settings, "small": small, "left_out": [f"{n}: {why}" for n, why in left_out]}
    notes = {record.name: {"sha256": record.sha256} for record in records}

    def each(found: Iterable[Found]) -> Iterable[TarSamples]:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(read_shard, [Folder(folder)] * len(names_of := list(found)), names_of)

    try:
        samples = finish_set(folder, names, about, notes, each)
    except OSError as error:
        raise TrainingError(f"{folder}: the index cannot be written: {error}. The same command goes on.") from None
    shutil.rmtree(folder / RECORDS)
    size, before = sum(record.bytes for record in records), sum(record.bytes_before for record in records)
    if small:
        log.info("%d images are no larger than asked for, and were kept as they are: nothing is ever enlarged.", small)
    log.info(
        "%d images in %d tar files, %s MB (%s MB before), %d left out. Train with: -dataset shards -data_path %s",
        samples,
        len(records),
        f"{size / 1e6:,.1f}",
        f"{before / 1e6:,.1f}",
        len(left_out),
        folder,
    )
