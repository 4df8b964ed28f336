"""Tar files in WebDataset's layout: `key.jpg` beside `key.cls` or `key.json`. Nothing is ever extracted."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from datasets.decoding.stored import ENDINGS
from datasets.labels import number_of_digits
from datasets.sources.files import leads_out
from datasets.sources.walk import SkippedFiles
from utils.errors import UserError
from utils.files import parse_json
from utils.log import log

IMAGE_KINDS = (*(ending.removeprefix(".") for ending in ENDINGS), "npy")
LABEL_KINDS = ("cls", "json")
LARGEST_LABEL = 1 << 20
"""Most bytes of a label member."""
LARGEST_NUMBER = 1 << 31
UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""What tarfile raises; the last three for absurd extended headers."""
DOTS = "more than one dot in the name"
"""Kind under which such images and labels are counted as skipped"""
MOST_ZEROS = 1 << 20
"""Most zero bytes at the end of a tar file, usually 10 KiB or less. More mean a copy with space but no content."""


@dataclass
class TarSamples:
    """Samples of one tar file, in the order of their images."""

    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[int | str] = field(default_factory=list)
    """Numbers or class names, as in the file."""
    skipped: SkippedFiles = field(default_factory=SkippedFiles)


def read_tar(file: BinaryIO, size: int, where: str) -> TarSamples:
    """Read the headers of the tar file `where`, `size` bytes long. UserErrors name the offset of the damage."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int | str] = {}
    links, skipped = 0, SkippedFiles()
    for member in _members(file, size, where):
        key, kind = _key(member.name)
        if not member.isreg() or member.issparse():
            links += kind in (*IMAGE_KINDS, *LABEL_KINDS)
        elif kind in IMAGE_KINDS:
            if key in images:
                raise UserError(
                    f"{where}: {member.name} and {images[key][0]} are two images of one sample; a sample has one."
                )
            images[key] = member.name, member.offset_data, member.size
        elif kind in LABEL_KINDS and (kind == "cls" or key not in labels):
            label = _label(file, member, where)
            if label is not None:
                labels[key] = label
        elif kind not in LABEL_KINDS:
            dotted = kind.rpartition(".")[2] in (*IMAGE_KINDS, *LABEL_KINDS)
            skipped.add(member.name, DOTS if dotted else None)
    if links:
        log.warning("%s: skipped %d links and other members that are not files.", where, links)
    samples = TarSamples(skipped=skipped)
    for key, (name, offset, length) in images.items():
        if key not in labels:
            raise UserError(
                f"{where}: the image {name} has no label: there is no {key}.cls beside it, and no {key}.json with a "
                "'label'."
            )
        samples.names.append(name)
        samples.offsets.append(offset)
        samples.sizes.append(length)
        samples.labels.append(labels[key])
    return samples


def _members(file: BinaryIO, size: int, where: str) -> Iterator[tarfile.TarInfo]:
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file is the caller's
    except UNREADABLE as error:
        raise UserError(
            f"{where} cannot be read as a tar file: {error}. Compressed tar files are not supported, because images "
            f"are read in place; decompress such a file with gunzip or a similar program."
        ) from None
    # Not tar.next(): it keeps every member in memory, and takes a cut between two members, or damage, for the end.
    tar.offset = 0
    while True:
        begin = tar.offset
        file.seek(begin)
        block = file.read(tarfile.BLOCKSIZE)
        if block == bytes(tarfile.BLOCKSIZE):
            if size - begin > MOST_ZEROS or any(file.read(MOST_ZEROS)):
                raise _damaged(where, size, begin, "zeros in place of a member")
            return
        try:
            file.seek(begin)
            member = tarfile.TarInfo.fromtarfile(tar)
        except UNREADABLE:
            raise _damaged(where, size, begin, "the header of a member") from None
        if member.size < 0 or tar.offset <= begin:  # else the same members would be read again and again
            raise _damaged(where, size, begin, "the header of a member")
        if member.offset_data + member.size > size:
            raise _damaged(where, size, begin, member.name)
        if leads_out(member.name):
            raise UserError(
                f"{where}: the member {member.name!r} leads out of the tar file. Names must be relative and without "
                f"'..'; do not trust this file."
            )
        yield member


def _damaged(where: str, size: int, offset: int, what: str) -> UserError:
    return UserError(
        f"{where} is damaged or cut off: it has {size:,} bytes, and the data at byte {offset:,} ({what}) is not "
        f"complete. Copy or pack this file again."
    )


def _key(name: str) -> tuple[str, str]:
    """'a/b.c.jpg' -> ('a/b', 'c.jpg'): key and extension, which begins at the first dot, as in WebDataset."""
    folder, slash, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return folder + slash + stem, kind.lower()


def _label(file: BinaryIO, member: tarfile.TarInfo, where: str) -> int | str | None:
    """Label in a member; None for a JSON file without a label."""
    file.seek(member.offset_data)
    text = file.read(min(member.size, LARGEST_LABEL))
    try:
        label = text.decode().strip()
        if member.name.lower().endswith(".json"):
            value = parse_json(label)
            if not isinstance(value, dict) or "label" not in value:
                return None
            label = value["label"]
            if isinstance(label, bool) or not isinstance(label, int | str):
                raise ValueError("its 'label' is neither a whole number nor a name")
        elif not label:
            raise ValueError("it is empty")
    except ValueError as error:
        raise UserError(f"{where}: {member.name} has no valid label: {error}.") from None
    shown = f"{label:.40}" if isinstance(label, str) else str(label)
    if isinstance(label, str) and label.removeprefix("-").isdecimal():
        label = number_of_digits(label)
    if isinstance(label, int) and abs(label) > LARGEST_NUMBER:
        raise UserError(f"{where}: {member.name} has the label {shown}, which is too large for a class.")
    return label


class TarWriter:
    """Writes samples to a tar file; the same samples give the same bytes."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - see close
        self._tar = tarfile.open(fileobj=self._file, mode="w:", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def add(self, key: str, kind: str, image: bytes, label: int) -> None:
        self._member(f"{key}.{kind}", image)
        self._member(f"{key}.cls", str(label).encode())

    def _member(self, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o644
        self._tar.addfile(info, io.BytesIO(content))

    def close(self) -> None:
        """Close the file and sync it to the disk."""
        with self._file:
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
