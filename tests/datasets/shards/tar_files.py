"""Tar files for tests: intact ones in WebDataset's layout, and damaged ones."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

Member = tuple[str, bytes]


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (30, 20)) -> bytes:
    """The bytes of a small image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def samples(numbers: Iterable[int], classes: int = 3) -> list[Member]:
    """Members of intact samples: image k has the key k and the label k modulo `classes`."""
    return [
        member
        for k in numbers
        for member in ((f"{k:04d}.png", picture(k)), (f"{k:04d}.cls", str(k % classes).encode()))
    ]


def write_tar(path: Path, members: Iterable[Member | tarfile.TarInfo]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def write_set(root: Path, sizes: Iterable[int] = (5, 3, 4), val: int = 4) -> Path:
    """train/0.tar, ... with these numbers of samples, numbered consecutively, and val/0.tar."""
    first = 0
    for number, size in enumerate(sizes):
        write_tar(root / "train" / f"{number:04d}.tar", samples(range(first, first + size)))
        first += size
    write_tar(root / "val" / "0000.tar", samples(range(first, first + val)))
    return root
