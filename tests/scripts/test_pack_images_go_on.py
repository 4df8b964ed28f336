"""scripts/pack_images.py after something went wrong: what it says, and that the same command goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datasets import reading
from datasets.files import FileSamples
from tests.scripts.packing import Pack, members, photograph


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight photographs for training and two for validation."""
    for k in range(10):
        photograph(tmp_path / "src" / ("val" if k > 7 else "train") / "ab"[k % 2] / f"{k}.jpg", k)
    return tmp_path / "src"


def test_storage_that_fails_leaves_no_image_out(
    source: Path, tmp_path: Path, pack: Pack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.01,))
    lost = source / "train" / "a" / "0.jpg"
    words = (source, tmp_path / "packed", "-keep", "-shard_images", 4, "-jobs", 1, "DATA.MAX_BAD=5")

    def read(samples: FileSamples, index: int) -> bytes:
        if samples.name(index) == str(lost):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return Path(samples.name(index)).read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(FileSamples, "read", read)
        assert pack(*words) == 1
    said = capsys.readouterr().err
    assert f"{lost} cannot be read: Input/output error" in said
    assert "When the storage is back, the same command goes on" in said
    assert not list(tmp_path.rglob("*.part"))
    assert pack(*words) == 0
    assert lost.read_bytes() in members(tmp_path / "packed", "train").values()
    assert "0 left out" in capsys.readouterr().out
