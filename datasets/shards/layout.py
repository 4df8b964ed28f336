"""Splits of a set of tar files, their classes, and the index of each split."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import Part, part_of
from datasets.shards.index import ReadShards, ShardIndex, from_bytes, make_index
from datasets.shards.stores import Folder, ShardFile, Store
from datasets.shards.tar import DOTS
from datasets.sources.files import leads_out
from datasets.sources.named_splits import distinct, named_parts, split_named_in, split_names, warn_of_skipped
from datasets.sources.split import no_such_part
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import parse_json, write_atomically
from utils.log import log, warn_once

MANIFEST, CLASS_NAMES = "dataset.json", "classes.txt"
LABEL_SETS = "label_sets"
"""Key of the manifest: sets of classes. An image's label is then the number of its set (DATA.MULTI_LABEL)."""
MADE_BY = "vitamp"
"""Mark of our manifest: other programs use the same file name."""
LAYOUT = """Expected layout, of tar files with key.jpg and key.cls (or key.json) for each image:
  {root}/train/0000.tar, {root}/val/0000.tar    (or valid/, validation/, dev/)
or {root}/anything-train-0000.tar, {root}/anything-val-0000.tar
or {root}/anything.tar, to be split by DATA.VAL_FRACTION
scripts/pack_images.py makes such files."""


class ShardSet:
    """The splits in a store."""

    def __init__(self, store: Store, data: DataConfig) -> None:
        self.store, self.data = store, data
        self._manifest = self._read_manifest()
        self.classes = self._read_classes()
        self.label_sets: list[list[int]] | None = (self._manifest or {}).get(LABEL_SETS)
        self.splits = self._listed(self._manifest) if self._manifest else self._found()

    def split(self, part: Part) -> tuple[str, bool]:
        """Name of the stored split to read, and whether training and validation share it."""
        names = {"train": ("train", "all"), "val": ("val", "train", "all"), "test": ("test",), "all": ("train", "all")}
        for name in names[part]:
            if name in self.splits:
                return name, name == "all" or (name == "train" and "val" not in self.splits)
        if part == "test" and self.splits:
            raise no_such_part(part, self.store.root)
        what = "no tar file for training" if self.splits else "no tar file"
        raise UserError(
            f"DATA.DATA_PATH (-data_path): there is {what} in {self.store.root}. {LAYOUT.format(root=self.store.root)}"
        )

    def existing(self) -> list[Part]:
        """All its splits, each once; `all` alone if it comes unsplit."""
        if self.split("val")[1]:
            return ["all"]
        return distinct({part: self.splits[part] for part in ("train", "val", "test") if part in self.splits})

    def index(self, split: str) -> ShardIndex:
        """Index of a split. Skipped files in its tar files are logged, once per process."""
        index = self._index(split)
        if index.skipped:
            warn_once(f"{self.store.root}, split {split}: {_explained(index.skipped)}")
        return index

    def _index(self, split: str) -> ShardIndex:
        """The stored index if it is current, else a new one from all headers."""
        shards = self.splits[split]
        if self.store.remote:
            self._check_server(shards[0])
        if index := self._beside(split):
            return index
        folder = cache_folder(self.data, "shards")
        cached = folder / f"{hashlib.sha256(self.store.root.encode()).hexdigest()[:16]}-{split}.npz"
        with process_lock(cached.with_suffix(".lock"), f"makes the index of {self.store.root}"):
            content = cached.read_bytes() if cached.is_file() else None
            if index := self._beside(split) or self._if_current(content, shards):
                return index
            total = sum(file.size for file in shards) / 1e9
            log.info("Reading the headers of %d tar files (%.1f GB) in %s.", len(shards), total, self.store.root)
            index = make_index(self.store, shards, self.classes)
            if not len(index):
                skipped = f"; {_explained(index.skipped)}" if index.skipped else "."
                raise UserError(f"{self.store.root}: the tar files of the split '{split}' have no images{skipped}")
            self._save(index, split, cached)
        return index

    def _check_server(self, shard: ShardFile) -> None:
        """Raise UserError if the server cannot read a part of a file: each image would be a whole tar file."""
        try:
            self.store.range((shard.name, 0, 1))
        except OSError as error:
            raise UserError(f"{self.store.root}/{shard.name} cannot be read: {error}.") from None

    def _beside(self, split: str) -> ShardIndex | None:
        """The index beside the tar files. Times are not compared in a remote store, since uploading changes them."""
        shards = self.splits[split]
        if self.store.remote:
            shards = [file._replace(stamp="") for file in shards]
        return self._if_current(self.store.read_file(index_name(split)), shards)

    def _if_current(self, content: bytes | None, shards: list[ShardFile]) -> ShardIndex | None:
        index = from_bytes(content) if content is not None else None
        return index if index is not None and index.is_current(shards, self.classes) else None

    def _save(self, index: ShardIndex, split: str, cached: Path) -> None:
        """Save the index beside the tar files if possible, else in the cache."""
        beside = [] if self.store.remote else [Path(self.store.root, index_name(split))]
        failure: OSError | None = None
        for file in [*beside, cached]:
            try:
                write_atomically(file, index.to_bytes())
            except OSError as error:
                failure = error
            else:
                log.info("Saved the index of %d images as %s.", len(index), file)
                return
        log.warning("The index of %s cannot be saved, so each start makes it again: %s", self.store.root, failure)

    def _read_manifest(self) -> dict[str, Any] | None:
        """The manifest that scripts/pack_images.py wrote, if there is one."""
        content = self.store.read_file(MANIFEST)
        try:
            manifest = parse_json(content) if content is not None else None
            if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
                return None
            shards = [shard for part in manifest["parts"].values() for shard in part["shards"]]
            if any(shard["bytes"] < 0 or leads_out(shard["name"]) for shard in shards) or not isinstance(
                manifest["classes"], list | None
            ):
                raise ValueError("invalid sizes, names or classes")
            if any(type(label) is not int for of_set in manifest.get(LABEL_SETS, []) for label in of_set):
                raise ValueError("invalid label sets")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.store.root}/{MANIFEST} cannot be read: {type(error).__name__}: {error}.") from None
        return manifest

    def _read_classes(self) -> list[str] | None:
        if self._manifest:
            return self._manifest["classes"]
        content = self.store.read_file(CLASS_NAMES)
        if content is None:
            return None
        return [line.strip() for line in content.decode("utf-8-sig", errors="replace").splitlines() if line.strip()]

    def _listed(self, manifest: dict[str, Any]) -> dict[str, list[ShardFile]]:
        """Shards in the manifest. Each must exist: otherwise a missing one would go unnoticed."""
        splits = {}
        for split, entry in manifest["parts"].items():
            splits[split] = [ShardFile(shard["name"], shard["bytes"], "") for shard in entry["shards"]]
            sizes = {file.name: file.size for file in self.store.tars(split)}
            if not sizes and self.store.remote:
                continue  # many web servers do not list their files
            for shard in splits[split]:
                if sizes.get(shard.name) != shard.size:
                    problem = f"has {sizes[shard.name]:,} bytes" if shard.name in sizes else "is missing"
                    raise UserError(
                        f"{self.store.root}/{shard.name} {problem}; {MANIFEST} lists it with {shard.size:,} bytes. "
                        + (
                            f"Remove {self.store.root}, and the next run copies the data set again."
                            if str(manifest.get("source", "")).startswith("hf:")
                            else "Copy or pack it again."
                        )
                    )
        return splits

    def _found(self) -> dict[str, list[ShardFile]]:
        """Shards by folder, else by file name."""
        names = split_names(self.data)
        named: dict[str, list[ShardFile]] = {name: self.store.tars(name) for name in names}
        if any(named.values()):
            # A server may list the folders of the splits and refuse to list the one above them.
            others = [] if self.store.remote else self.store.tars()
        else:
            others = []
            for file in self.store.tars():
                split = split_named_in(file.name, names)
                (named[split] if split else others).append(file)
        parts = named_parts(
            [name for name, files in named.items() if files], self.store.root, part_of(self.data, False)
        )
        if not parts:
            return {"all": others} if others else {}
        warn_of_skipped(self.store.root, [file.name for file in others])
        return {part: named[name] for part, name in parts.items()}


def finish_set(
    folder: Path,
    splits: dict[str, list[str]],
    about: dict[str, Any],
    notes: dict[str, dict[str, Any]] | None = None,
    read_shards: ReadShards | None = None,
) -> int:
    """Write the indexes of new tar files, and last the manifest, which marks the set as complete.

    `about` is added to the manifest, `notes` to its entries of shards. Returns the number of samples.
    """
    store, samples, entries = Folder(folder), 0, {}
    for split, names in splits.items():
        # No stamps: the manifest identifies these files, also after they are copied elsewhere.
        files = [ShardFile(name, os.path.getsize(folder / name), "") for name in names]
        index = make_index(store, files, None, read_shards)
        counts = np.bincount(index.shard, minlength=len(files)).tolist()
        shards = [
            {"name": file.name, "bytes": file.size, "samples": count, **(notes or {}).get(file.name, {})}
            for file, count in zip(files, counts, strict=True)
        ]
        entries[split] = {"samples": len(index), "shards": shards}
        samples += len(index)
        write_atomically(folder / index_name(split), index.to_bytes())
    manifest = {"made_by": MADE_BY, "format": 1, **about, "parts": entries}
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    return samples


def _explained(skipped: str) -> str:
    if DOTS not in skipped:
        return skipped
    return (
        f"{skipped}. As in WebDataset, the extension of a member begins at the first dot of its name. That of "
        "cat.front.jpg is front.jpg, which is unknown: name the file cat_front.jpg."
    )


def index_name(split: str) -> str:
    return f"index-{split}.npz"
