"""The parts of a set of tar files, their classes, and the index of each part."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from datasets.shards.index import ShardIndex, from_bytes, leads_out, make_index
from datasets.shards.stores import Folder, Found, Store
from datasets.shards.tar import DOTS, TarSamples
from datasets.sources.imagefolder import VALIDATION_NAMES
from datasets.sources.walk import tell_once
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import write_atomically
from utils.log import log

MANIFEST, CLASS_NAMES = "dataset.json", "classes.txt"
MADE_BY = "vitamp"
"""In the manifest, which others give the same name."""
LAYOUT = """Expected layout, of tar files with key.jpg and key.cls (or key.json) for each image:
  {root}/train/0000.tar, {root}/val/0000.tar    (or validation/, or test/)
or {root}/anything-train-0000.tar, {root}/anything-val-0000.tar
or {root}/anything.tar, of which DATA.VAL_FRACTION is taken for validation
scripts/pack_images.py makes such files."""


class ShardSet:
    """What is in a store."""

    def __init__(self, store: Store, data: DataConfig) -> None:
        self.store, self.data = store, data
        self._manifest = self._read_manifest()
        self.classes = self._read_classes()
        self.parts = self._packed(self._manifest) if self._manifest else self._found()

    def part(self, train: bool) -> tuple[str, bool]:
        """The name of the part to read, and whether training and validation share it."""
        names = ("train", "all") if train else ("val", "train", "all")
        for name in names:
            if name in self.parts:
                return name, name == "all" or (name == "train" and "val" not in self.parts)
        what = "no tar file for training" if self.parts else "no tar file"
        raise UserError(
            f"DATA.DATA_PATH (-data_path): there is {what} in {self.store.root}. {LAYOUT.format(root=self.store.root)}"
        )

    def index(self, part: str) -> ShardIndex:
        """Where the samples of a part are. Other files in its tar files are logged, once per process."""
        index = self._index(part)
        if index.passed_over:
            tell_once(f"{self.store.root}, part {part}: {_told(index.passed_over)}")
        return index

    def _index(self, part: str) -> ShardIndex:
        """As it was kept, or by reading all headers once."""
        found = self.parts[part]
        if index := self._beside(part):
            return index
        folder = cache_folder(self.data, "shards")
        cached = folder / f"{hashlib.sha256(self.store.root.encode()).hexdigest()[:16]}-{part}.npz"
        with process_lock(cached.with_suffix(".lock"), f"makes the index of {self.store.root}"):
            if index := self._beside(part) or self._fitting(cached.read_bytes() if cached.is_file() else None, found):
                return index
            total = sum(file.size for file in found) / 1e9
            log.info("Reading the headers of %d tar files (%.1f GB) in %s.", len(found), total, self.store.root)
            index = make_index(self.store, found, self.classes)
            if not len(index):
                passed = f"; {_told(index.passed_over)}" if index.passed_over else "."
                raise UserError(f"{self.store.root}: the tar files of the part {part} hold no image{passed}")
            self._keep(index, part, cached)
        return index

    def _beside(self, part: str) -> ShardIndex | None:
        """The index that is with the tar files. Once sent to a store, these have other times than it says."""
        found = [file._replace(stamp="") for file in self.parts[part]] if self.store.remote else self.parts[part]
        return self._fitting(self.store.whole(index_name(part)), found)

    def _fitting(self, content: bytes | None, found: list[Found]) -> ShardIndex | None:
        index = from_bytes(content) if content is not None else None
        return index if index is not None and index.fits(found, self.classes) else None

    def _keep(self, index: ShardIndex, part: str, cached: Path) -> None:
        place = cached if self.store.remote else Path(self.store.root, index_name(part))
        try:
            write_atomically(place, index.to_bytes())
        except OSError:
            try:
                place = cached
                write_atomically(place, index.to_bytes())
            except OSError as error:
                log.warning("The index of %s cannot be kept, and is made at each start: %s", self.store.root, error)
                return
        log.info("%d images; their index is kept as %s.", len(index), place)

    def _read_manifest(self) -> dict[str, Any] | None:
        """What scripts/pack_images.py wrote about its tar files."""
        content = self.store.whole(MANIFEST)
        try:
            manifest = json.loads(content) if content is not None else None
            if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
                return None
            shards = [shard for part in manifest["parts"].values() for shard in part["shards"]]
            if any(shard["bytes"] < 0 or leads_out(shard["name"]) for shard in shards) or not isinstance(
                manifest["classes"], list | None
            ):
                raise ValueError("it names what it should not")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.store.root}/{MANIFEST} cannot be read: {type(error).__name__}: {error}.") from None
        return manifest

    def _read_classes(self) -> list[str] | None:
        if self._manifest:
            return self._manifest["classes"]
        content = self.store.whole(CLASS_NAMES)
        if content is None:
            return None
        return [line.strip() for line in content.decode("utf-8-sig", errors="replace").splitlines() if line.strip()]

    def _packed(self, manifest: dict[str, Any]) -> dict[str, list[Found]]:
        """What the manifest names, and that it is there: a missing shard would go unnoticed otherwise."""
        parts = {}
        for part, about in manifest["parts"].items():
            parts[part] = [Found(shard["name"], shard["bytes"], "") for shard in about["shards"]]
            there = {file.name: file.size for file in self.store.tars(part)}
            if not there and self.store.remote:
                continue  # many web servers do not list their files
            for shard in parts[part]:
                if there.get(shard.name) != shard.size:
                    what = f"has {there[shard.name]:,} bytes" if shard.name in there else "is missing"
                    raise UserError(
                        f"{self.store.root}/{shard.name} {what}; {MANIFEST} says that it has {shard.size:,}. "
                        f"Copy or pack it again."
                    )
        return parts

    def _found(self) -> dict[str, list[Found]]:
        """By folders, else by names; validation is what comes first of val, validation and test."""
        named: dict[str, list[Found]] = {name: self.store.tars(name) for name in ("train", *VALIDATION_NAMES)}
        if not any(named.values()):
            named = defaultdict(list)
            for file in self.store.tars():
                word = re.search(rf"(?<![a-z])(train|{'|'.join(VALIDATION_NAMES)})(?![a-z])", file.name.lower())
                named[word[1] if word else "all"].append(file)
        others = named.pop("all", [])
        validation = next((named[name] for name in VALIDATION_NAMES if named.get(name)), [])
        parts = {"train": named.get("train", []), "val": validation}
        if not any(parts.values()):
            parts = {"all": others}
        elif others:
            log.warning("%s is neither train nor val by its name, and is passed over.", others[0].name)
        return {name: files for name, files in parts.items() if files}


def finish_set(
    folder: Path,
    parts: dict[str, list[str]],
    about: dict[str, Any],
    notes: dict[str, dict[str, Any]] | None = None,
    each: Callable[[Iterable[Found]], Iterable[TarSamples]] | None = None,
) -> int:
    """Write the indexes of freshly made tar files, and last the manifest, which says that all is there.

    `about` goes into the manifest, `notes` to each shard. Returns the number of samples.
    """
    store, samples, told = Folder(folder), 0, {}
    for part, names in parts.items():
        # No stamps: these files are known by the manifest, and stay the same ones when they are copied elsewhere.
        found = [Found(name, os.path.getsize(folder / name), "") for name in names]
        index = make_index(store, found, None, each)
        counts = np.bincount(index.shard, minlength=len(found)).tolist()
        shards = [
            {"name": file.name, "bytes": file.size, "samples": count, **(notes or {}).get(file.name, {})}
            for file, count in zip(found, counts, strict=True)
        ]
        told[part] = {"samples": len(index), "shards": shards}
        samples += len(index)
        write_atomically(folder / index_name(part), index.to_bytes())
    manifest = {"made_by": MADE_BY, "format": 1, **about, "parts": told}
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    return samples


def _told(passed_over: str) -> str:
    if DOTS not in passed_over:
        return passed_over
    return (
        f"{passed_over}. As in WebDataset, all that follows the first dot says what a member is, and front.jpg is no "
        "kind of image: name it cat_front.jpg, not cat.front.jpg."
    )


def index_name(part: str) -> str:
    return f"index-{part}.npz"
