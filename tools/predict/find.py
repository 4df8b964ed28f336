"""Image files named by the arguments of scripts/predict.py."""

from __future__ import annotations

import glob
import os
import sys
from typing import BinaryIO

from datasets.decoding import ENDINGS
from datasets.sources.files import SkippedFiles, images_below
from utils.errors import UserError
from utils.log import log

NO_IMAGES = f"no images found (files ending in {' '.join(ENDINGS)})"
LONGEST_NAME = 4096
"""Bytes; the longest path on Linux"""
CHUNK = 1 << 16
LARGEST_LIST = 1 << 28
"""Bytes: millions of paths, while `yes | predict.py RUN -` reaches it within seconds."""


def find_images(words: list[str]) -> list[str]:
    """Paths in the order of the arguments; those of a folder or glob are sorted."""
    by_word = {word: _paths_of(word) for word in words}
    found = [path for word in words for path in by_word[word]]
    empty = [word for word, paths in by_word.items() if not paths and word != "-"]
    if not found and empty:
        raise UserError(f"{', '.join(empty)}: {NO_IMAGES}.")
    if not found:
        raise UserError("standard input names no images.")
    for word in empty:
        log.warning("%s: %s; skipped.", word, NO_IMAGES)
    return found


def _paths_of(word: str) -> list[str]:
    if word == "-":
        return _names_in(sys.stdin.buffer)
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`, so an existing path is not read as a glob.
    matched = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matched:
        reason = "no file matches" if glob.has_magic(word) else "no such file or folder"
        raise UserError(f"{word}: {reason}.")
    found = []
    for one in matched:
        if not os.path.isdir(one):
            found.append(one)
            continue
        skipped = SkippedFiles()
        found += [os.path.join(one, file) for file in images_below(one, skipped)]
        skipped.warn(one)
    return found


def _names_in(stream: BinaryIO) -> list[str]:
    """Names separated by newlines, or by zero bytes, as `find -print0` prints them.

    Standard input may be endless, so UserError is raised as soon as it cannot be a list of files.
    """
    content = bytearray()
    why = ""
    while not why and (chunk := stream.read(CHUNK)):
        checked = max(0, len(content) - LONGEST_NAME)  # also across the border of two chunks
        content += chunk
        new = bytes(content[checked:])
        if len(content) > LARGEST_LIST:
            why = f"it is larger than {LARGEST_LIST >> 20} MiB; name a folder instead, or split the list"
        elif b"\0\0" in new:
            why = "it has two zero bytes in a row; give one name per line, or the output of find -print0"
        elif any(len(name) > LONGEST_NAME for name in new.replace(b"\0", b"\n").split(b"\n")):
            why = f"a name has over {LONGEST_NAME} bytes; give one name per line, or the output of find -print0"
    if why:
        raise UserError(f"standard input is not a list of files: {why}.")
    names = content.split(b"\0") if b"\0" in content else (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.fsdecode(bytes(name)) for name in names if name]
