"""predict.py -features: writes what the model's classifier sees of each image, as npz or parquet.

Features of many images do not fit into memory, so they go to the disk batch by batch.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from datasets import Batch, ImageDataset, has_labels
from engine.features.pooling import check_pool
from engine.saved.features import features_of
from engine.saved.trained import Trained
from tools.common.output_file import writing
from tools.predict.images import predict_images
from utils.errors import EXIT_DONE, EXIT_FAILED, TrainingError
from utils.files import replacing

LARGE = 2 << 30
"""Bytes of features from which on their size is printed beforehand"""
ROW_GROUP = 16 << 20
"""Bytes of features in a row group of a parquet file"""
COPIED = 16 << 20
"""Bytes at once"""


class Seen(NamedTuple):
    """Of one image."""

    features: np.ndarray
    """float32: D, or patches x D"""
    label: np.ndarray
    """A number; with several labels per image a row of zeros and ones"""


def write_features(asked: Namespace, trained: Trained, dataset: ImageDataset, paths: list[str]) -> int:
    """Write the file, and return the exit code. `dataset`: the images, with these `paths`."""
    check_pool(trained.model, asked.pool)
    print(f"{asked.path}: {trained.chosen.words}", file=sys.stderr)
    labelled = asked.part is not None and has_labels(trained.config.DATA)
    classes = trained.names() if labelled else None

    def results(batches: Sequence[Batch]) -> Iterator[Seen]:
        (batch,) = batches
        features = features_of(trained, batch.images, asked.pool).cpu().numpy()
        return map(Seen, features, batch.labels.cpu().numpy())

    out: Path = asked.features
    kind = NpzFile if out.suffix.lower() == ".npz" else ParquetFile
    with writing(out, "-features"), replacing(out) as unfinished, kind.opened(unfinished, len(paths), classes) as file:
        unreadable = predict_images(
            [trained], [dataset], paths, file, results, asked.batch_size, asked.num_workers, sys.stderr.isatty()
        )
        if not file.written:
            raise TrainingError(f"None of the images can be read; {out} is not written.")
    size = " x ".join(map(str, (file.written, *file.shape)))
    print(f"{out}: features of {file.written:,} images, {size} numbers ({asked.pool})", file=sys.stderr)
    return EXIT_FAILED if unreadable else EXIT_DONE


class FeatureFile:
    """A file of features, written image by image. Images that cannot be read are left out."""

    def __init__(self, path: Path, images: int, classes: list[str] | None) -> None:
        """`images`: how many there are, for the size beforehand. `classes`: their names; None: there are no labels."""
        self.path, self.images, self.classes = path, images, classes
        self.written = 0
        self.shape: tuple[int, ...] = (0,)
        """Of the features of one image"""

    @classmethod
    @contextmanager
    def opened(cls, *of: Any) -> Iterator[FeatureFile]:
        file = cls(*of)
        try:
            yield file
        finally:
            file.close()

    def begin(self) -> None: ...

    def image(self, path: str, seen: Seen) -> None:
        if not self.written:
            self.shape = seen.features.shape
            if (size := self.images * seen.features.nbytes) > LARGE:
                print(f"The features of {self.images:,} images take {size / 2**30:.1f} GiB.", file=sys.stderr)
        self.written += 1
        self.add(path, seen)

    def failure(self, path: str, reason: str) -> None: ...

    def end(self) -> None: ...

    def add(self, path: str, seen: Seen) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class NpzFile(FeatureFile):
    """Arrays `features` and `paths`; of images with labels also `labels` and `classes`.

    An array's size is written before its numbers, and is only known at the end. So the features are in a temporary
    file first, beside the file, and need twice their space for a moment.
    """

    _rows: Any = None

    def begin(self) -> None:
        self._rows = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - `close` closes it
        self._paths: list[str] = []
        self._labels: list[np.ndarray] = []

    def add(self, path: str, seen: Seen) -> None:
        self._rows.write(seen.features.astype("<f4").tobytes())
        self._paths.append(path)
        if self.classes is not None:
            self._labels.append(seen.label.astype(np.int64))

    def end(self) -> None:
        about = {"descr": "<f4", "fortran_order": False, "shape": (self.written, *self.shape)}
        self._rows.seek(0)
        with zipfile.ZipFile(self.path, "w") as file:
            with file.open("features.npy", "w", force_zip64=True) as entry:
                npy.write_array_header_1_0(entry, about)
                shutil.copyfileobj(self._rows, entry, COPIED)
            _write(file, "paths", np.array(self._paths, dtype=np.str_))
            if self.classes is not None:
                _write(file, "labels", np.array(self._labels, dtype=np.int64))
                _write(file, "classes", np.array(self.classes, dtype=np.str_))

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def _write(file: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
        npy.write_array(entry, array, allow_pickle=False)


class ParquetFile(FeatureFile):
    """Columns `path` and `features`; of images with labels also `label` and `class`, the name. Several labels per image
    make lists of these."""

    _writer: Any = None

    def begin(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, path: str, seen: Seen) -> None:
        if self._writer is None:
            self._writer = self._new_writer(seen)
        # A file's name may have bytes that are not UTF-8, and text in parquet cannot.
        name = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        row = {"path": name, "features": seen.features if seen.features.ndim == 1 else list(seen.features)}
        if self.classes is not None:
            labels = np.flatnonzero(seen.label).tolist() if seen.label.ndim else [int(seen.label)]
            names = [self.classes[label] for label in labels]
            row |= {"label": labels, "class": names} if seen.label.ndim else {"label": labels[0], "class": names[0]}
        self._rows.append(row)
        if len(self._rows) * seen.features.nbytes >= ROW_GROUP:
            self._flush()

    def end(self) -> None:
        if self._rows:
            self._flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _new_writer(self, seen: Seen) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        features, label, name = pa.list_(pa.float32()), pa.int64(), pa.string()
        if seen.features.ndim == 2:
            features = pa.list_(features)
        if seen.label.ndim:
            label, name = pa.list_(label), pa.list_(name)
        columns = {"path": pa.string(), "features": features}
        if self.classes is not None:
            columns |= {"label": label, "class": name}
        return pq.ParquetWriter(self.path, pa.schema(columns))

    def _flush(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._rows, self._writer.schema))
        self._rows = []
