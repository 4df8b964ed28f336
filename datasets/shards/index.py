"""Index of a set of tar files: the position of each sample, read from their headers once and kept in a file."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from datasets.shards.stores import ShardFile, Store
from datasets.shards.tar import TarSamples, read_tar
from datasets.sources.files import leads_out
from datasets.sources.walk import SkippedFiles
from utils.errors import UserError

FORMAT = 1
"""Version of the file. Raised when its fields change; an index of another version is rebuilt."""


@dataclass(frozen=True)
class ShardIndex:
    """All samples of a split, in the order of shards and of images in them. Arrays, so that processes share them."""

    shards: list[str]
    """Names, relative to the store's root."""
    shard_sizes: np.ndarray
    stamps: list[str]
    """Modification stamps of the shards; an empty one is not compared."""
    shard: np.ndarray
    """ShardFile number of each sample, ascending."""
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    names: np.ndarray
    """Names of the members as bytes, concatenated."""
    name_ends: np.ndarray
    classes: list[str]
    """Class names that were used to convert labels to numbers; empty if all labels are numbers."""
    skipped: str = ""
    """Line about members that are not samples; '' also in indexes of older versions."""

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, index: int) -> str:
        begin = self.name_ends[index - 1] if index else 0
        return self.names[begin : self.name_ends[index]].tobytes().decode(errors="surrogateescape")

    def is_current(self, shards: Sequence[ShardFile], classes: list[str] | None) -> bool:
        """Whether the index is of these tar files, unchanged, and of these classes."""
        if self.classes and self.classes != classes:
            return False
        indexed = zip(self.shards, self.shard_sizes.tolist(), self.stamps, strict=True)
        return len(shards) == len(self.shards) and all(
            name == shard.name and size == shard.size and (stamp == shard.stamp or not (stamp and shard.stamp))
            for (name, size, stamp), shard in zip(indexed, shards, strict=True)
        )

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(
            file,
            format=np.array(FORMAT),
            shards=_text(self.shards),
            stamps=_text(self.stamps),
            classes=_text(self.classes),
            passed_over=_text([self.skipped]),
            **{name: getattr(self, name) for name in _ARRAYS},
        )
        return file.getvalue()


_ARRAYS = {
    "shard_sizes": np.int64,
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "label": np.int64,
    "names": np.uint8,
    "name_ends": np.int64,
}


def from_bytes(content: bytes) -> ShardIndex | None:
    """Load an index; None if it is damaged or of another format."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:  # an index is not compressed: a bomb would be
            if sum(member.file_size for member in file.infolist()) > len(content):
                return None
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if int(file["format"]) != FORMAT:
                return None
            arrays = {name: file[name] for name in _ARRAYS}
            texts = {name: _lines(file[name]) for name in ("shards", "stamps", "classes")}
            skipped = "".join(_lines(file["passed_over"])) if "passed_over" in file else ""
            index = ShardIndex(**texts, **arrays, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile):
        return None
    return index if _is_sound(index, arrays) else None


def _is_sound(index: ShardIndex, arrays: dict[str, np.ndarray]) -> bool:
    """Whether all positions are inside the shards and its own tables. An index may come from an untrusted place."""
    if any(arrays[name].dtype != kind or arrays[name].ndim != 1 for name, kind in _ARRAYS.items()):
        return False
    samples, shards = len(index), len(index.shards)
    if not len(index.offset) == len(index.size) == len(index.label) == len(index.name_ends) == samples:
        return False
    if len(index.shard_sizes) != shards or len(index.stamps) != shards or any(map(leads_out, index.shards)):
        return False
    if not samples:
        return True
    return bool(
        index.shard[0] >= 0
        and index.shard[-1] < shards
        and (np.diff(index.shard) >= 0).all()
        and (np.diff(index.name_ends, prepend=0) >= 0).all()
        and index.name_ends[-1] == len(index.names)
        and (index.offset >= 0).all()
        and (index.size >= 0).all()
        and (index.offset + index.size <= index.shard_sizes[index.shard]).all()
    )


ReadShards = Callable[[Iterable[ShardFile]], Iterable[TarSamples]]
"""Reads the headers of shards, in the same order"""


def make_index(
    store: Store, shards: Sequence[ShardFile], classes: list[str] | None, read_shards: ReadShards | None = None
) -> ShardIndex:
    """Index shards by their headers. `read_shards` may read them in several processes."""
    numbers = {name: number for number, name in enumerate(classes or ())}
    shard, offset, size, label, names, lengths = ([] for _ in range(6))
    skipped, has_names = SkippedFiles(), False
    contents = read_shards(shards) if read_shards else (read_shard(store, file) for file in shards)
    for number, (file, samples) in enumerate(zip(shards, contents, strict=True)):
        skipped.merge(samples.skipped)
        shard.append(np.full(len(samples.names), number, dtype=np.int32))
        offset.append(np.array(samples.offsets, dtype=np.int64))
        size.append(np.array(samples.sizes, dtype=np.int64))
        has_names = has_names or any(isinstance(one, str) for one in samples.labels)
        label.append(_label_numbers(samples, numbers, f"{store.root}/{file.name}"))
        encoded = [name.encode(errors="surrogateescape") for name in samples.names]
        names.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
        lengths.append(np.array([len(name) for name in encoded], dtype=np.int64))
    if has_names and len(numbers) < len(classes or ()):
        repeated = next(name for name in numbers if (classes or []).count(name) > 1)
        raise UserError(
            f"{store.root}: labels are names, but classes.txt has the line {repeated!r} more than once, so the class "
            "is ambiguous. Give these classes different names, or use whole numbers as labels."
        )
    return ShardIndex(
        shards=[file.name for file in shards],
        shard_sizes=np.array([file.size for file in shards], dtype=np.int64),
        stamps=[file.stamp for file in shards],
        shard=np.concatenate(shard),
        offset=np.concatenate(offset),
        size=np.concatenate(size),
        label=np.concatenate(label),
        names=np.concatenate(names),
        name_ends=np.cumsum(np.concatenate(lengths)),
        classes=list(classes or ()) if has_names else [],
        skipped=skipped.line(),
    )


def read_shard(store: Store, file: ShardFile) -> TarSamples:
    """Samples of one tar file."""
    where = f"{store.root}/{file.name}"
    try:
        with store.open(file.name) as opened:
            return read_tar(opened, file.size, where)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error}.") from None


def _label_numbers(samples: TarSamples, numbers: dict[str, int], where: str) -> np.ndarray:
    for name, label in zip(samples.names, samples.labels, strict=True):
        if isinstance(label, str) and label not in numbers:
            problem = "has no such line" if numbers else "does not exist"
            raise UserError(
                f"{where}: the label of {name} is {label!r}. A label that is not a number must be a line of "
                f"classes.txt in DATA.DATA_PATH, but that file {problem}."
            )
    return np.array([numbers[k] if isinstance(k, str) else k for k in samples.labels], dtype=np.int64)


def _text(lines: list[str]) -> np.ndarray:
    return np.frombuffer("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), dtype=np.uint8)


def _lines(text: np.ndarray) -> list[str]:
    return text.tobytes().decode(errors="surrogateescape").split("\n")[:-1]
