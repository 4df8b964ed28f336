"""scripts/predict.py: which files the words on its command line mean."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO

from datasets.decoding.stored import ENDINGS
from datasets.sources.walk import PassedOver, images_below
from utils.errors import UserError
from utils.log import log

NO_IMAGE = f"no image is there (files ending in {' '.join(ENDINGS)} count)"
LISTS = "give one name per line, or those of find -print0"
LONGEST_NAME = 4096
"""Bytes; Linux takes no longer path."""
TOO_LONG = re.compile(rb"[^\0\n]{%d}" % (LONGEST_NAME + 1))
CHUNK = 1 << 16


def paths_of(words: list[str]) -> list[str]:
    """In the order of the words; in a folder or glob, in the order of names."""
    by_word = [(word, _of_word(word)) for word in words]
    found = [path for _, paths in by_word for path in paths]
    empty = [word for word, paths in by_word if not paths and word != "-"]
    if not found and empty:
        raise UserError(f"{', '.join(empty)}: {NO_IMAGE}.")
    if not found:
        raise UserError("standard input named no image.")
    for word in empty:
        log.warning("%s: %s; skipped.", word, NO_IMAGE)
    return found


def _of_word(word: str) -> list[str]:
    if word == "-":
        return _listed(_read_list(sys.stdin.buffer))
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`: what is there is meant, and only else a pattern.
    matched = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matched:
        what = "nothing matches it" if glob.has_magic(word) else "there is no such file or folder"
        raise UserError(f"{word}: {what}.")
    return [file for one in matched for file in (_below(one) if os.path.isdir(one) else [one])]


def _read_list(stream: BinaryIO) -> bytes:
    """All of standard input; UserError as soon as it is clear that it lists no files: it may have no end."""
    content = b""
    chunks = []
    while chunk := stream.read(CHUNK):
        chunks.append(chunk)
        content = content[-LONGEST_NAME:] + chunk  # what a chunk's border cuts is looked at as well
        if b"\0\0" in content:
            raise UserError(f"standard input is no list of files: it has two zero bytes in a row; {LISTS}.")
        if TOO_LONG.search(content):
            raise UserError(f"standard input is no list of files: a name has over {LONGEST_NAME} bytes; {LISTS}.")
    return b"".join(chunks)


def _listed(content: bytes) -> list[str]:
    """A file a line; or, as `find -print0` does it, with zero bytes between them."""
    parts = content.split(b"\0") if b"\0" in content else (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.fsdecode(part) for part in parts if part]


def _below(folder: str) -> Iterator[str]:
    passed = PassedOver()
    yield from (os.path.join(folder, path) for path in images_below(folder, passed))
    passed.tell(folder)
