"""`food101`: 101 dishes. The validation part is what was published as the test part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from utils.config.schema import DataConfig
from utils.errors import UserError

from .base import Source
from .files import FileSamples, PathTable
from .images import Images
from .labels import check_class_count, tell_spare_classes
from .published import Published

TRAIN, VALIDATION = "meta/train.json", "meta/test.json"
FOOD = Published(
    folder="food-101",
    marks=(TRAIN, VALIDATION, "images"),
    layout=f"images/apple_pie/1005649.jpg\n{TRAIN}    the images of each class, as in apple_pie/1005649\n{VALIDATION}",
    fetcher="Food101",
    megabytes=4996,
    page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    folder = FOOD.found(data)
    classes, paths, labels = _listed(folder, train)
    check_class_count(len(classes), num_classes, "The data set food101")
    return Images(FileSamples(folder, PathTable(paths), labels, classes), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    folder = FOOD.prepare(data)
    classes: list[str] = []
    for training in [True, False] if train else [False]:
        classes, paths, _ = _listed(folder, training)
        check_class_count(len(classes), num_classes, "The data set food101")
        FOOD.check_files(folder, paths)
    tell_spare_classes(len(classes), num_classes, "The data set food101")


def _listed(folder: Path, train: bool) -> tuple[list[str], list[str], np.ndarray]:
    """Classes, paths and labels of one part. Both have the classes of the training part."""
    classes = sorted(_table(folder, TRAIN))
    of_class = _table(folder, TRAIN if train else VALIDATION)
    if sorted(of_class) != classes:
        raise UserError(FOOD.broken(folder, f"{TRAIN} and {VALIDATION} differ in their classes"))
    paths = [f"images/{path}.jpg" for name in classes for path in of_class[name]]
    return classes, paths, np.repeat(np.arange(len(classes)), [len(of_class[name]) for name in classes])


def _table(folder: Path, name: str) -> dict[str, list[str]]:
    try:
        table = json.loads((folder / name).read_text(encoding="utf-8"))
        return {str(key): [str(path) for path in paths] for key, paths in table.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(FOOD.broken(folder, f"{name} cannot be read ({error})")) from None


SOURCE = Source(_open, _check, fetches=True)
