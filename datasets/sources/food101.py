"""`food101`: 101 dishes. The validation part is what was published as the test part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from datasets.sources.published import Listed, Published
from utils.errors import UserError
from utils.files import read_regular_text

TRAIN, VALIDATION = "meta/train.json", "meta/test.json"
FOOD = Published(
    folder="food-101",
    marks=(TRAIN, VALIDATION, "images"),
    layout=f"images/apple_pie/1005649.jpg\n{TRAIN}    the images of each class, as in apple_pie/1005649\n{VALIDATION}",
    fetcher="Food101",
    megabytes=4996,
    page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
)


def _listed(folder: Path, train: bool) -> Listed:
    """One part. Both have the classes of the training part."""
    classes = sorted(_table(folder, TRAIN))
    of_class = _table(folder, TRAIN if train else VALIDATION)
    if sorted(of_class) != classes:
        raise UserError(FOOD.broken(folder, f"{TRAIN} and {VALIDATION} differ in their classes"))
    paths = [f"images/{path}.jpg" for name in classes for path in of_class[name]]
    labels = np.repeat(np.arange(len(classes)), [len(of_class[name]) for name in classes])
    return Listed(paths, labels, classes)


def _table(folder: Path, name: str) -> dict[str, list[str]]:
    try:
        table = json.loads(read_regular_text(folder / name))
        return {str(key): [str(path) for path in paths] for key, paths in table.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(FOOD.broken(folder, f"{name} cannot be read ({error})")) from None


SOURCE = FOOD.source(_listed)
