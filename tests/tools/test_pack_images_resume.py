"""scripts/pack_images.py resumes after storage errors and interruptions."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from datasets.sources.files import FileSamples
from tests.tools.packing import Pack, members, photograph


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight photographs for training and two for validation."""
    for k in range(10):
        photograph(tmp_path / "src" / ("val" if k > 7 else "train") / "ab"[k % 2] / f"{k}.jpg", k)
    return tmp_path / "src"


def test_storage_error_stops_packing_and_leaves_no_image_out(
    source: Path, tmp_path: Path, pack: Pack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", (0.01,))
    lost = source / "train" / "a" / "0.jpg"
    words = (source, tmp_path / "packed", "-keep", "-shard_images", 4, "-num_workers", 1, "DATA.MAX_BAD=5")

    def read(samples: FileSamples, index: int) -> bytes:
        if samples.name(index) == str(lost):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return Path(samples.name(index)).read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(FileSamples, "read", read)
        assert pack(*words) == 1
    said = capsys.readouterr().err
    assert f"{lost} cannot be read: Input/output error" in said
    assert "When the storage is back, the same command resumes" in said
    assert not list(tmp_path.rglob("*.part"))
    assert pack(*words) == 0
    assert lost.read_bytes() in members(tmp_path / "packed", "train").values()
    assert "0 left out" in capsys.readouterr().out


def test_packing_starts_over_after_an_early_interruption(
    source: Path, tmp_path: Path, pack: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted before its settings were written; a folder with other content is refused."""
    packed = tmp_path / "packed"
    (packed / ".packing").mkdir(parents=True)
    assert pack(source, packed, "-keep") == 0
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    (other / "train" / "00000.tar").write_text("mine")
    capsys.readouterr()
    assert pack(source, other, "-keep") == 2
    assert "has other content, such as train." in capsys.readouterr().err
    assert [path.read_text() for path in other.rglob("*") if path.is_file()] == ["mine"]


def test_settings_are_written_atomically(
    source: Path, tmp_path: Path, pack: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes 100 bytes, about half of the settings file."""
    words = (source, tmp_path / "packed", "-keep")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        assert pack(*words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "packed cannot be written: " in capsys.readouterr().err
    assert not [path for path in tmp_path.glob("packed/.packing/*") if path.is_file()]
    assert pack(*words) == 0


def test_source_is_recognised_under_any_spelling_of_its_path(
    source: Path, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{path.relative_to(source)},{path.parent.name}\n" for path in sorted(source.rglob("*.jpg"))]
    (source / "all.csv").write_text("path,target\n" + "".join(lines))
    monkeypatch.chdir(source)
    for number, (dataset, ways) in enumerate(
        (
            ("csv", (source / "all.csv", "all.csv", "./all.csv", f"{source}/../src/all.csv")),
            ("imagefolder", (source, ".", f"{source}/", "../src")),
            ("shards", (tmp_path / "0", f"file://{tmp_path}/0", f"file://{tmp_path}/0/")),
        )
    ):
        for way in ways:
            assert pack(way, tmp_path / str(number), "-keep", "-dataset", dataset) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.count("is packed already") == len(ways) - 1
