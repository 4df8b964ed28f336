"""Helpers for tests of packing: generated photographs, and the content of a packed folder."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Pack = Callable[..., int]


def photograph(path: Path, seed: int, size: tuple[int, int] = (96, 64), **how: Any) -> Path:
    """Write an image with smooth colours, which JPEG keeps well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, **{"quality": 95, **how})
    return path


def members(folder: Path, part: str) -> dict[str, bytes]:
    found = {}
    for path in sorted((folder / part).iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
