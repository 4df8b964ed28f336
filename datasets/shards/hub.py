"""`hf:NAME_OR_PATH`: image data sets of the Hugging Face hub, or a folder of such parquet files.

An image in a parquet file cannot be read without its neighbours. So the images are copied once, unchanged, into tar
files, and read from there.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

from datasets.base import HUB_PREFIX, Part
from datasets.images import image_source
from datasets.shards.layout import LABEL_SETS, MANIFEST, ShardSet, finish_set
from datasets.shards.parquet import Columns, choose_files, columns_of, find_splits, require_pyarrow, rows, size_in_tar
from datasets.shards.source import ShardSamples, check_splits, open_split
from datasets.shards.stores import Folder
from datasets.shards.tar import TarWriter
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import write_atomically
from utils.log import log

SHARD_BYTES = 256 << 20
ALL_SHARDS = 1 << 30
"""Shuffle window, in shards: the copy is on a local disk, where random reads are cheap."""
LONGEST_REASON = 300
"""Characters of an error message of the hub that are shown; it can be a page long."""
CONVERTED = "refs/convert/parquet"
"""Revision in which the hub keeps its own conversion of data sets of other formats"""


def _copied_folder(data: DataConfig) -> Path:
    """The folder of the copy, made at the first use."""
    place = data.DATASET.removeprefix(HUB_PREFIX)
    if not place:
        raise UserError(
            "DATA.DATASET 'hf:' lacks a name or a folder; give one, as in hf:ylecun/mnist or hf:/data/mnist."
        )
    local = is_path(place)
    if local and not Path(place).expanduser().is_dir():
        raise UserError(f"DATA.DATASET {data.DATASET}: there is no folder {place}.")
    folder = cache_folder(data, "hf") / _copy_name(place, local)
    if (folder / MANIFEST).is_file():
        return folder
    with process_lock(folder.with_name(f"{folder.name}.lock"), f"copies {data.DATASET}"):
        if not (folder / MANIFEST).is_file():
            require_pyarrow(f"DATA.DATASET {data.DATASET}: reading")
            source = Path(place).expanduser() if local else _download(place, data)
            _copy(source, folder, data)
    return folder


def is_path(place: str) -> bool:
    """Whether the text after `hf:` names a folder of this machine, not a data set of the hub."""
    return place.startswith(("/", ".", "~")) or Path(place).is_dir()


def _copy_name(place: str, local: bool) -> str:
    """Name of the copy. It changes with the files of a local folder; a data set of the hub is downloaded once."""
    identity = [place]
    if local:
        root = Path(place).expanduser().resolve()
        files = sorted((str(path), path.stat()) for path in root.rglob("*.parquet"))
        identity = [str(root), *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files)]
    digest = hashlib.sha256("\n".join(identity).encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', place).strip('-.')[-60:]}-{digest}"


def repository_of(place: str) -> tuple[str, str, str | None]:
    """(owner/name, folder for a subset, revision) of `owner/name/folder@revision`."""
    path, _, revision = place.partition("@")
    owner, _, rest = path.partition("/")
    name, _, inside = rest.partition("/")
    return f"{owner}/{name}", inside, revision or None


def _download(place: str, data: DataConfig) -> Path:
    """Download the parquet files that are needed and return their folder. `place`: see `repository_of`."""
    name, inside, revision = repository_of(place)
    if not data.DOWNLOAD:
        raise UserError(
            f"DATA.DATASET {data.DATASET} is not on this machine, neither as a folder nor as a copy in DATA.CACHE. "
            f"DATA.DOWNLOAD=true fetches it from the Hugging Face hub."
        )
    from huggingface_hub import snapshot_download

    try:
        sizes = _parquet_files(name, inside, revision)
        if not sizes and revision is None:
            revision, sizes = CONVERTED, _parquet_files(name, inside, CONVERTED)
        # Before anything is fetched: a data set can have a hundred configurations.
        splits = choose_files(Path(name, inside), [Path(name, file) for file in sizes], data.DATASET)
        files = [str(file.relative_to(name)) for of_split in splits.values() for file in of_split]
        size = sum(sizes[file] for file in files) / 1e9
        log.info("Fetching %d parquet files (%.2f GB) of %s from the Hugging Face hub.", len(files), size, place)
        patterns = [glob.escape(file) for file in files]
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, revision=revision))
    except UserError:
        raise
    except Exception as error:  # the network, the hub and the disk have errors of many types
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        raise UserError(
            f"DATA.DATASET {data.DATASET}: {name} could not be fetched from the Hugging Face hub: "
            f"{reason.rstrip('.')}. "
            f"Files fetched so far are kept. Try again, or fetch its parquet files yourself and give their folder as "
            f"hf:/folder."
        ) from None
    again = f"{HUB_PREFIX}{place.partition('@')[0]}@{folder.name}"  # the folder is named by the commit
    log.info("%s is fetched; to get the same files again, name its revision: %s", data.DATASET, again)
    return folder / inside


def _parquet_files(name: str, inside: str, revision: str | None) -> dict[str, int]:
    """Size of each parquet file below a folder of a data set on the hub."""
    from huggingface_hub import HfApi

    tree = HfApi().list_repo_tree(name, recursive=True, repo_type="dataset", revision=revision)
    files = {entry.path: size for entry in tree if (size := getattr(entry, "size", None)) is not None}
    below = f"{inside}/" if inside else ""
    return {path: size for path, size in files.items() if path.endswith(".parquet") and path.startswith(below)}


def _copy(source: Path, folder: Path, data: DataConfig) -> None:
    """Copy into a temporary folder beside `folder`, and rename it when the copy is complete."""
    splits = find_splits(source, data.DATASET)
    files = [file for of_split in splits.values() for file in of_split]
    columns = columns_of(source, files, data.DATASET)
    scratch = folder.with_name(f".{folder.name}.part")
    identity = [f"{file.relative_to(source)} {file.stat().st_size}" for file in files] + [str(source.resolve())]
    copied = _Copied(scratch, identity)
    size = sum(size_in_tar(file, columns) for file in files) - copied.size()
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise UserError(
            f"DATA.DATASET {data.DATASET}: its images are copied to {folder.parent} once, which needs "
            f"{size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free. Set DATA.CACHE to another folder."
        )
    log.info("%s: copying its images to %s, once (%.2f GB).", data.DATASET, folder, size / 1e9)
    try:
        names = {split: _copy_split(of_split, columns, scratch / split, copied) for split, of_split in splits.items()}
        about = {"classes": columns.classes, "source": data.DATASET}
        if columns.several:
            about[LABEL_SETS] = list(copied.sets)
        copied.file.unlink()
        samples = finish_set(scratch, names, about)
        os.replace(scratch, folder)
    except OSError as error:
        raise UserError(
            f"DATA.DATASET {data.DATASET}: copying it to {folder} failed: {error}. The next run continues. DATA.CACHE "
            "sets another folder."
        ) from None
    except UserError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    log.info("%s: copied %d images; from now on, this copy is read.", data.DATASET, samples)


class _Copied:
    """What an interrupted copy has written: its complete tar files, in a file of their folder."""

    def __init__(self, scratch: Path, identity: list[str]) -> None:
        """`identity`: of the parquet files; a copy of others is removed."""
        self.file, self._identity = scratch / "copied.json", identity
        self.tars: dict[str, list[tuple[str, int]]] = {}
        """Name and number of images of the tar files of each split"""
        self.sets: dict[tuple[int, ...], int] = {}
        """Numbers of the sets of labels, where an image has several"""
        try:
            found = json.loads(self.file.read_bytes())
        except (OSError, ValueError):
            found = {}
        if found.get("identity") == identity:
            self.tars = {split: [(name, images) for name, images in tars] for split, tars in found["tars"].items()}
            self.sets = {tuple(labels): number for number, labels in enumerate(found["sets"])}
        else:
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)

    def size(self) -> int:
        return sum((self.file.parent / name).stat().st_size for tars in self.tars.values() for name, _ in tars)

    def add(self, split: str, name: str, images: int) -> None:
        self.tars.setdefault(split, []).append((name, images))
        found = {"identity": self._identity, "tars": self.tars, "sets": list(self.sets)}
        write_atomically(self.file, json.dumps(found).encode())


def _copy_split(files: list[Path], columns: Columns, folder: Path, copied: _Copied) -> list[str]:
    """Copy the images of a split, and return the names of its tar files, relative to the parent of `folder`.

    A tar file has one number per image. With several labels it is that of their set in `copied`, which grows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    split, images = folder.name, 0
    before = copied.tars.get(split, [])
    names, done = [name for name, _ in before], sum(count for _, count in before)
    writer: TarWriter | None = None
    every_row = (row for number, file in enumerate(files) for row in rows(file, number, columns))
    for row in itertools.islice(every_row, done, None):
        if writer is None or writer.size >= SHARD_BYTES:
            if writer is not None:
                writer.close()
                copied.add(split, names[-1], images)
            names.append(f"{split}/{len(names):05d}.tar")
            writer, images = TarWriter(folder.parent / names[-1]), 0
        label = copied.sets.setdefault(row.labels, len(copied.sets)) if columns.several else row.labels[0]
        writer.add(row.key, row.kind, row.image, label)
        images += 1
    if writer is not None:
        writer.close()
        copied.add(split, names[-1], images)
    if not names:
        raise UserError(f"{files[0]} has no images.")
    return names


def _shard_set(data: DataConfig) -> ShardSet:
    return ShardSet(Folder(_copied_folder(data)), data)


def _samples(data: DataConfig, part: Part, num_classes: int) -> ShardSamples:
    return open_split(_shard_set(data), data, part, num_classes, ALL_SHARDS)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    check_splits(_shard_set(data), data, num_classes, train)


def _is_unsplit(data: DataConfig) -> bool:
    return _shard_set(data).split("val")[1]


def _existing(data: DataConfig) -> list[Part]:
    return _shard_set(data).existing()


SOURCE = image_source(
    _samples, _check, fetches=True, is_unsplit=_is_unsplit, multi_label=True, reads_path=False, parts=_existing
)
