"""scripts/pack_images.py with EXIF orientation."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tools.packing import Pack, members, photograph

ORIENTATION = 0x0112


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Photographs of 60 x 40: one with EXIF rotation, one without EXIF, one with orientation 1, which means upright."""
    for name, number in (("side", 6), ("plain", None), ("upright", 1)):
        exif = Image.Exif()
        if number:
            exif[ORIENTATION] = number
        photograph(tmp_path / "src" / "train" / "a" / f"{name}.jpg", 3, size=(60, 40), exif=exif)
    photograph(tmp_path / "src" / "val" / "a" / "0.jpg", 4)
    return tmp_path / "src"


def sizes(packed: Path) -> list[tuple[int, int]]:
    images = [content for name, content in members(packed, "train").items() if not name.endswith(".cls")]
    return sorted(Image.open(io.BytesIO(content)).size for content in images)


def test_exif_rotation_is_applied_to_small_images(source: Path, tmp_path: Path, pack: Pack) -> None:
    assert pack(source, tmp_path / "packed", "DATA.EXIF_ROTATE=true") == 0
    assert sizes(tmp_path / "packed") == [(40, 60), (60, 40), (60, 40)]
    packed = members(tmp_path / "packed", "train").values()
    assert (source / "train" / "a" / "plain.jpg").read_bytes() in packed
    assert (source / "train" / "a" / "upright.jpg").read_bytes() in packed, "an upright image is kept unchanged"
    (turned,) = [image for image in map(io.BytesIO, packed) if b"JFIF" in image.getvalue() and _size(image) == (40, 60)]
    with Image.open(turned) as image, Image.open(source / "train" / "a" / "side.jpg") as original:
        assert not image.getexif().get(ORIENTATION), "the tag is gone, so that it is not rotated again"
        upright = np.asarray(original.transpose(Image.Transpose.ROTATE_270), dtype=int)
        assert np.abs(np.asarray(image, dtype=int) - upright).mean() < 4


def _size(file: io.BytesIO) -> tuple[int, int]:
    with Image.open(io.BytesIO(file.getvalue())) as image:
        return image.size


def test_without_exif_rotate_images_are_unchanged(source: Path, tmp_path: Path, pack: Pack) -> None:
    assert pack(source, tmp_path / "packed") == 0
    files = sorted(path.read_bytes() for path in (source / "train" / "a").iterdir())
    images = [content for name, content in members(tmp_path / "packed", "train").items() if not name.endswith(".cls")]
    assert sorted(images) == files
