"""`cifar10` and `cifar100`: 60,000 images of 32 x 32 in Python pickles, read by an unpickler that cannot run code."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets.base import ImageDataset, Source, part_of
from datasets.labels import check_class_count, log_unused_outputs
from datasets.memory import ArraySamples, open_arrays
from datasets.sources.published import Published
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import only_regular

SHAPE = (3, 32, 32)
# Callables in the pickle of a numpy array, by their names in older and newer versions of numpy.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


@dataclass(frozen=True)
class Cifar(Published):
    train: tuple[str, ...]
    """Files of the training split"""
    validation: str
    meta: str
    names: str
    """Key of the class names"""
    labels: str
    """Key of the labels"""

    def open(self, data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> ImageDataset:
        folder = self.existing_folder(data)
        classes = self._classes(folder, data, num_classes)
        part = part_of(data, train)
        files = (*(self.train if part in ("train", "all") else ()), *([self.validation] if part != "train" else ()))
        contents = [self._read(folder, name, len(classes)) for name in files]
        pixels = np.concatenate([pixels for pixels, _ in contents])
        labels = np.concatenate([labels for _, labels in contents])
        owner = f"{data.DATASET}:{'test' if part == 'val' else part}"
        return open_arrays(ArraySamples(pixels, labels, classes, owner), data, train, seed, device)

    def check(self, data: DataConfig, num_classes: int, train: bool) -> None:
        folder = self.fetched_folder(data)
        classes = self._classes(folder, data, num_classes)
        log_unused_outputs(len(classes), num_classes, f"The data set {data.DATASET}")
        for name in (*(self.train if train else ()), self.validation):
            self._read(folder, name, len(classes))

    def _classes(self, folder: Path, data: DataConfig, num_classes: int) -> list[str]:
        (classes,) = self._entries(folder, self.meta, self.names)
        check_class_count(len(classes), num_classes, f"The data set {data.DATASET}")
        return [str(name) for name in classes]

    def _read(self, folder: Path, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (N x H x W x C) and labels of one file."""
        pixels, labels = map(np.asarray, self._entries(folder, name, "data", self.labels))
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), int(np.prod(SHAPE))) or not len(labels):
            raise self.damaged(folder, f"{name} does not hold images of 32 x 32")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
            raise self.damaged(folder, f"{name} has labels beyond its {classes} classes")
        return pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1), labels.astype(np.int64)

    def _entries(self, folder: Path, name: str, *keys: str) -> list[Any]:
        """Values of these keys in a file."""
        with self.reading(folder, name), open(folder / name, "rb", opener=only_regular) as opened:
            table = _ArraysOnly(opened, encoding="latin1").load()
            return [table[key] for key in keys]


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of arrays. A pickle can name any function and have it called; this one allows those of arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise UserError(
            f"A file of the data set calls {module}.{name}, which no CIFAR file does: it may be malicious. Nothing was "
            f"run. Remove the data set and fetch it from its publisher."
        )


def _cifar(classes: int, folder: str, megabytes: int, **files: Any) -> Source:
    cifar = Cifar(
        folder=folder,
        required=(*files["train"], files["validation"], files["meta"]),
        layout=f"{', '.join(files['train'])}    the training split\n{files['validation']}    the validation split\n"
        f"{files['meta']}    the names of the classes",
        fetcher=f"CIFAR{classes}",
        megabytes=megabytes,
        page="https://www.cs.toronto.edu/~kriz/cifar.html (the python version)",
        **files,
    )
    return Source(cifar.open, cifar.check, arrays="cropped", fetches=True)


CIFAR10 = _cifar(
    10,
    "cifar-10-batches-py",
    171,
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    validation="test_batch",
    meta="batches.meta",
    names="label_names",
    labels="labels",
)
CIFAR100 = _cifar(
    100,
    "cifar-100-python",
    169,
    train=("train",),
    validation="test",
    meta="meta",
    names="fine_label_names",
    labels="fine_labels",
)
