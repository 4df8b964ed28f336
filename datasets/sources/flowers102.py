"""`flowers102`: Oxford's flowers. The parts are the training and the validation part as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datasets.sources.published import Listed, Published
from utils.errors import UserError
from utils.files import only_regular

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


def _listed(folder: Path, train: bool) -> Listed:
    """One part. The published numbers count from 1."""
    numbers = _table(folder / SETS, "trnid" if train else "valid")
    labels = _table(folder / LABELS, "labels") - 1
    if numbers.min() < 1 or numbers.max() > len(labels):
        raise UserError(FLOWERS.broken(folder, f"{SETS} names images that {LABELS} does not have"))
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise UserError(FLOWERS.broken(folder, f"{LABELS} has labels beyond its {CLASSES} classes"))
    paths = [f"jpg/image_{number:05d}.jpg" for number in numbers]
    return Listed(paths, labels[numbers - 1], range(CLASSES))


def _table(file: Path, name: str) -> np.ndarray:
    from scipy.io import loadmat  # slow to import

    try:
        with open(file, "rb", opener=only_regular) as opened:
            content: dict[str, Any] = loadmat(opened, variable_names=[name])
        return content[name].ravel().astype(np.int64)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(FLOWERS.broken(file.parent, f"{file.name} cannot be read ({reason})")) from None


SOURCE = FLOWERS.source(_listed)
