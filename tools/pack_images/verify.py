"""Whether a packed folder is still what was packed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from datasets.shards.index import from_bytes, make_index
from datasets.shards.layout import MADE_BY, MANIFEST, index_name
from datasets.shards.stores import Folder, Found
from tools.pack_images.shard import digest
from utils.cpus import cores
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.log import log


def verify(folder: Path, jobs: int | None) -> int:
    """Compare every tar file with its checksum and every index with the tar files; name what differs."""
    parts = _manifest(folder)["parts"]
    shards = [shard for part in parts.values() for shard in part["shards"]]
    with ThreadPoolExecutor(jobs or cores()) as pool:
        found = pool.map(lambda shard: _problem(folder, shard), shards)
        problems = [problem for problem in tqdm(found, total=len(shards), unit="tar", disable=None) if problem]
    looked_at = f"{len(shards)} tar files"
    if not problems:
        looked_at = f"{len(parts)} indexes"
        problems = [problem for name, part in parts.items() if (problem := _index_problem(folder, name, part))]
    for problem in problems:
        log.error("%s", problem)
    if problems:
        log.error("%d of %s differ from what was packed.", len(problems), looked_at)
        return EXIT_FAILED
    log.info("%d tar files and their indexes are as they were packed.", len(shards))
    return EXIT_DONE


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"-verify {folder}: {MANIFEST} cannot be read, which packing writes last: {error}.") from None
    if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
        raise UserError(f"-verify {folder}: its {MANIFEST} was not written by pack_images.py; it has no checksums.")
    return manifest


def _problem(folder: Path, shard: dict[str, Any]) -> str | None:
    path = folder / shard["name"]
    try:
        size = path.stat().st_size
        if size != shard["bytes"]:
            return f"{path} has {size:,} bytes, not {shard['bytes']:,}"
        if "sha256" in shard and digest(path) != shard["sha256"]:
            return f"{path} has another checksum: it was altered, or the disk gives other bytes than were written"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def _index_problem(folder: Path, part: str, about: dict[str, Any]) -> str | None:
    path = folder / index_name(part)
    found = [Found(shard["name"], shard["bytes"], "") for shard in about["shards"]]
    index = from_bytes(path.read_bytes()) if path.is_file() else None
    if index is None:
        return f"{path} is missing or damaged; without it, training makes it anew"
    true = make_index(Folder(folder), found, None)
    fields = ("shard", "offset", "size", "label", "names", "name_ends")
    if not index.fits(found, None) or any(not np.array_equal(getattr(index, f), getattr(true, f)) for f in fields):
        return f"{path} does not match the tar files; remove it, and training makes it anew"
    return None
