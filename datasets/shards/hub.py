"""`hf:NAME_OR_PATH`: image sets of the Hugging Face hub, or parquet files like theirs on disk.

An image in a parquet file cannot be read without reading its neighbours. So the images are copied once, unchanged, into
tar files, and read where they lie in these.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import torch

from datasets.base import Source
from datasets.images import Images
from datasets.shards.layout import MANIFEST, ShardSet, finish_set
from datasets.shards.parquet import Columns, columns_of, find_parts, need_pyarrow, rows
from datasets.shards.source import check_parts, open_part
from datasets.shards.stores import Folder
from datasets.shards.tar import TarWriter
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

PREFIX = "hf:"
SHARD_BYTES = 256 << 20
ALL_SHARDS = 1 << 30
"""Shards whose samples are mixed: the copy lies on disk, where reading in any order costs nothing."""
REASON = 300
"""Characters of what the hub says of a failure; it can be a page."""
MARGIN = 1.1
"""A tar file takes a little more than what is in it."""


def prepared(data: DataConfig) -> Path:
    """The folder of the copy, which is made if it is not there yet."""
    place = data.DATASET.removeprefix(PREFIX)
    if not place:
        raise UserError("DATA.DATASET hf: needs a name or a folder behind it, as in hf:ylecun/mnist or hf:/data/mnist.")
    local = _is_path(place)
    if local and not Path(place).expanduser().is_dir():
        raise UserError(f"DATA.DATASET {data.DATASET}: there is no folder {place}.")
    folder = cache_folder(data, "hf") / _copy_name(place, local)
    if (folder / MANIFEST).is_file():
        return folder
    with process_lock(folder.with_name(f"{folder.name}.lock"), f"copies {data.DATASET}"):
        if not (folder / MANIFEST).is_file():
            need_pyarrow(data.DATASET)
            source = Path(place).expanduser() if local else _fetched(place, data)
            _copy(source, folder, data)
    return folder


def _is_path(place: str) -> bool:
    return place.startswith(("/", ".", "~")) or Path(place).is_dir()


def _copy_name(place: str, local: bool) -> str:
    """A folder on disk is known by its content. A name of the hub stays with what was fetched first."""
    about = [place]
    if local:
        root = Path(place).expanduser().resolve()
        found = sorted((str(path), path.stat()) for path in root.rglob("*.parquet"))
        about = [str(root), *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found)]
    digest = hashlib.sha256("\n".join(about).encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', place).strip('-.')[-60:]}-{digest}"


def _fetched(place: str, data: DataConfig) -> Path:
    """The folder of the hub's parquet files. `place` is owner/name, and a folder in it where there are several."""
    owner_and_name, inside = "/".join(place.split("/")[:2]), "/".join(place.split("/")[2:])
    if not data.DOWNLOAD:
        raise UserError(
            f"DATA.DATASET {data.DATASET} is not on this machine: neither a folder, nor copied before into DATA.CACHE. "
            f"DATA.DOWNLOAD=true fetches it from the Hugging Face hub."
        )
    from huggingface_hub import snapshot_download

    log.info("Fetching the parquet files of %s from the Hugging Face hub.", place)
    pattern = f"{inside}/*.parquet" if inside else "*.parquet"
    try:
        folder = Path(snapshot_download(owner_and_name, repo_type="dataset", allow_patterns=pattern))
        if not any(folder.rglob("*.parquet")):
            # The hub itself makes parquet files of data sets that come as something else.
            revision = "refs/convert/parquet"
            folder = Path(
                snapshot_download(owner_and_name, repo_type="dataset", allow_patterns=pattern, revision=revision)
            )
    except Exception as error:  # the network, the hub and the disk have errors of their own
        reason = " ".join(str(error).split())[:REASON] or type(error).__name__
        raise UserError(
            f"DATA.DATASET {data.DATASET}: {owner_and_name} could not be fetched from the Hugging Face hub: {reason} "
            f"What is there already is kept. By hand: fetch its parquet files and name their folder, hf:/folder."
        ) from None
    return folder / inside


def _copy(source: Path, folder: Path, data: DataConfig) -> None:
    """Into a folder beside the final one, which gets its name when all is there."""
    parts = find_parts(source, data.DATASET)
    files = [file for of_part in parts.values() for file in of_part]
    columns = columns_of(files, data.DATASET)
    size, free = sum(file.stat().st_size for file in files), shutil.disk_usage(folder.parent).free
    if size * MARGIN > free:
        raise UserError(
            f"DATA.DATASET {data.DATASET}: its images are copied into {folder.parent} once, which needs "
            f"{size * MARGIN / 1e9:.1f} GB; {free / 1e9:.1f} GB are free. DATA.CACHE names another folder."
        )
    log.info("%s: copying its images into %s, once (%.2f GB).", data.DATASET, folder, size / 1e9)
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        names = {part: _copy_part(of_part, columns, scratch / part) for part, of_part in parts.items()}
        about = {"classes": columns.classes, "source": data.DATASET}
        samples = finish_set(scratch, names, about)
        os.replace(scratch, folder)
    except OSError as error:
        raise UserError(
            f"DATA.DATASET {data.DATASET}: it could not be copied into {folder}: {error}. DATA.CACHE names another."
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("%s: %d images copied; they are read from there from now on.", data.DATASET, samples)


def _copy_part(files: list[Path], columns: Columns, folder: Path) -> list[str]:
    """Names of the tar files written, relative to the folder above."""
    folder.mkdir(parents=True)
    names: list[str] = []
    writer: TarWriter | None = None
    for number, file in enumerate(files):
        for row in rows(file, number, columns):
            if writer is None or writer.size >= SHARD_BYTES:
                if writer is not None:
                    writer.close()
                names.append(f"{folder.name}/{len(names):05d}.tar")
                writer = TarWriter(folder.parent / names[-1])
            writer.add(*row)
    if writer is None:
        raise UserError(f"{files[0]}: there is no image in it.")
    writer.close()
    return names


def _set(data: DataConfig) -> ShardSet:
    return ShardSet(Folder(prepared(data)), data)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    return Images(open_part(_set(data), data, train, num_classes, ALL_SHARDS), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    if data.DATA_PATH is not None:
        log.info("DATA.DATA_PATH is not used: DATA.DATASET %s says where the images are.", data.DATASET)
    check_parts(_set(data), data, num_classes, train)


SOURCE = Source(_open, _check, fetches=True)
