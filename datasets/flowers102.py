"""`flowers102`: Oxford's flowers. The parts are the training and the validation part as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.config.schema import DataConfig
from utils.errors import UserError

from .base import Source
from .files import FileSamples, PathTable
from .images import Images
from .labels import check_class_count, tell_spare_classes
from .published import Published

SETS, LABELS = "setid.mat", "imagelabels.mat"
CLASSES = 102
FLOWERS = Published(
    folder="flowers-102",
    marks=(SETS, LABELS, "jpg"),
    layout=f"jpg/image_00001.jpg\n{SETS}\n{LABELS}",
    fetcher="Flowers102",
    megabytes=345,
    page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    folder = FLOWERS.found(data)
    check_class_count(CLASSES, num_classes, "The data set flowers102")
    paths, labels = _listed(folder, train)
    return Images(FileSamples(folder, PathTable(paths), labels, None), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    folder = FLOWERS.prepare(data)
    check_class_count(CLASSES, num_classes, "The data set flowers102")
    tell_spare_classes(CLASSES, num_classes, "The data set flowers102")
    for training in [True, False] if train else [False]:
        FLOWERS.check_files(folder, _listed(folder, training)[0])


def _listed(folder: Path, train: bool) -> tuple[list[str], np.ndarray]:
    """Paths and labels of one part. The published numbers count from 1."""
    numbers = _table(folder / SETS, "trnid" if train else "valid")
    labels = _table(folder / LABELS, "labels") - 1
    if numbers.min() < 1 or numbers.max() > len(labels):
        raise UserError(FLOWERS.broken(folder, f"{SETS} names images that {LABELS} does not have"))
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise UserError(FLOWERS.broken(folder, f"{LABELS} has labels beyond its {CLASSES} classes"))
    return [f"jpg/image_{number:05d}.jpg" for number in numbers], labels[numbers - 1]


def _table(file: Path, name: str) -> np.ndarray:
    from scipy.io import loadmat  # slow to import

    try:
        content: dict[str, Any] = loadmat(file, variable_names=[name])
        return content[name].ravel().astype(np.int64)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(FLOWERS.broken(file.parent, f"{file.name} cannot be read ({reason})")) from None


SOURCE = Source(_open, _check, fetches=True)
