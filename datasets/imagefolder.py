"""`imagefolder`: a folder a class, its name is the class's name. Without parts, they are made by a split."""

from __future__ import annotations

from pathlib import Path

import torch

from utils.config.schema import DataConfig
from utils.errors import UserError

from .base import Source
from .files import data_folder
from .folders import (
    VALIDATION_NAMES,
    check_folders,
    class_files,
    no_images,
    open_folders,
    subfolders,
)
from .images import Images
from .labels import check_class_count, tell_empty_classes, tell_spare_classes
from .split import split_files

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
        check_folders(data, num_classes, train)
        return
    classes = subfolders(root)
    for name in classes:
        if _has_parts(root / name):
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {root / name} has a training and a validation part of its own: "
                f"{root} seems to be one folder too high. Try -data_path {root / name}."
            )
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    paths, labels = class_files(root, classes)
    if not paths:
        raise UserError(f"{no_images(root, root)}\n{WITHOUT_PARTS.format(root=root)}")
    tell_spare_classes(len(classes), num_classes, f"The data set in {root}")
    tell_empty_classes(labels, classes, str(root))
    split_files(root, paths, labels, classes, data, train)


def _has_parts(root: Path) -> bool:
    return any((root / name).is_dir() for name in ("train", *VALIDATION_NAMES))


SOURCE = Source(_open, _check)
