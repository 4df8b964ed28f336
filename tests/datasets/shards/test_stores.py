"""A folder of shards with storage errors: files are reopened before the next read."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from datasets.shards.stores import Folder, Range

WHOLE = np.arange(5000, dtype=np.int32).astype(np.uint8)
PART: Range = ("0.tar", 1000, 500)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (tmp_path / "0.tar").write_bytes(WHOLE.tobytes())
    return tmp_path / "0.tar"


def handles_of(shard: Path) -> list[int]:
    """Open handles of this process for the file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.realpath(f"/proc/self/fd/{name}") == str(shard):
                found.append(int(name))
    return found


@contextlib.contextmanager
def stale(shard: Path, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Open handles of the file fail until they are closed, as after its file system is mounted again."""
    gone = handles_of(shard)
    assert gone
    real = {"preadv": os.preadv, "fstat": os.fstat}

    def failing(name: str) -> Callable[..., object]:
        def call(handle: int, *rest: object) -> object:
            if handle in gone:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real[name](handle, *rest)

        return call

    close = os.close

    def closing(handle: int) -> None:
        if handle in gone:
            gone.remove(handle)
        close(handle)

    with patch.context() as inside:
        for name in real:
            inside.setattr(os, name, failing(name))
        inside.setattr(os, "close", closing)
        yield gone


@pytest.mark.parametrize("way", ["range", "view"])
def test_file_is_reopened_after_an_error(shard: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(shard.parent)
    read = getattr(store, way)
    before = read(PART)
    with stale(shard, monkeypatch) as dead:
        handles = len(dead)
        with pytest.raises(OSError, match="Stale file handle"):
            read(PART)
        assert np.array_equal(read(PART), WHOLE[1000:1500])
        assert len(dead) == handles - 1, "the dead one is closed"
    assert np.array_equal(before, WHOLE[1000:1500]), "what was read stays readable"


@pytest.mark.parametrize("way", ["range", "view"])
def test_short_file_is_reopened(shard: Path, way: str) -> None:
    os.truncate(shard, 1200)
    read = getattr(Folder(shard.parent), way)
    assert len(read(PART)) == 200
    again = shard.with_name("copy")
    again.write_bytes(WHOLE.tobytes())
    os.replace(again, shard)
    assert np.array_equal(read(PART), WHOLE[1000:1500])


def test_grown_file_is_mapped_again(shard: Path) -> None:
    os.truncate(shard, 1200)
    store = Folder(shard.parent)
    assert len(store.view(("0.tar", 0, 1000))) == 1000
    with open(shard, "ab") as file:
        file.write(WHOLE[1200:].tobytes())
    assert np.array_equal(store.view(PART), WHOLE[1000:1500])
