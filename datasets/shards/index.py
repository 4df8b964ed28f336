"""Tar files in WebDataset's layout, `key.jpg` beside `key.cls` or `key.json`, and the index of a set of them.

Nothing is ever extracted: the position of each sample is read from the headers once and kept in a file.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from datasets.decoding import ENDINGS
from datasets.shards.stores import ShardFile, Store
from datasets.sources.files import SkippedFiles, leads_out
from utils.errors import UserError
from vitamp.files import parse_json

IMAGE_KINDS = (*(ending.removeprefix(".") for ending in ENDINGS), "npy")
ARRAY_KINDS = ("npz", "dcm")
"""Of a sample without an image of IMAGE_KINDS"""
LABEL_KINDS = ("cls", "json")
LARGEST_LABEL = 1 << 20
"""Most bytes of a label member."""
LARGEST_NUMBER = 1 << 31
UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""What tarfile raises; the last three for absurd extended headers."""
MOST_ZEROS = 1 << 20
"""Most zero bytes at the end of a tar file, usually 10 KiB or less. More mean a copy with space but no content."""


def read_tar(file: BinaryIO, size: int, where: str, skipped: SkippedFiles) -> list[tuple[str, int, int, int]]:
    """Name, offset, size and label of each image in the tar file `where`, `size` bytes long, by its headers.

    UserErrors name the offset of the damage.
    """
    images: dict[str, tuple[str, int, int]] = {}
    arrays: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    for member in _members(file, size, where):
        # 'a/b.c.jpg' is 'c.jpg' of 'a/b': as in WebDataset, the extension begins at the first dot.
        folder, slash, file_name = member.name.rpartition("/")
        stem, _, kind = file_name.partition(".")
        key, kind = folder + slash + stem, kind.lower()
        if not member.isreg() or member.issparse():
            if kind in (*IMAGE_KINDS, *LABEL_KINDS):
                skipped.add(member.name, "links and other members that are not files")
        elif kind in IMAGE_KINDS:
            if key in images:
                raise UserError(f"{where}: {member.name} and {images[key][0]} are two images of one sample.")
            images[key] = member.name, member.offset_data, member.size
        elif kind in ARRAY_KINDS and key not in images:
            arrays[key] = member.name, member.offset_data, member.size
        elif kind in LABEL_KINDS and (kind == "cls" or key not in labels):
            label = _label(file, member, where)
            if label is not None:
                labels[key] = label
        elif kind not in LABEL_KINDS:
            dotted = kind.rpartition(".")[2] in (*IMAGE_KINDS, *LABEL_KINDS)
            skipped.add(member.name, "more than one dot in the name" if dotted else None)
    images |= {key: array for key, array in arrays.items() if key in labels and key not in images}
    for key, (name, _, _) in images.items():
        if key not in labels:
            raise UserError(f"{where}: {name} has no label: there is no {key}.cls beside it, nor any in {key}.json.")
    return [(*image, labels[key]) for key, image in images.items()]


def _members(file: BinaryIO, size: int, where: str) -> Iterator[tarfile.TarInfo]:
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file is the caller's
    except UNREADABLE as error:
        raise UserError(f"{where} cannot be read as a tar file: {error}. Decompress it (gunzip).") from None
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
            raise UserError(f"{where}: the member {member.name!r} leads out of the tar file; do not trust it.")
        yield member


def _damaged(where: str, size: int, offset: int, what: str) -> UserError:
    return UserError(
        f"{where} is damaged or cut off: it has {size:,} bytes, and the data at byte {offset:,} ({what}) is not "
        f"complete. Copy or pack this file again."
    )


def _label(file: BinaryIO, member: tarfile.TarInfo, where: str) -> int | None:
    """Label in a member; None for a JSON file without a label."""
    file.seek(member.offset_data)
    text = file.read(min(member.size, LARGEST_LABEL))
    try:
        label = text.decode().strip()
        if member.name.lower().endswith(".json"):
            value = parse_json(label)
            if not isinstance(value, dict) or "label" not in value:
                return None
            label = str(value["label"])
        if not label.removeprefix("-").isdecimal():
            raise ValueError(f"{label[:40]!r} is not a whole number; the names of the classes are lines of classes.txt")
    except ValueError as error:
        raise UserError(f"{where}: {member.name} has no valid label: {error}.") from None
    number = int(label[:100])  # Python refuses to convert thousands of digits
    if abs(number) > LARGEST_NUMBER:
        raise UserError(f"{where}: {member.name} has the label {label:.40}, which is too large for a class.")
    return number


def precedes(header: np.ndarray, size: int) -> bool:
    """Whether these bytes are the header of a member of this size, as they stand before its content in a tar file."""
    return header[124:136].tobytes().strip(b"\0 ").lstrip(b"0") == (b"%o" % size).lstrip(b"0")


class TarWriter:
    """Writes samples to a tar file; the same samples give the same bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tar = tarfile.open(path, "w:", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._tar.offset

    def add(self, key: str, kind: str, image: bytes, label: int) -> None:
        for name, content in ((f"{key}.{kind}", image), (f"{key}.cls", str(label).encode())):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            self._tar.addfile(info, io.BytesIO(content))

    def close(self) -> None:
        """Close the file and sync it to the disk."""
        self._tar.close()
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())


FORMAT = 1
"""Version of the file. Raised when its fields change; an index of another version is rebuilt."""


@dataclass(frozen=True)
class ShardIndex:
    """All samples of a split, in the order of shards and of images in them. Arrays, so that processes share them."""

    files: list[ShardFile]
    """The shards"""
    shard: np.ndarray
    """ShardFile number of each sample, ascending."""
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    names: np.ndarray
    """Names of the members as bytes, concatenated."""
    name_ends: np.ndarray
    skipped: str = ""
    """Line about members that are not samples; '' also in indexes of older versions."""

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, index: int) -> str:
        begin = self.name_ends[index - 1] if index else 0
        return self.names[begin : self.name_ends[index]].tobytes().decode(errors="surrogateescape")

    def is_current(self, shards: Sequence[ShardFile]) -> bool:
        """Whether the index is of these tar files, unchanged. An empty stamp is not compared."""
        return len(shards) == len(self.files) and all(
            (old.name, old.size, old.stamp and new.stamp) == (new.name, new.size, new.stamp and old.stamp)
            for old, new in zip(self.files, shards, strict=True)
        )

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(
            file,
            format=np.array(FORMAT),
            shards=_text([file.name for file in self.files]),
            stamps=_text([file.stamp for file in self.files]),
            shard_sizes=np.array([file.size for file in self.files], dtype=np.int64),
            classes=_text([]),  # of labels that are names, which earlier versions read
            passed_over=_text([self.skipped]),
            **{name: getattr(self, name) for name in _ARRAYS},
        )
        return file.getvalue()


_ARRAYS = {
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "label": np.int64,
    "names": np.uint8,
    "name_ends": np.int64,
}


def from_bytes(content: bytes) -> ShardIndex | None:
    """Load an index; None if it is damaged or of another format.

    It may come from an untrusted place, so all positions must be inside the shards and its own tables.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:  # an index is not compressed: a bomb would be
            if sum(member.file_size for member in file.infolist()) > len(content):
                return None
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if int(file["format"]) != FORMAT or len(file["classes"]):
                return None
            arrays, sizes = {name: file[name] for name in _ARRAYS}, file["shard_sizes"]
            shards = zip(_lines(file["shards"]), sizes.tolist(), _lines(file["stamps"]), strict=True)
            skipped = "".join(_lines(file["passed_over"])) if "passed_over" in file else ""
            index = ShardIndex([ShardFile(*fields) for fields in shards], **arrays, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile):
        return None
    sound = (
        all(arrays[name].dtype == kind and arrays[name].ndim == 1 for name, kind in _ARRAYS.items())
        and (sizes.dtype, sizes.ndim) == (np.int64, 1)
        and all(len(arrays[name]) == len(index) for name in ("offset", "size", "label", "name_ends"))
        and (np.diff(index.shard, prepend=0, append=max(len(sizes) - 1, 0)) >= 0).all()
        and (np.diff(index.name_ends, prepend=0, append=len(index.names)) >= 0).all()
        and (np.concatenate([index.offset, index.size]) >= 0).all()
        and (index.offset + index.size <= sizes[index.shard]).all()
    )
    return index if sound else None


def make_index(store: Store, shards: Sequence[ShardFile]) -> ShardIndex:
    """Index shards by their headers."""
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    skipped = SkippedFiles()
    for number, file in enumerate(shards):
        where = f"{store.root}/{file.name}"
        try:
            with store.open(file.name, file.size) as opened:
                samples = read_tar(opened, file.size, where, skipped)
        except OSError as error:
            raise UserError(f"{where} cannot be read: {error}.") from None
        names = [name.encode(errors="surrogateescape") for name, *_ in samples]
        numbers = np.array([sample[1:] for sample in samples], dtype=np.int64).reshape(-1, 3)
        for column, values in zip(("offset", "size", "label"), numbers.T, strict=True):
            columns[column].append(values)
        columns["shard"].append(np.full(len(samples), number, dtype=np.int32))
        columns["names"].append(np.frombuffer(b"".join(names), dtype=np.uint8))
        columns["name_ends"].append(np.array([len(name) for name in names], dtype=np.int64))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    joined["name_ends"] = np.cumsum(joined["name_ends"])
    return ShardIndex(list(shards), **joined, skipped=skipped.line())


def _text(lines: list[str]) -> np.ndarray:
    return np.frombuffer("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), dtype=np.uint8)


def _lines(text: np.ndarray) -> list[str]:
    return text.tobytes().decode(errors="surrogateescape").split("\n")[:-1]
