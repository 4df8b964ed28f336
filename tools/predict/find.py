"""Image files named by the arguments of scripts/predict.py."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO

from datasets.decoding.stored import ENDINGS
from datasets.sources.walk import SkippedFiles, images_below
from utils.errors import UserError
from utils.log import log

NO_IMAGES = f"no images found (files ending in {' '.join(ENDINGS)})"
LIST_FORMAT = "give one name per line, or the output of find -print0"
LONGEST_NAME = 4096
"""Bytes; the longest path on Linux"""
TOO_LONG = re.compile(rb"[^\0\n]{%d}" % (LONGEST_NAME + 1))
CHUNK = 1 << 16
LARGEST_LIST = 1 << 28
"""Bytes: millions of paths, while `yes | predict.py RUN -` reaches it within seconds."""


def find_images(words: list[str]) -> list[str]:
    """Paths in the order of the arguments; those of a folder or glob are sorted."""
    by_word = [(word, _paths_of(word)) for word in words]
    found = [path for _, paths in by_word for path in paths]
    empty = [word for word, paths in by_word if not paths and word != "-"]
    if not found and empty:
        raise UserError(f"{', '.join(empty)}: {NO_IMAGES}.")
    if not found:
        raise UserError("standard input names no images.")
    for word in empty:
        log.warning("%s: %s; skipped.", word, NO_IMAGES)
    return found


def _paths_of(word: str) -> list[str]:
    if word == "-":
        return _parse_list(_read_list(sys.stdin.buffer))
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`, so an existing path is not read as a glob.
    matched = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matched:
        reason = "no file matches" if glob.has_magic(word) else "no such file or folder"
        raise UserError(f"{word}: {reason}.")
    return [file for one in matched for file in (_images_in(one) if os.path.isdir(one) else [one])]


def _read_list(stream: BinaryIO) -> bytes:
    """Content of standard input. It may be endless, so UserError is raised as soon as it cannot be a list of files."""
    window = b""
    chunks, size = [], 0
    while chunk := stream.read(CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        if size > LARGEST_LIST:
            raise UserError(
                f"standard input is not a list of files: it is larger than {LARGEST_LIST >> 20} MiB; "
                "name a folder instead, or split the list."
            )
        window = window[-LONGEST_NAME:] + chunk  # also checks across the border of two chunks
        if b"\0\0" in window:
            raise UserError(f"standard input is not a list of files: it has two zero bytes in a row; {LIST_FORMAT}.")
        if TOO_LONG.search(window):
            raise UserError(
                f"standard input is not a list of files: a name has over {LONGEST_NAME} bytes; {LIST_FORMAT}."
            )
    return b"".join(chunks)


def _parse_list(content: bytes) -> list[str]:
    """Names separated by newlines, or by zero bytes, as `find -print0` prints them."""
    parts = content.split(b"\0") if b"\0" in content else (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.fsdecode(part) for part in parts if part]


def _images_in(folder: str) -> Iterator[str]:
    skipped = SkippedFiles()
    yield from (os.path.join(folder, path) for path in images_below(folder, skipped))
    skipped.warn(folder)
