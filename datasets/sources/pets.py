"""`pets`: Oxford-IIIT's cats and dogs, 37 breeds. Training is what was published as trainval, validation as test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets.sources.published import Listed, Published
from utils.errors import UserError
from utils.files import read_regular_text

TRAIN, VALIDATION = "annotations/trainval.txt", "annotations/test.txt"
PETS = Published(
    folder="oxford-iiit-pet",
    marks=(TRAIN, VALIDATION, "images"),
    layout=f"images/Abyssinian_1.jpg\n{TRAIN}    lines like: Abyssinian_100 1 1 1\n{VALIDATION}",
    fetcher="OxfordIIITPet",
    megabytes=811,
    page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
)


def _listed(folder: Path, train: bool) -> Listed:
    """One part. A breed's name is that of its images without their number."""
    lines = _lines(folder, TRAIN if train else VALIDATION)
    breeds = {label: name.rpartition("_")[0] for name, label in _lines(folder, TRAIN) + lines}
    if sorted(breeds) != list(range(len(breeds))):
        raise UserError(PETS.broken(folder, f"the classes in {TRAIN} are not numbered from 1 on"))
    classes = [breeds[label] for label in range(len(breeds))]
    paths = [f"images/{name}.jpg" for name, _ in lines]
    return Listed(paths, np.array([label for _, label in lines]), classes)


def _lines(folder: Path, list_name: str) -> list[tuple[str, int]]:
    """Name and label, counted from 0, of each image in a list."""
    found = []
    try:
        text = read_regular_text(folder / list_name)
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                name, label, *_ = line.split()
                found.append((name, int(label) - 1))
    except (OSError, ValueError) as error:
        raise UserError(PETS.broken(folder, f"{list_name} cannot be read ({error})")) from None
    if not found:
        raise UserError(PETS.broken(folder, f"{list_name} is empty"))
    return found


SOURCE = PETS.source(_listed)
