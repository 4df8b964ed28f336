"""A disk that can be full or read-only: a small tmpfs of one's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 1024)

    def make_room(self) -> None:
        self._filler.unlink()

    def freeze(self, part: Path) -> None:
        """Make a folder read-only, as a file system does by itself when its disk has errors."""
        _mount("--bind", part, part)
        _mount("-o", "remount,ro,bind", part)

    def thaw(self, part: Path) -> None:
        subprocess.run(["umount", str(part)], check=True)


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError):
        who = "" if hasattr(os, "getuid") and os.getuid() == 0 else ", which only root may"
        pytest.skip(f"needs to mount a small tmpfs{who}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(folder)], check=True)
