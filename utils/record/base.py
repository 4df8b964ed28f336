"""Frozen weights of a run with adapters (MODEL.LORA): one file beside its checkpoints, which hold only what is trained.

meta.json names its hash, so that adapters are never added to other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from utils.errors import UserError

BASE = "base.safetensors"
LORA = "lora"
"""Field of meta.json"""


def base_file(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """The file of frozen weights of the checkpoint `folder`, by its size; None if the checkpoint needs none."""
    if meta.get(LORA) is None:
        return None
    seal, places = meta[LORA]["base"], (folder.absolute() / BASE, folder.absolute().parent / BASE)
    if found := next((place for place in places if place.is_file()), None):
        if found.stat().st_size != seal["size"]:
            raise UserError(f"{found}: damaged or of another run, it does not have the size that {folder} records.")
        return found
    source = meta[LORA].get("source")
    raise UserError(
        f"{folder}: these are adapters (MODEL.LORA), which need the frozen weights of their run{_made_of(source)}: "
        f"{BASE} with sha256 {seal['sha256'][:12]}... is neither {places[0]} nor {places[1]}. Copy it from the run's "
        "folder checkpoints/. To take weights elsewhere as one file, use `python scripts/checkpoint.py strip` or "
        "scripts/export.py in the run's folder: they merge the adapters."
    )


def _made_of(source: object) -> str:
    return f" (made of {source})" if source else ""


def verified_base(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """`base_file` after a check of its hash."""
    file = base_file(folder, meta)
    if file is not None and sha256_of(file) != meta[LORA]["base"]["sha256"]:
        raise UserError(f"{file}: damaged or of another run, its contents are not those that {folder} records.")
    return file


def sha256_of(file: Path) -> str:
    """Hash of a file, computed once for as long as the file does not change."""
    about = file.stat()
    return _digest(file.resolve(), about.st_size, about.st_mtime_ns)


@cache
def _digest(file: Path, _size: int, _changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
