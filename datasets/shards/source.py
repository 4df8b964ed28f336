"""`shards`: tar files in WebDataset's layout, on disk or at a URL. Images are read in place."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from datasets.base import TITLES, Encoded, Part, Samples, Stamp, parts_read
from datasets.decoding.reader import Unreadable
from datasets.images import image_source
from datasets.labels import ANY_LABEL, check_class_count, check_gaps, log_unused_outputs, warn_empty_classes
from datasets.shards.index import ShardIndex
from datasets.shards.layout import MANIFEST, ShardSet
from datasets.shards.stores import Range, Remote, Store, open_store
from datasets.sources.label_sets import separator_in
from datasets.sources.split import split_rows
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log


class ShardSamples(Samples):
    """Samples of an index: all, or those in `rows`, which ascend."""

    def __init__(
        self,
        store: Store,
        index: ShardIndex,
        labels: np.ndarray,
        classes: list[str] | None,
        window: int,
        rows: np.ndarray | None = None,
    ) -> None:
        """`labels`: of all samples of the index, as in `Samples.labels`."""
        self.store, self.classes, self.window = store, classes, window
        self._index = index
        self._rows = rows
        self.labels = labels if rows is None else labels[rows]
        # Only .npy ends in y among the extensions of images, and one letter is faster to look up than the name.
        self._is_array = np.isin(index.names[index.name_ends - 1], np.frombuffer(b"yY", dtype=np.uint8))
        self.stored = "pixels" if self._is_array.all() else "tar files"
        self.remote = store.remote
        self._prefetched: dict[int, np.ndarray] = {}
        self._changed: dict[int, int] = {}

    def read(self, index: int) -> Encoded:
        row = self._row(index)
        wanted = self._range(row)
        is_array = self._is_array[row]
        content = self._prefetched.pop(row, None)
        if content is None:
            content = self.store.view(wanted) if is_array else self.store.range(wanted)
        name, offset, size = wanted
        if len(content) < size:
            raise OSError(f"{self.store.root}/{name} ends before byte {offset + size}, where the image ends")
        return pixels_of(content) if is_array else content.tobytes()

    def name(self, index: int) -> str:
        row = self._row(index)
        return f"{self.store.root}/{self._index.shards[self._index.shard[row]]}/{self._index.name(row)}"

    def stamp(self, index: int) -> Stamp:
        row = self._row(index)
        shard = int(self._index.shard[row])
        if shard not in self._changed:
            self._changed[shard] = os.stat(f"{self.store.root}/{self._index.shards[shard]}").st_mtime_ns
        # The offset tells members of the same name apart.
        return Stamp(int(self._index.size[row]), self._changed[shard] + int(self._index.offset[row]))

    def names(self) -> Iterator[bytes]:
        index, rows = self._index, slice(None) if self._rows is None else self._rows
        lengths, chosen = np.diff(index.name_ends, prepend=0), np.zeros(len(index), dtype=bool)
        chosen[rows] = True
        yield "\0".join(index.shards).encode(errors="surrogateescape")
        for column in (index.shard, index.size, lengths):
            yield column[rows].astype(np.int64).tobytes()
        yield index.names[np.repeat(chosen, lengths)].tobytes()

    def prefetch(self, indices: Sequence[int]) -> None:
        if not isinstance(self.store, Remote):
            return
        rows = [self._row(index) for index in indices]
        contents = self.store.ranges([self._range(row) for row in rows])
        # Failed ranges are requested again when they are read, and raise there.
        self._prefetched = {row: content for row, content in zip(rows, contents, strict=False) if content is not None}

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """Shuffle the shards, then the samples within each `window` of shards, so that few files are read at once."""
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
    """Pixels of an .npy file. numpy spends as much time on the header as on the pixels; this caches headers."""
    length = int.from_bytes(content[8:10].tobytes(), "little") + 10
    shape = _npy_shape(content[:length].tobytes())
    pixels = content[length:]
    if pixels.size != shape[0] * shape[1] * shape[2]:
        raise Unreadable(f"an array of shape {shape} cannot have {pixels.size} bytes")
    return pixels.reshape(shape)


@lru_cache(maxsize=1024)
def _npy_shape(header: bytes) -> tuple[int, int, int]:
    """Height, width and channels from the header; Unreadable unless it describes pixels. No code in it is run."""
    try:
        if header[:8] != b"\x93NUMPY\x01\x00":
            raise ValueError
        fields = ast.literal_eval(header[10:].decode("latin-1").strip())
        shape, kind, columns_first = tuple(fields["shape"]), fields["descr"], fields["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError):
        raise Unreadable("not an .npy file of version 1.0") from None
    shape = (*shape, 1) if len(shape) == 2 else shape
    if kind != "|u1" or columns_first or len(shape) != 3 or min(shape) < 1 or shape[2] not in (1, 3):
        raise Unreadable(
            f"an array of {kind} with shape {shape}; pixels must be uint8, height x width x 1 or 3, in C order"
        )
    return shape


def open_split(shards: ShardSet, data: DataConfig, part: Part, num_classes: int, window: int) -> ShardSamples:
    """Open a split of a set of shards and check its labels."""
    name, shared = shards.split(part)
    index = shards.index(name)
    several = shards.label_sets is not None
    if several and not data.MULTI_LABEL:
        raise UserError(f"{shards.store.root}: its images have several labels each. Set DATA.MULTI_LABEL=true.")
    if data.MULTI_LABEL and not several:
        raise UserError(f"{shards.store.root}: its images have one label each. Leave DATA.MULTI_LABEL out.")
    labels = _label_rows(shards, index, num_classes) if several else index.label
    if not several:
        _check_labels(shards, index, num_classes)
    rows = split_rows(labels, data, part, shards.store.root, shards.classes) if shared else None
    return ShardSamples(shards.store, index, labels, shards.classes, window, rows)


def check_splits(shards: ShardSet, data: DataConfig, num_classes: int, train: bool) -> None:
    """Index the splits that a run needs, and check their labels."""
    owner = f"data set in {shards.store.root}"
    if found := separator_in(shards.classes or ()):
        log.warning(
            "The %s: the class %r looks like several labels, separated by a %s. To train on each of them, give the "
            "labels as lists in parquet files, or as a csv table, with DATA.MULTI_LABEL=true.",
            owner,
            found[1],
            found[0],
        )
    if shards.classes is not None:
        check_class_count(len(shards.classes), num_classes, f"The {owner}")
    parts = parts_read(data, train, shards.existing())
    splits = [open_split(shards, data, part, num_classes, 1) for part in parts]
    labels = splits[0].labels
    number = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    classes = shards.classes if shards.classes is not None else range(number)
    log_unused_outputs(len(classes), num_classes, f"The {owner}")
    for part, split in zip(parts, splits, strict=True):
        if part == "train" or not shards.split(part)[1]:  # `split_rows` warns of a validation split that it makes
            warn_empty_classes(split.labels, classes, f"The {TITLES[part]} of the {owner}")


def _label_rows(shards: ShardSet, index: ShardIndex, num_classes: int) -> np.ndarray:
    """Zeros and ones, samples x classes, of a set whose labels are numbers of label sets."""
    sets = shards.label_sets or []
    known = max([len(shards.classes or ()), *(label + 1 for of_set in sets for label in of_set)])
    width = known if num_classes == ANY_LABEL else num_classes
    if not known:
        raise UserError(f"{shards.store.root}: no image has a label.")
    if index.label.min() < 0 or index.label.max() >= len(sets):
        raise UserError(
            f"{shards.store.root}/{MANIFEST} lacks the labels of some images. Remove this folder: the next run with "
            "-dataset hf:NAME_OR_PATH copies the data set again."
        )
    if num_classes == ANY_LABEL:
        labels = [(number, label) for number, of_set in enumerate(sets) for label in of_set]
        check_gaps([label for _, label in labels], lambda place: _first_of_set(shards, index, labels[place][0]))
    for number, of_set in enumerate(sets):
        if wrong := [label for label in of_set if not 0 <= label < width]:
            rows = np.flatnonzero(index.label == number)
            if rows.size:
                _refuse(shards, index, int(rows[0]), wrong[0], width)
    table = np.zeros((len(sets), width), dtype=np.uint8)
    for number, of_set in enumerate(sets):
        table[number, [label for label in of_set if 0 <= label < width]] = 1  # others are of the other split
    return table[index.label]


def _first_of_set(shards: ShardSet, index: ShardIndex, number: int) -> str:
    """Name of the first image with a set of labels."""
    rows = np.flatnonzero(index.label == number)
    return f"{shards.store.root}: {index.name(int(rows[0])) if rows.size else f'label set {number}'}"


def _check_labels(shards: ShardSet, index: ShardIndex, num_classes: int) -> None:
    wrong = np.flatnonzero((index.label < 0) | (index.label >= num_classes))
    if wrong.size and num_classes != ANY_LABEL:
        _refuse(shards, index, int(wrong[0]), int(index.label[wrong[0]]), num_classes)


def _refuse(shards: ShardSet, index: ShardIndex, row: int, label: int, num_classes: int) -> None:
    where = f"{shards.store.root}/{index.shards[index.shard[row]]}"
    raise UserError(
        f"{where}: the label of {index.name(row)} is {label}, which does not fit MODEL.NUM_CLASSES "
        f"{num_classes}: labels go from 0 to {num_classes - 1}. Correct it, or train with a larger -num_classes."
    )


def _samples(data: DataConfig, part: Part, num_classes: int) -> ShardSamples:
    return open_split(ShardSet(open_store(data.DATA_PATH), data), data, part, num_classes, data.SHARD_WINDOW)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    check_splits(ShardSet(open_store(data.DATA_PATH), data), data, num_classes, train)


def _is_unsplit(data: DataConfig) -> bool:
    return ShardSet(open_store(data.DATA_PATH), data).split("val")[1]


def _existing(data: DataConfig) -> list[Part]:
    return ShardSet(open_store(data.DATA_PATH), data).existing()


def _tests(data: DataConfig) -> bool:
    splits = ShardSet(open_store(data.DATA_PATH), data).splits
    return "test" in splits and splits["test"] == splits.get("val")


SOURCE = image_source(_samples, _check, is_unsplit=_is_unsplit, multi_label=True, parts=_existing, tests=_tests)
