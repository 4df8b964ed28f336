"""`caltech101` and `caltech256`: a folder a class, with one that is none. They have no validation part of their own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from datasets.base import Source
from datasets.images import Images
from datasets.labels import check_class_count, tell_spare_classes
from datasets.sources.imagefolder import class_files, subfolders
from datasets.sources.published import Published
from datasets.sources.split import split_files
from utils.config.data import DataConfig
from utils.errors import UserError

log = logging.getLogger("vitamp")


class Tree(NamedTuple):
    """What lies in one of the two, clutter left out."""

    folder: Path
    """The one with the folders of classes"""
    classes: list[str]
    """Names of these, in order"""
    paths: list[str]
    """Of the images, below `folder`"""
    labels: np.ndarray


@dataclass(frozen=True)
class Caltech:
    """One of the two."""

    published: Published
    clutter: str
    """The folder of what belongs to no class"""
    images: int
    """As published, without that folder"""

    def open(self, data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG002 - files are read on the host
        folder, classes, paths, labels = self.tree(self.published.found(data), data, num_classes)
        return Images(split_files(folder, paths, labels, classes, data, train), data, train, seed)

    def check(self, data: DataConfig, num_classes: int, train: bool) -> None:
        folder, classes, paths, labels = self.tree(self.published.prepare(data), data, num_classes)
        tell_spare_classes(len(classes), num_classes, f"The data set {data.DATASET}")
        # Nothing lists the images, so their number is all one can go by.
        if len(paths) < self.images:
            log.warning("%s has %s images; %s were published.", folder, f"{len(paths):,}", f"{self.images:,}")
        split_files(folder, paths, labels, classes, data, train)

    def tree(self, found: Path, data: DataConfig, num_classes: int) -> Tree:
        """`found`: the data set's folder, as `published` finds or fetches it."""
        folder = found / self.published.marks[0]
        classes = [name for name in subfolders(folder) if name != self.clutter]
        if not classes:
            raise UserError(self.published.broken(folder.parent, f"{folder.name} has no folder of a class"))
        check_class_count(len(classes), num_classes, f"The data set {data.DATASET}")
        paths, labels = class_files(folder, classes)
        if not paths:
            raise UserError(self.published.broken(folder.parent, f"no folder of a class in {folder.name} has an image"))
        return Tree(folder, classes, paths, labels)

    def source(self) -> Source:
        return Source(self.open, self.check, fetches=True)


def _caltech(classes: int, clutter: str, images: int, example: str, megabytes: int, record: str) -> Caltech:
    inner = f"{classes}_ObjectCategories"
    published = Published(
        folder=f"caltech{classes}",
        marks=(inner,),
        layout=f"{inner}/{example}",
        fetcher=f"Caltech{classes}",
        megabytes=megabytes,
        page=f"https://data.caltech.edu/records/{record}",
    )
    return Caltech(published, clutter, images)


CALTECH101 = _caltech(101, "BACKGROUND_Google", 8677, "accordion/image_0001.jpg", 137, "20086")
CALTECH256 = _caltech(256, "257.clutter", 29780, "001.ak47/001_0001.jpg", 1183, "20087")
