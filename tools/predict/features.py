"""predict.py -features: writes what the model's classifier sees of each image, as npz."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from datasets import Batch, ImageDataset, has_labels
from engine.features.knn import check_pool
from engine.trained.model import Trained
from tools.common.output_file import writing
from tools.predict.images import predict_images
from tools.predict.show import Form
from utils.errors import EXIT_DONE, EXIT_FAILED, TrainingError
from vitamp.files import replacing

LARGE = 2 << 30
"""Bytes of features from which on their size is printed beforehand"""
COPIED = 16 << 20
"""Bytes at once"""
Seen = tuple[np.ndarray, np.ndarray]
"""Of one image: features in float32 (D, or patches x D), and the label, or several as a row of zeros and ones"""


def write_features(asked: Namespace, trained: Trained, dataset: ImageDataset, paths: list[str]) -> int:
    """Write the file, and return the exit code. `dataset`: the images, with these `paths`."""
    check_pool(trained.model, asked.pool)
    print(f"{asked.path}: {trained.chosen.words}", file=sys.stderr)
    labelled = asked.part is not None and has_labels(trained.config.DATA)

    def results(batches: Sequence[Batch]) -> Iterable[Seen]:
        (batch,) = batches
        features = trained.features(batch.images, asked.pool).cpu().numpy()
        return zip(features, batch.labels.cpu().numpy(), strict=True)

    out: Path = asked.features
    with writing(out, "-features"), replacing(out) as unfinished, tempfile.TemporaryFile(dir=out.parent) as rows:
        file = NpzFile(unfinished, rows, len(paths), trained.names() if labelled else None)
        unreadable = predict_images(
            [trained], [dataset], paths, file, results, asked.batch_size, asked.num_workers, sys.stderr.isatty()
        )
        if not file.paths:
            raise TrainingError(f"None of the images can be read; {out} is not written.")
    size = " x ".join(map(str, (len(file.paths), *file.shape)))
    print(f"{out}: features of {len(file.paths):,} images, {size} numbers ({asked.pool})", file=sys.stderr)
    return EXIT_FAILED if unreadable else EXIT_DONE


class NpzFile(Form):
    """Arrays `features` and `paths`; of images with labels also `labels` and `classes`. Without unreadable images.

    An array's size is written before its numbers, and is only known at the end. So the features, which do not fit into
    memory, are in a temporary file first, beside the file, and need twice their space for a moment.
    """

    def __init__(self, path: Path, rows: IO[bytes], images: int, names: list[str] | None) -> None:
        """`images`: how many there are, for the size beforehand. `names`: of the classes; None: there are no labels."""
        self.path, self.rows, self.images, self.names = path, rows, images, names
        self.paths: list[str] = []
        self.labels: list[np.ndarray] = []
        self.shape: tuple[int, ...] = (0,)
        """Of the features of one image"""

    def image(self, path: str, seen: Seen) -> None:
        features, label = seen
        if not self.paths:
            self.shape = features.shape
            if (size := self.images * features.nbytes) > LARGE:
                print(f"The features of {self.images:,} images take {size / 2**30:.1f} GiB.", file=sys.stderr)
        self.rows.write(features.astype("<f4").tobytes())
        self.paths.append(path)
        if self.names is not None:
            self.labels.append(label.astype(np.int64))

    def end(self) -> None:
        about = {"descr": "<f4", "fortran_order": False, "shape": (len(self.paths), *self.shape)}
        arrays: dict[str, np.ndarray] = {"paths": np.array(self.paths, dtype=np.str_)}
        if self.names is not None:
            arrays["labels"] = np.array(self.labels, dtype=np.int64)
            arrays["classes"] = np.array(self.names, dtype=np.str_)
        self.rows.seek(0)
        with zipfile.ZipFile(self.path, "w") as file:
            with file.open("features.npy", "w", force_zip64=True) as entry:
                npy.write_array_header_1_0(entry, about)
                shutil.copyfileobj(self.rows, entry, COPIED)
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    npy.write_array(entry, array, allow_pickle=False)
