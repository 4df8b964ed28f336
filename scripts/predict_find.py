"""scripts/predict.py: which files the words on its command line mean."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator

from datasets.formats import ENDINGS
from datasets.passed_over import PassedOver
from datasets.walk import images_below
from utils.errors import UserError


def paths_of(words: list[str]) -> list[str]:
    """In the order of the words; in a folder or glob, in the order of names."""
    found = [path for word in words for path in _of_word(word)]
    if not found:
        raise UserError("standard input named no image.")
    return found


def _of_word(word: str) -> list[str]:
    if word == "-":
        return _listed(sys.stdin.buffer.read())
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`: what is there is meant, and only else a pattern.
    matched = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matched:
        what = "nothing matches it" if glob.has_magic(word) else "there is no such file or folder"
        raise UserError(f"{word}: {what}.")
    found = [file for one in matched for file in (_below(one) if os.path.isdir(one) else [one])]
    if not found:
        raise UserError(f"{word}: no image lies there (files ending in {' '.join(ENDINGS)} count).")
    return found


def _listed(content: bytes) -> list[str]:
    """A file a line; or, as `find -print0` does it, with zero bytes between them."""
    parts = content.split(b"\0") if b"\0" in content else (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.fsdecode(part) for part in parts if part]


def _below(folder: str) -> Iterator[str]:
    passed = PassedOver()
    yield from (os.path.join(folder, path) for path in images_below(folder, passed))
    passed.tell(folder)
