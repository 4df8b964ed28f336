"""Images with labels by which features are judged: training images, which vote, and those to classify."""

from __future__ import annotations

import os

import torch

from datasets import ImageDataset, check_dataset, count_classes, has_labels, open_dataset, source_of
from datasets.base import TITLES
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.keys import default_of
from utils.errors import UserError

OF_OWN_DATA = ("DATA.EXCLUDE", "DATA.FOLD", "DATA.GROUP", "DATA.LISTING")
"""Settings that fit the run's own data alone."""


def place_of(data: DataConfig) -> str:
    """The data set and the real path that it is read from."""
    path = data.DATA_PATH
    if path is not None and "://" not in path:
        data = data.model_copy(update={"DATA_PATH": os.path.realpath(os.path.expanduser(path))})
    try:
        return source_of(data)
    except UserError:  # an unknown name of a data set, such as that of a folder that was not exported
        return data.DATASET


def labelled_data(config: Config) -> DataConfig:
    """The images of TRAIN.KNN, as DATA describes images. Other images than the run's get no settings of OF_OWN_DATA."""
    knn = config.TRAIN.KNN
    changes = {"DATASET": knn.DATASET, "DATA_PATH": knn.DATA_PATH, "PART": "val"}
    data = config.DATA.model_copy(update=changes)
    if place_of(data) == place_of(config.DATA):
        return data
    return data.model_copy(update={key.removeprefix("DATA."): default_of(key) for key in OF_OWN_DATA})


def open_labelled(
    data: DataConfig, count: int, seed: int, device: torch.device, setting: str, do: str
) -> tuple[ImageDataset, ImageDataset]:
    """Training images, and those of DATA.PART, which need not have the labels of any model.

    `count`: of neighbours. `setting` asked for it; `do`: what names other images.
    """
    if data.MULTI_LABEL:
        raise UserError(f"{setting}: needs one label per image; this data has several (DATA.MULTI_LABEL).")
    if not has_labels(data):
        raise UserError(f"{setting}: {source_of(data)} has no labels. Name images with labels, as in {do}.")
    classes = count_classes(data, train=True)
    check_dataset(data, classes)
    bank, images = (
        open_dataset(one, False, classes, seed, device) for one in (data.model_copy(update={"PART": "train"}), data)
    )
    if count > len(bank):
        raise UserError(f"{setting} {count}: {source_of(data)} has only {len(bank):,} training images.")
    if not len(images):
        raise UserError(f"{setting}: {source_of(data)}, {TITLES[data.PART]}: the split has no images.")
    return bank, images
