"""`food101`: 101 dishes. The validation split is the published test split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets.base import Part
from datasets.sources.files import FileList
from datasets.sources.published import PublishedLists
from utils.files import parse_json, read_regular_text

TRAIN, VALIDATION = "meta/train.json", "meta/test.json"


class Food(PublishedLists):
    def read_split(self, folder: Path, part: Part) -> FileList:
        classes = sorted(self._read(folder, TRAIN))
        of_class = self._read(folder, TRAIN if part == "train" else VALIDATION)
        if sorted(of_class) != classes:
            raise self.damaged(folder, f"{TRAIN} and {VALIDATION} differ in their classes")
        paths = [f"images/{path}.jpg" for name in classes for path in of_class[name]]
        labels = np.repeat(np.arange(len(classes)), [len(of_class[name]) for name in classes])
        return FileList(folder, paths, labels, classes)

    def _read(self, folder: Path, name: str) -> dict[str, list[str]]:
        """Paths of the images of each class."""
        table: dict[str, list[str]] = {}
        with self.reading(folder, name):
            for key, paths in parse_json(read_regular_text(folder / name)).items():
                table[key] = [str(path) for path in paths]
        return table


SOURCE = Food(
    folder="food-101",
    required=(TRAIN, VALIDATION, "images"),
    layout=f"images/apple_pie/1005649.jpg\n{TRAIN}    the images of each class, as in apple_pie/1005649\n{VALIDATION}",
    fetcher="Food101",
    megabytes=4996,
    page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
).source()
