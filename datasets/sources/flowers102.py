"""`flowers102`: Oxford's 102 Category Flower Dataset, with its published training, validation and test splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets.base import Part
from datasets.sources.files import FileList
from datasets.sources.published import PublishedLists
from utils.files import only_regular

SETS, LABELS = "setid.mat", "imagelabels.mat"
SETS_OF: dict[Part, str] = {"train": "trnid", "val": "valid", "test": "tstid"}
CLASSES = 102


class Flowers(PublishedLists):
    parts = tuple(SETS_OF)

    def read_split(self, folder: Path, part: Part) -> FileList:
        numbers = self._read(folder, SETS, SETS_OF[part])
        labels = self._read(folder, LABELS, "labels") - 1  # published numbers and labels count from 1
        if numbers.min() < 1 or numbers.max() > len(labels):
            raise self.damaged(folder, f"{SETS} names images that {LABELS} does not have")
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise self.damaged(folder, f"{LABELS} has labels beyond its {CLASSES} classes")
        paths = [f"jpg/image_{number:05d}.jpg" for number in numbers]
        return FileList(folder, paths, labels[numbers - 1], range(CLASSES))

    def _read(self, folder: Path, file: str, name: str) -> np.ndarray:
        """The array `name` of a MATLAB file."""
        from scipy.io import loadmat  # slow to import

        with self.reading(folder, file), open(folder / file, "rb", opener=only_regular) as opened:
            return loadmat(opened, variable_names=[name])[name].ravel().astype(np.int64)


SOURCE = Flowers(
    folder="flowers-102",
    required=(SETS, LABELS, "jpg"),
    layout=f"jpg/image_00001.jpg\n{SETS}\n{LABELS}",
    fetcher="Flowers102",
    megabytes=345,
    page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
).source()
