"""`imagefolder`: a folder per class, in `train/` and `val/`, or without parts, which a split then makes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from datasets.base import Source
from datasets.decoding.stored import ENDINGS
from datasets.images import Images
from datasets.labels import check_class_count, tell_empty_classes, tell_spare_classes
from datasets.sources.files import FileSamples, PathTable, data_folder
from datasets.sources.split import split_files
from datasets.sources.walk import PassedOver, images_below
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log

VALIDATION_NAMES = ("val", "validation", "test")
LAYOUT = """Expected layout:
  {root}/train/<class>/image.jpg
  {root}/val/<class>/image.jpg    (or validation/, or test/)"""


def open_folders(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> Images:  # noqa: ARG001 - files are read on the host
    """All images of one part, in the order of class and path."""
    root = data_folder(data)
    part = part_folder(root, train)
    classes = class_names(root, part)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    paths, labels = class_files(part, classes)
    if not paths:
        raise UserError(no_images(part, root))
    return Images(FileSamples(part, PathTable(paths), labels, classes), data, train, seed)


def check_folders(data: DataConfig, num_classes: int, train: bool) -> None:
    """Find missing parts and empty ones by a look at the folders, not at every file."""
    root = data_folder(data)
    for training in [True, False] if train else [False]:
        _check_part(root, part_folder(root, training), num_classes)
    classes = class_names(root, part_folder(root, train))
    tell_spare_classes(len(classes), num_classes, f"The data set in {root}")


def _check_part(root: Path, part: Path, num_classes: int) -> None:
    classes = class_names(root, part)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    with_images = np.flatnonzero([_has_images(part / name) for name in classes])
    if not len(with_images):
        raise UserError(no_images(part, root))
    tell_empty_classes(with_images, classes, str(part))


def part_folder(root: Path, train: bool) -> Path:
    """The folder of the training or of the validation part."""
    names = ("train",) if train else VALIDATION_NAMES
    for name in names:
        if (root / name).is_dir():
            return root / name
    looked_for = " or ".join(str(root / name) for name in names)
    raise UserError(f"DATA.DATA_PATH (-data_path): there is no folder {looked_for}. {LAYOUT.format(root=root)}")


def class_names(root: Path, part: Path) -> list[str]:
    """Names in the order of their labels: those of the training part, wherever there is one."""
    train = root / "train"
    classes = subfolders(train if train.is_dir() else part)
    if not classes:
        raise UserError(no_images(train if train.is_dir() else part, root))
    unknown = set(subfolders(part)).difference(classes)
    if unknown:
        first = min(unknown)
        raise UserError(
            f"{part / first}: the training part {train} has no class of that name.{nearest(first, classes)} "
            f"Both parts need the same classes."
        )
    return classes


def class_files(folder: Path, classes: list[str]) -> tuple[list[str], np.ndarray]:
    """Paths relative to `folder`, and labels, of all images in the order of class and path."""
    passed = PassedOver()
    found = [sorted(images_below(str(folder / name), passed, hidden=True)) for name in classes]
    passed.tell(str(folder))
    paths = [f"{name}/{path}" for name, of_class in zip(classes, found, strict=True) for path in of_class]
    return paths, np.repeat(np.arange(len(classes)), [len(of_class) for of_class in found])


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, in order. Hidden ones do not count."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def has_class_folders(folder: Path) -> bool:
    """Is there an image in any of its folders?"""
    return any(_has_images(folder / name) for name in subfolders(folder))


def _has_images(folder: Path) -> bool:
    return next(images_below(str(folder), hidden=True), None) is not None


def no_images(part: Path, root: Path) -> str:
    """The message for a folder without any."""
    kinds = " ".join(ENDINGS)
    return f"{part} has no images in class folders (files ending in {kinds} count). {LAYOUT.format(root=root)}"


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
