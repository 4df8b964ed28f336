"""`pets`: Oxford-IIIT's cats and dogs, 37 breeds. Training is what was published as trainval, validation as test."""

from __future__ import annotations

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

TRAIN, VALIDATION = "annotations/trainval.txt", "annotations/test.txt"
PETS = Published(
    folder="oxford-iiit-pet",
    marks=(TRAIN, VALIDATION, "images"),
    layout=f"images/Abyssinian_1.jpg\n{TRAIN}    lines like: Abyssinian_100 1 1 1\n{VALIDATION}",
    fetcher="OxfordIIITPet",
    megabytes=811,
    page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
)


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    folder = PETS.found(data)
    classes, paths, labels = _listed(folder, train)
    check_class_count(len(classes), num_classes, "The data set pets")
    return Images(FileSamples(folder, PathTable(paths), labels, classes), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    folder = PETS.prepare(data)
    classes: list[str] = []
    for training in [True, False] if train else [False]:
        classes, paths, _ = _listed(folder, training)
        check_class_count(len(classes), num_classes, "The data set pets")
        PETS.check_files(folder, paths)
    tell_spare_classes(len(classes), num_classes, "The data set pets")


def _listed(folder: Path, train: bool) -> tuple[list[str], list[str], np.ndarray]:
    """Classes, paths and labels of one part. A breed's name is that of its images without their number."""
    lines = _lines(folder, TRAIN if train else VALIDATION)
    breeds = {label: name.rpartition("_")[0] for name, label in _lines(folder, TRAIN) + lines}
    if sorted(breeds) != list(range(len(breeds))):
        raise UserError(PETS.broken(folder, f"the classes in {TRAIN} are not numbered from 1 on"))
    classes = [breeds[label] for label in range(len(breeds))]
    return classes, [f"images/{name}.jpg" for name, _ in lines], np.array([label for _, label in lines])


def _lines(folder: Path, list_name: str) -> list[tuple[str, int]]:
    """Name and label, counted from 0, of each image in a list."""
    found = []
    try:
        text = (folder / list_name).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                name, label, *_ = line.split()
                found.append((name, int(label) - 1))
    except (OSError, ValueError) as error:
        raise UserError(PETS.broken(folder, f"{list_name} cannot be read ({error})")) from None
    if not found:
        raise UserError(PETS.broken(folder, f"{list_name} is empty"))
    return found


SOURCE = Source(_open, _check, fetches=True)
