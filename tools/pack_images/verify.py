"""scripts/pack_images.py -verify: a packed folder is compared with its checksums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from datasets.shards.index import from_bytes, make_index
from datasets.shards.layout import MADE_BY, MANIFEST, index_name
from datasets.shards.stores import Folder, ShardFile
from tools.common.progress import progress
from tools.pack_images.shard import digest
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.files import parse_json
from utils.log import log
from utils.machine.cpus import cores


def verify(folder: Path, jobs: int | None) -> int:
    """Compare tar files with their checksums, then indexes with the tar files, and log every difference."""
    splits = _manifest(folder)["parts"]
    shards = [shard for split in splits.values() for shard in split["shards"]]
    with ThreadPoolExecutor(jobs or cores()) as pool:
        checks = [pool.submit(_problem, folder, shard) for shard in shards]
        problems = [problem for check in progress(checks, "tar files") if (problem := check.result())]
    checked = f"{len(shards)} tar files"
    if not problems:
        checked = f"{len(splits)} indexes"
        problems = [problem for name, split in splits.items() if (problem := _index_problem(folder, name, split))]
    for problem in problems:
        log.error("%s", problem)
    if problems:
        log.error("%d of %s are damaged, missing or changed.", len(problems), checked)
        return EXIT_FAILED
    if all("sha256" in shard for shard in shards):
        log.info("%d tar files and their indexes are unchanged.", len(shards))
    else:
        log.info(
            "%d tar files have the sizes recorded in %s and match their indexes. %s has no checksums, so the images "
            "themselves were not compared.",
            len(shards),
            MANIFEST,
            MANIFEST,
        )
    return EXIT_DONE


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"-verify {folder}: {MANIFEST} cannot be read: {error}. It is written when packing is done."
        ) from None
    if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
        raise UserError(f"-verify {folder}: its {MANIFEST} was not written by pack_images.py and has no checksums.")
    return manifest


def _problem(folder: Path, shard: dict[str, Any]) -> str | None:
    path = folder / shard["name"]
    try:
        size = path.stat().st_size
        if size != shard["bytes"]:
            return f"{path} has {size:,} bytes, not {shard['bytes']:,}"
        if "sha256" in shard and digest(path) != shard["sha256"]:
            return f"{path} has another checksum: it was changed, or the disk returns wrong bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def _index_problem(folder: Path, name: str, split: dict[str, Any]) -> str | None:
    path = folder / index_name(name)
    found = [ShardFile(shard["name"], shard["bytes"], "") for shard in split["shards"]]
    index = from_bytes(path.read_bytes()) if path.is_file() else None
    if index is None:
        return f"{path} is missing or damaged; training will rebuild it"
    expected = make_index(Folder(folder), found, None)
    fields = ("shard", "offset", "size", "label", "names", "name_ends")
    if not index.is_current(found, None) or any(
        not np.array_equal(getattr(index, f), getattr(expected, f)) for f in fields
    ):
        return f"{path} does not match the tar files; remove it, and training will rebuild it"
    return None
