"""`imagefolder`: class folders in `train/` and `val/`, or class folders alone, which are then split."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from datasets.base import TITLES, Part, Parts, comes_unsplit, part_of, parts_read
from datasets.decoding import ENDINGS
from datasets.images import image_source
from datasets.labels import check_class_count, log_unused_outputs, warn_empty_classes
from datasets.sources.files import (
    HIDDEN_FOLDER,
    FileList,
    FileSamples,
    SkippedFiles,
    data_folder,
    images_below,
    is_folder_entry,
    split_files,
)
from datasets.sources.split import SPLIT_NAMES, TEST, VALIDATION_NAMES, named_parts, no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log

LAYOUT = """Expected layout:
  {root}/train/<class>/image.jpg
  {root}/val/<class>/image.jpg    (or valid/, validation/, dev/)
  {root}/test/<class>/image.jpg   (if there is one)"""
LAYOUT_WITHOUT_SPLITS = """or, to be split by DATA.VAL_FRACTION:
  {root}/<class>/image.jpg"""


def split_folder_samples(root: Path, data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    """All images of a split that is a folder, in the order of class and path."""
    folder = _split_folder(root, data, part)
    classes = _class_names(root, folder)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    files = class_files(folder, classes)
    if not files.paths:
        raise UserError(_no_images(folder, root))
    return files.samples()


def check_split_folders(root: Path, data: DataConfig, num_classes: int, train: bool) -> None:
    """Report missing and empty splits from a look at the folders, without listing every file."""
    classes: list[str] = []
    for part in parts_read(data, train, split_folders_of(root, data)):
        folder = _split_folder(root, data, part)
        classes = _class_names(root, folder)
        check_class_count(len(classes), num_classes, f"The data set in {root}")
        with_images = np.flatnonzero([_has_images(folder / name) for name in classes])
        if not len(with_images):
            raise UserError(_no_images(folder, root))
        warn_empty_classes(with_images, classes, str(folder))
    log_unused_outputs(len(classes), num_classes, f"The data set in {root}")


def split_folders_of(root: Path, data: DataConfig) -> Parts:
    """The splits that are folders; a folder test without class folders is none, unless it is for validation."""
    parts, tested = _parts(root, data), TEST in _split_folders(root)
    return {part: name for part, name in parts.items() if part != "test" or tested or parts["val"] == TEST}


def _parts(root: Path, data: DataConfig) -> dict[Part, str]:
    return named_parts([name for name in SPLIT_NAMES if (root / name).is_dir()], root, part_of(data, False))


def _split_folder(root: Path, data: DataConfig, part: Part) -> Path:
    parts = _parts(root, data)
    if part in parts:
        return root / parts[part]
    if part == "test":
        raise no_such_part(part, root)
    names = ("train",) if part == "train" else VALIDATION_NAMES
    expected = " or ".join(str(root / name) for name in names)
    raise UserError(f"DATA.DATA_PATH (-data_path): there is no folder {expected}. {LAYOUT.format(root=root)}")


def _class_names(root: Path, folder: Path) -> list[str]:
    """Class names in the order of their labels, from the training split if there is one."""
    train = root / "train"
    classes = subfolders(train if train.is_dir() else folder)
    if not classes:
        raise UserError(_no_images(train if train.is_dir() else folder, root))
    unknown = set(subfolders(folder)).difference(classes)
    if unknown:
        first = min(unknown)
        raise UserError(
            f"{folder / first}: the training split {train} has no class of that name.{nearest(first, classes)} "
            f"Every class in the {_title(folder)} must also be in the training split."
        )
    return classes


def _title(folder: Path) -> str:
    return TITLES["test" if folder.name == "test" else "val"]


def class_files(folder: Path, classes: list[str]) -> FileList:
    """All images in the class folders, in the order of class and path."""
    skipped = SkippedFiles()
    for entry in sorted(folder.glob(".*")):
        if entry.is_dir():
            skipped.add(entry.name, HIDDEN_FOLDER)
    by_class = [sorted(images_below(str(folder / name), skipped)) for name in classes]
    skipped.warn(str(folder))
    paths = [f"{name}/{path}" for name, of_class in zip(classes, by_class, strict=True) for path in of_class]
    labels = np.repeat(np.arange(len(classes)), [len(of_class) for of_class in by_class])
    return FileList(folder, paths, labels, classes)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, in order, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_folder_entry(entry) and not entry.name.startswith("."))


def _has_images(folder: Path) -> bool:
    return next(images_below(str(folder)), None) is not None


def _no_images(folder: Path, root: Path) -> str:
    kinds = " ".join(ENDINGS)
    return f"{folder} has no images in class folders (image files end in {kinds}). {LAYOUT.format(root=root)}"


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    root = data_folder(data)
    if _has_splits(root):
        return split_folder_samples(root, data, part, num_classes)
    return split_files(_unsplit_files(root, num_classes), data, part)


def _unsplit_files(root: Path, num_classes: int) -> FileList:
    classes = subfolders(root)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    return class_files(root, classes)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    root = data_folder(data)
    if _has_splits(root):
        _check_splits(root, data, num_classes, train)
        return
    for name in subfolders(root):
        if splits := _split_folders(root / name):
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {root} seems to be one folder too high: {root / name} has "
                f"class folders in {' and '.join(f'{split}/' for split in splits)}. Try -data_path {root / name}."
            )
    files = _unsplit_files(root, num_classes)
    if not files.paths:
        raise UserError(f"{_no_images(root, root)}\n{LAYOUT_WITHOUT_SPLITS.format(root=root)}")
    for name in sorted({*SPLIT_NAMES}.intersection(files.classes)):
        log.warning("%s is taken for a class, not for a split, because no folder in it has images.", root / name)
    log_unused_outputs(len(files.classes), num_classes, f"The data set in {root}")
    warn_empty_classes(files.labels, files.classes, str(root))
    split_files(files, data, parts_read(data, train, comes_unsplit(data))[-1])


def _check_splits(root: Path, data: DataConfig, num_classes: int, train: bool) -> None:
    try:
        check_split_folders(root, data, num_classes, train)
    except UserError as error:
        others = [name for name in subfolders(root) if name not in SPLIT_NAMES]
        splits = _split_folders(root)
        if not others or not splits:
            raise
        raise UserError(
            f"{error}\n{root / splits[0]} is taken for a split, not for a class beside {others[0]}, because folders in "
            "it have images. If it is a class, move the images out of its subfolders into it."
        ) from None


def _has_splits(root: Path) -> bool:
    """Whether folders called train, val and so on are splits. Train can also be a class, beside other class folders."""
    names = subfolders(root)
    return bool(_split_folders(root)) or (bool(names) and {*SPLIT_NAMES}.issuperset(names))


def _split_folders(root: Path) -> list[str]:
    """Folders with the name of a split and class folders that have images."""
    return [
        name
        for name in subfolders(root)
        if name in SPLIT_NAMES and any(_has_images(root / name / inner) for inner in subfolders(root / name))
    ]


def count_split_classes(root: Path, data: DataConfig, train: bool) -> int:
    """Number of class folders, of the training split if there is one."""
    part = parts_read(data, train, split_folders_of(root, data))[0]
    return len(_class_names(root, _split_folder(root, data, part)))


def _count(data: DataConfig, train: bool) -> int:
    root = data_folder(data)
    return count_split_classes(root, data, train) if _has_splits(root) else len(subfolders(root))


def layout_of(root: Path) -> str | None:
    """The class folders in `root`, in words; None if there are none with images."""
    if splits := _split_folders(root):
        return f"class folders in {' and '.join(f'{name}/' for name in splits)}"
    if any(_has_images(root / name) for name in subfolders(root)):
        return "class folders without train/ and val/"
    return None


def _parts_of_data(data: DataConfig) -> Parts:
    root = data_folder(data)
    return split_folders_of(root, data) if _has_splits(root) else comes_unsplit(data)


SOURCE = image_source(_samples, _check, count=_count, parts=_parts_of_data, groups=True)
