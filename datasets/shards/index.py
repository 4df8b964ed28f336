"""Where each sample of a set of tar files begins: made once by reading their headers, kept as a file of numbers."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from datasets.shards.stores import Found, Store
from datasets.shards.tar import TarSamples, read_tar
from datasets.sources.walk import PassedOver
from utils.errors import UserError

FORMAT = 1
"""Of the file. Raised when its fields change: an index of another format is made anew."""


@dataclass(frozen=True)
class ShardIndex:
    """All samples of one part, in the order of shards and of images in them. Arrays, so that processes share them."""

    shards: list[str]
    """Names, relative to the store's root."""
    shard_sizes: np.ndarray
    stamps: list[str]
    """What changes when a shard is written anew; empty where size alone is looked at."""
    shard: np.ndarray
    """For each sample: the number of its shard, ascending."""
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    names: np.ndarray
    """The members' names, one after another, as bytes."""
    name_ends: np.ndarray
    classes: list[str]
    """By which labels that are names became numbers; empty where all are numbers."""
    passed_over: str = ""
    """What the tar files hold besides samples, in a line; '' in indexes of older versions, too."""

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, index: int) -> str:
        begin = self.name_ends[index - 1] if index else 0
        return self.names[begin : self.name_ends[index]].tobytes().decode(errors="surrogateescape")

    def fits(self, found: Sequence[Found], classes: list[str] | None) -> bool:
        """Whether these are the tar files that were indexed, unchanged, and their classes."""
        if self.classes and self.classes != classes:
            return False
        known = zip(self.shards, self.shard_sizes.tolist(), self.stamps, strict=True)
        return len(found) == len(self.shards) and all(
            name == file.name and size == file.size and (stamp == file.stamp or not (stamp and file.stamp))
            for (name, size, stamp), file in zip(known, found, strict=True)
        )

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(
            file,
            format=np.array(FORMAT),
            shards=_text(self.shards),
            stamps=_text(self.stamps),
            classes=_text(self.classes),
            passed_over=_text([self.passed_over]),
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
    """An index that was kept; None where it is damaged or of another format."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if int(file["format"]) != FORMAT:
                return None
            arrays = {name: file[name] for name in _ARRAYS}
            texts = {name: _lines(file[name]) for name in ("shards", "stamps", "classes")}
            passed_over = "".join(_lines(file["passed_over"])) if "passed_over" in file else ""
            index = ShardIndex(**texts, **arrays, passed_over=passed_over)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return index if _is_sound(index, arrays) else None


def _is_sound(index: ShardIndex, arrays: dict[str, np.ndarray]) -> bool:
    """It may come from elsewhere: what it points to must lie inside the shards and inside its own tables."""
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


def leads_out(name: str) -> bool:
    """Whether a name points to somewhere outside of its place."""
    return name.startswith("/") or ".." in name.split("/")


def make_index(
    store: Store,
    found: Sequence[Found],
    classes: list[str] | None,
    each: Callable[[Iterable[Found]], Iterable[TarSamples]] | None = None,
) -> ShardIndex:
    """Read the headers of all `found`. `each` may do it in processes of its own, in the same order."""
    numbers = {name: number for number, name in enumerate(classes or ())}
    shard, offset, size, label, names, lengths = ([] for _ in range(6))
    passed = PassedOver()
    read, named = each(found) if each else (read_shard(store, file) for file in found), False
    for number, (file, samples) in enumerate(zip(found, read, strict=True)):
        passed.merge(samples.passed)
        shard.append(np.full(len(samples.names), number, dtype=np.int32))
        offset.append(np.array(samples.offsets, dtype=np.int64))
        size.append(np.array(samples.sizes, dtype=np.int64))
        named = named or any(isinstance(one, str) for one in samples.labels)
        label.append(_label_numbers(samples, numbers, f"{store.root}/{file.name}"))
        encoded = [name.encode(errors="surrogateescape") for name in samples.names]
        names.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
        lengths.append(np.array([len(name) for name in encoded], dtype=np.int64))
    if named and len(numbers) < len(classes or ()):
        twice = next(name for name in numbers if (classes or []).count(name) > 1)
        raise UserError(
            f"{store.root}: labels are names, and classes.txt has the line {twice!r} more than once, so it does not "
            "tell which class is meant. Give these classes different names, or whole numbers as labels."
        )
    return ShardIndex(
        shards=[file.name for file in found],
        shard_sizes=np.array([file.size for file in found], dtype=np.int64),
        stamps=[file.stamp for file in found],
        shard=np.concatenate(shard),
        offset=np.concatenate(offset),
        size=np.concatenate(size),
        label=np.concatenate(label),
        names=np.concatenate(names),
        name_ends=np.cumsum(np.concatenate(lengths)),
        classes=list(classes or ()) if named else [],
        passed_over=passed.line(),
    )


def read_shard(store: Store, file: Found) -> TarSamples:
    """The samples of one tar file."""
    where = f"{store.root}/{file.name}"
    try:
        with store.open(file.name) as opened:
            return read_tar(opened, file.size, where)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error}.") from None


def _label_numbers(samples: TarSamples, numbers: dict[str, int], where: str) -> np.ndarray:
    for name, label in zip(samples.names, samples.labels, strict=True):
        if isinstance(label, str) and label not in numbers:
            known = "has no such line" if numbers else "is not there"
            raise UserError(
                f"{where}: the label of {name} is {label!r}. A label that is no number must be a line of classes.txt "
                f"beside the tar files, which {known}."
            )
    return np.array([numbers[k] if isinstance(k, str) else k for k in samples.labels], dtype=np.int64)


def _text(lines: list[str]) -> np.ndarray:
    return np.frombuffer("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), dtype=np.uint8)


def _lines(text: np.ndarray) -> list[str]:
    return text.tobytes().decode(errors="surrogateescape").split("\n")[:-1]
