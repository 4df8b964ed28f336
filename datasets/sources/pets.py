"""`pets`: the Oxford-IIIT Pet Dataset, 37 breeds of cats and dogs. Training is its trainval split, validation test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets.base import Part
from datasets.sources.files import FileList
from datasets.sources.published import PublishedLists
from utils.files import read_regular_text

TRAIN, VALIDATION = "annotations/trainval.txt", "annotations/test.txt"


class Pets(PublishedLists):
    def read_split(self, folder: Path, part: Part) -> FileList:
        images = self._read(folder, TRAIN if part == "train" else VALIDATION)
        # The name of an image is its breed and a number.
        breeds = {label: name.rpartition("_")[0] for name, label in self._read(folder, TRAIN) + images}
        if sorted(breeds) != list(range(len(breeds))):
            raise self.damaged(folder, f"the classes in {TRAIN} are not numbered from 1 without gaps")
        classes = [breeds[label] for label in range(len(breeds))]
        paths = [f"images/{name}.jpg" for name, _ in images]
        return FileList(folder, paths, np.array([label for _, label in images]), classes)

    def _read(self, folder: Path, list_name: str) -> list[tuple[str, int]]:
        """Name and label of each image in a list. Labels count from 1 in the file, and from 0 here."""
        images = []
        with self.reading(folder, list_name):
            for line in read_regular_text(folder / list_name).splitlines():
                if line.strip() and not line.startswith("#"):
                    name, label, *_ = line.split()
                    images.append((name, int(label) - 1))
        if not images:
            raise self.damaged(folder, f"{list_name} is empty")
        return images


SOURCE = Pets(
    folder="oxford-iiit-pet",
    required=(TRAIN, VALIDATION, "images"),
    layout=f"images/Abyssinian_1.jpg\n{TRAIN}    lines like: Abyssinian_100 1 1 1\n{VALIDATION}",
    fetcher="OxfordIIITPet",
    megabytes=811,
    page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
).source()
