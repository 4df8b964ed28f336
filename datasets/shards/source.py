"""`shards`: tar files in WebDataset's layout, on disk or at a URL. An image is read where it lies in its tar file."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from datasets.base import Encoded, Samples, Source
from datasets.decoding.reader import Unreadable
from datasets.images import Images
from datasets.labels import ANY_LABEL, check_class_count, tell_empty_classes, tell_spare_classes
from datasets.shards.index import ShardIndex
from datasets.shards.layout import ShardSet
from datasets.shards.stores import Range, Remote, Store, open_store
from datasets.sources.split import split
from utils.config.data import DataConfig
from utils.errors import UserError


class ShardSamples(Samples):
    """Samples of an index, all or those of `rows`, which ascend."""

    def __init__(
        self, store: Store, index: ShardIndex, classes: list[str] | None, window: int, rows: np.ndarray | None = None
    ) -> None:
        self.store, self.classes, self.window = store, classes, window
        self._index = index
        self._rows = rows
        self.labels = index.label if rows is None else index.label[rows]
        # Of all kinds of images, only .npy ends in this letter: looking it up costs less than taking out the name.
        self._is_array = np.isin(index.names[index.name_ends - 1], np.frombuffer(b"yY", dtype=np.uint8))
        self.stored = "pixels" if self._is_array.all() else "tar files"
        self.remote = store.remote
        self._fetched: dict[int, np.ndarray] = {}

    def read(self, index: int) -> Encoded:
        row = self._row(index)
        part = self._range(row)
        is_array = self._is_array[row]
        content = self._fetched.pop(row, None)
        if content is None:
            content = self.store.view(part) if is_array else self.store.range(part)
        if len(content) < part[2]:
            raise OSError(f"{self.store.root}/{part[0]} ends before byte {part[1] + part[2]}, where the image ends")
        return pixels_of(content) if is_array else content.tobytes()

    def name(self, index: int) -> str:
        row = self._row(index)
        return f"{self.store.root}/{self._index.shards[self._index.shard[row]]}/{self._index.name(row)}"

    def expect(self, indices: Sequence[int]) -> None:
        if not isinstance(self.store, Remote):
            return
        rows = [self._row(index) for index in indices]
        found = self.store.ranges([self._range(row) for row in rows])
        # What failed is asked for again when it is read, and raises there.
        self._fetched = {row: content for row, content in zip(rows, found, strict=False) if content is not None}

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """Shards in any order, and the samples of `window` of them in any order: reading stays in a few files."""
        shard = self._index.shard if self._rows is None else self._index.shard[self._rows]
        shards = len(self._index.shards)
        begins = np.searchsorted(shard, np.arange(shards + 1)).tolist()
        order = generator.permutation(shards)
        windows = [order[first : first + self.window] for first in range(0, shards, self.window)]
        samples = [np.concatenate([np.arange(begins[s], begins[s + 1]) for s in window]) for window in windows]
        return np.concatenate([generator.permutation(of_window) for of_window in samples])

    def _row(self, index: int) -> int:
        return index if self._rows is None else int(self._rows[index])

    def _range(self, row: int) -> Range:
        index = self._index
        return index.shards[index.shard[row]], int(index.offset[row]), int(index.size[row])


def pixels_of(content: np.ndarray) -> np.ndarray:
    """The pixels of an .npy file. numpy would read these just as well; but a header costs it as much as the pixels."""
    length = int.from_bytes(content[8:10].tobytes(), "little") + 10
    shape = _npy_shape(content[:length].tobytes())
    pixels = content[length:]
    if pixels.size != shape[0] * shape[1] * shape[2]:
        raise Unreadable(f"an array of {shape} needs as many bytes, and has {pixels.size}")
    return pixels.reshape(shape)


@lru_cache(maxsize=1024)
def _npy_shape(header: bytes) -> tuple[int, int, int]:
    """Height, width and channels. Only what can be pixels is taken; nothing else is ever evaluated."""
    try:
        if header[:8] != b"\x93NUMPY\x01\x00":
            raise ValueError
        told = ast.literal_eval(header[10:].decode("latin-1").strip())
        shape, kind, columns_first = tuple(told["shape"]), told["descr"], told["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError):
        raise Unreadable("it is no .npy file of version 1.0") from None
    shape = (*shape, 1) if len(shape) == 2 else shape
    if kind != "|u1" or columns_first or len(shape) != 3 or min(shape) < 1 or shape[2] not in (1, 3):
        raise Unreadable(f"an array of {kind}, {shape}; pixels are uint8, height x width x 1 or 3, row by row")
    return shape


def open_part(shards: ShardSet, data: DataConfig, train: bool, num_classes: int, window: int) -> ShardSamples:
    """One part of a set of shards, its labels checked."""
    part, shared = shards.part(train)
    index = shards.index(part)
    _check_labels(shards, index, num_classes)
    rows = split(index.label, data.VAL_FRACTION, data.SPLIT_SEED)[0 if train else 1] if shared else None
    return ShardSamples(shards.store, index, shards.classes, window, rows)


def check_parts(shards: ShardSet, data: DataConfig, num_classes: int, train: bool) -> None:
    """Index what is needed, and check its labels."""
    owner = f"data set in {shards.store.root}"
    if shards.classes is not None:
        check_class_count(len(shards.classes), num_classes, f"The {owner}")
    parts = [open_part(shards, data, training, num_classes, 1) for training in ([True, False] if train else [False])]
    classes = shards.classes if shards.classes is not None else range(int(parts[0].labels.max()) + 1)
    tell_spare_classes(len(classes), num_classes, f"The {owner}")
    tell_empty_classes(parts[0].labels, classes, f"The {'training' if train else 'validation'} part of the {owner}")
    if train and not shards.part(False)[1]:  # one that was split off lacks what is too rare to be shared
        tell_empty_classes(parts[1].labels, classes, f"The validation part of the {owner}")


def _check_labels(shards: ShardSet, index: ShardIndex, num_classes: int) -> None:
    wrong = np.flatnonzero((index.label < 0) | (index.label >= num_classes))
    if wrong.size and num_classes != ANY_LABEL:
        row = int(wrong[0])
        where = f"{shards.store.root}/{index.shards[index.shard[row]]}"
        raise UserError(
            f"{where}: the label of {index.name(row)} is {index.label[row]}, which does not fit MODEL.NUM_CLASSES "
            f"{num_classes}: labels go from 0 to {num_classes - 1}. Correct it or set -num_classes."
        )


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    shards = ShardSet(open_store(data.DATA_PATH), data)
    return Images(open_part(shards, data, train, num_classes, data.SHARD_WINDOW), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    check_parts(ShardSet(open_store(data.DATA_PATH), data), data, num_classes, train)


SOURCE = Source(_open, _check)
