"""`imagenet2012`: train_list.txt and val_list.txt beside the images, or ImageNet's class folders."""

from __future__ import annotations

from pathlib import Path

from datasets.images import image_source
from datasets.labels import ANY_LABEL
from datasets.sources.files import FileSamples, check_list, data_folder, no_file, read_list
from datasets.sources.imagefolder import (
    VALIDATION_NAMES,
    check_split_folders,
    count_split_classes,
    split_folder_samples,
)
from utils.config.data import DataConfig
from utils.errors import UserError

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
LAYOUT = """Expected layout:
  {root}/train_list.txt    lines like: train/n01440764/n01440764_10026.JPEG 0
  {root}/val_list.txt      lines like: val/ILSVRC2012_val_00000001.JPEG 65
  {root}/train/..., {root}/val/...    the images
or, without list files, class folders:
  {root}/train/<class>/image.JPEG
  {root}/val/<class>/image.JPEG"""


def _samples(data: DataConfig, train: bool, num_classes: int) -> FileSamples:
    root = data_folder(data)
    if not _has_lists(root):
        return split_folder_samples(root, train, num_classes)
    paths, labels = read_list(_list_file(root, train), num_classes)
    return FileSamples(root, paths, labels, None)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    root = data_folder(data)
    if not _has_lists(root):
        check_split_folders(root, num_classes, train)
        return
    for training in [True, False] if train else [False]:
        check_list(_list_file(root, training), num_classes)


def _has_lists(root: Path) -> bool:
    """Whether the data set has list files, which take precedence over folders; UserError if it has neither."""
    if any((root / name).is_file() for name in (TRAIN_LIST, VAL_LIST)):
        return True
    if any((root / name).is_dir() for name in ("train", *VALIDATION_NAMES)):
        return False
    raise _missing(root / TRAIN_LIST)


def _list_file(root: Path, train: bool) -> Path:
    file = root / (TRAIN_LIST if train else VAL_LIST)
    if not file.is_file():
        raise _missing(file)
    return file


def _missing(file: Path) -> UserError:
    return UserError(f"DATA.DATA_PATH (-data_path): {no_file(file)}. {LAYOUT.format(root=file.parent)}")


def _count(data: DataConfig, train: bool) -> int:
    root = data_folder(data)
    if not _has_lists(root):
        return count_split_classes(root, train)
    return int(read_list(_list_file(root, train), ANY_LABEL)[1].max()) + 1


SOURCE = image_source(_samples, _check, count=_count)
