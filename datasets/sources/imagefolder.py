"""`imagefolder`: a folder a class, its name is the class's name. Without parts, they are made by a split."""

from __future__ import annotations

from pathlib import Path

import torch

from datasets.base import Source
from datasets.images import Images
from datasets.labels import check_class_count, tell_empty_classes, tell_spare_classes
from datasets.sources.files import data_folder
from datasets.sources.folders import (
    VALIDATION_NAMES,
    check_folders,
    class_files,
    has_class_folders,
    no_images,
    open_folders,
    subfolders,
)
from datasets.sources.split import split_files
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

PARTS = {"train", *VALIDATION_NAMES}
WITHOUT_PARTS = """or, to be split by DATA.VAL_FRACTION:
  {root}/<class>/image.jpg"""


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:
    root = data_folder(data)
    if _has_parts(root):
        return open_folders(data, train, num_classes, seed, device)
    classes = subfolders(root)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    paths, labels = class_files(root, classes)
    return Images(split_files(root, paths, labels, classes, data, train), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    root = data_folder(data)
    if _has_parts(root):
        _check_parts(root, data, num_classes, train)
        return
    classes = subfolders(root)
    for name in classes:
        if _parts(root / name):
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {root / name} has a training and a validation part of its own: "
                f"{root} seems to be one folder too high. Try -data_path {root / name}."
            )
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    paths, labels = class_files(root, classes)
    if not paths:
        raise UserError(f"{no_images(root, root)}\n{WITHOUT_PARTS.format(root=root)}")
    for name in sorted(PARTS.intersection(classes)):
        log.warning("%s is taken for a class, not for a part of the data: no folder in it has images.", root / name)
    tell_spare_classes(len(classes), num_classes, f"The data set in {root}")
    tell_empty_classes(labels, classes, str(root))
    split_files(root, paths, labels, classes, data, train)


def _check_parts(root: Path, data: DataConfig, num_classes: int, train: bool) -> None:
    try:
        check_folders(data, num_classes, train)
    except UserError as error:
        others, parts = [name for name in subfolders(root) if name not in PARTS], _parts(root)
        if not others or not parts:
            raise
        raise UserError(
            f"{error}\n{root / parts[0]} is taken for a part of the data, not for a class beside {others[0]}, because "
            "folders in it have images. If it is a class, put its images into it directly."
        ) from None


def _has_parts(root: Path) -> bool:
    """Trains can be a class: a folder called train is one where it has images of its own, beside other folders."""
    return bool(_parts(root)) or bool(PARTS.intersection(names := subfolders(root)) and PARTS.issuperset(names))


def _parts(root: Path) -> list[str]:
    """Folders of a part's name that have class folders in them."""
    return [name for name in subfolders(root) if name in PARTS and has_class_folders(root / name)]


SOURCE = Source(_open, _check)
