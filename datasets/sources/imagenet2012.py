"""`imagenet2012`: train_list.txt and val_list.txt beside the images, or the plain class folders of ImageNet."""

from __future__ import annotations

from pathlib import Path

import torch

from datasets.base import ImageDataset, Source
from datasets.images import Images
from datasets.sources.files import FileSamples, check_list, data_folder, read_list
from datasets.sources.imagefolder import VALIDATION_NAMES, check_folders, open_folders
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.files import kind_of_path

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
LAYOUT = """Expected layout:
  {root}/train_list.txt    lines like: train/n01440764/n01440764_10026.JPEG 0
  {root}/val_list.txt      lines like: val/ILSVRC2012_val_00000001.JPEG 65
  {root}/train/..., {root}/val/...    the images
or, without list files, class folders:
  {root}/train/<class>/image.JPEG
  {root}/val/<class>/image.JPEG"""


def _open(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> ImageDataset:
    root = data_folder(data)
    if not _has_lists(root):
        return open_folders(data, train, num_classes, seed, device)
    paths, labels = read_list(_list_file(root, train), num_classes)
    return Images(FileSamples(root, paths, labels, None), data, train, seed)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    root = data_folder(data)
    if not _has_lists(root):
        check_folders(data, num_classes, train)
        return
    for training in [True, False] if train else [False]:
        check_list(_list_file(root, training), num_classes)


def _has_lists(root: Path) -> bool:
    """Lists go before folders. A data set with neither is reported by its lists, the layout this one is known for."""
    if any((root / name).is_file() for name in (TRAIN_LIST, VAL_LIST)):
        return True
    if any((root / name).is_dir() for name in ("train", *VALIDATION_NAMES)):
        return False
    raise UserError(_missing(root, TRAIN_LIST))


def _list_file(root: Path, train: bool) -> Path:
    name = TRAIN_LIST if train else VAL_LIST
    if not (root / name).is_file():
        raise UserError(_missing(root, name))
    return root / name


def _missing(root: Path, name: str) -> str:
    kind = kind_of_path(root / name)
    there = f"{root / name} is {kind}, not a file" if kind else f"there is no file {root / name}"
    return f"DATA.DATA_PATH (-data_path): {there}. {LAYOUT.format(root=root)}"


SOURCE = Source(_open, _check)
