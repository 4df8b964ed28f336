"""Files that a killed run left incomplete in the compiler's cache."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from engine.compile.compiled import CACHE, prepare_compiler_cache
from tests.engine.small import build
from utils.config.data import DataConfig

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut off in its header": lambda content: content[:50],
    "cut off before its last section": lambda content: content[:-1],
    "without its header, which linkers write last": lambda content: bytes(64) + content[64:],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a complete library in it."""
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "cabwhole.main.so").write_bytes(_elf())
    monkeypatch.setenv(CACHE, str(folder))
    return folder


def _elf() -> bytes:
    """A real library, up to the end of its table of sections."""
    content = LIBRARY.read_bytes()
    (table,), (entry, entries) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    return content[: table + entry * entries]


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", ["cabcut.main.so", "cabcut.optimized.o"])
def test_incomplete_library_is_removed_and_named(
    cache: Path, said: pytest.LogCaptureFixture, damage: str, name: str
) -> None:
    (cache / "ab" / name).write_bytes(DAMAGES[damage](_elf()))
    prepare_compiler_cache(DataConfig())
    assert [path.name for path in (cache / "ab").iterdir()] == ["cabwhole.main.so"]
    assert f"Removed 1 files that a killed run left incomplete in {cache}, such as {name}" in said.text


def test_library_that_another_process_writes_is_kept(cache: Path) -> None:
    being_written = cache / "ab" / "cabcut.main.so"
    being_written.touch()
    (cache / "locks").mkdir()
    with FileLock(cache / "locks" / "cabcut.lock"):
        prepare_compiler_cache(DataConfig())
        assert being_written.exists()
    prepare_compiler_cache(DataConfig())
    assert not being_written.exists()


def test_optimiser_that_compiles_uses_the_cache_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kron compiles its step even if nothing else is compiled; by default in a folder of /tmp."""
    monkeypatch.setenv(CACHE, "")
    monkeypatch.delenv(CACHE)
    build(tiny, TRAIN__OPTIMIZER__NAME="kron", DATA__CACHE=tmp_path / "own")
    assert Path(os.environ[CACHE]).is_relative_to(tmp_path / "own")
