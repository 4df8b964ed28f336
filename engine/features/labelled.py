"""Images with labels by which features are judged: training images, which vote, and those to classify."""

from __future__ import annotations

import os

import torch

from datasets import ImageDataset, check_dataset, count_classes, has_labels, names, open_dataset, source_of
from datasets.base import TITLES
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.keys import default_of
from utils.errors import UserError

OF_OWN_DATA = ("DATA.EXCLUDE", "DATA.FOLD", "DATA.GROUP")
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
    """The images of TRAIN.KNN, as DATA describes images. Other images than the run's get no settings of OF_OWN_DATA.

    DATA.EXCLUDE stays, since this run reads both: unlabelled `images` and the class folders of k-NN can be one folder,
    and a broken image that only k-NN reads must be excludable too.
    """
    name, path = _place_of_knn(config.TRAIN.KNN or "")
    data = config.DATA.model_copy(update={"DATASET": name, "DATA_PATH": path, "PART": "val"})
    if place_of(data) == place_of(config.DATA):
        return data
    fitting = [key for key in OF_OWN_DATA if key != "DATA.EXCLUDE"]
    return data.model_copy(update={key.removeprefix("DATA."): default_of(key) for key in fitting})


def _place_of_knn(text: str) -> tuple[str, str | None]:
    """Name of the data set and its folder; without a name, the layout of the folder is recognised."""
    name, found, path = text.partition("=")
    if found:
        return name, path
    if text in names() or text.startswith("hf:"):
        return text, None
    from datasets.recognise import recognise

    try:
        layout = recognise(text)
    except UserError as error:
        raise UserError(f"The images of TRAIN.KNN: {error}") from None
    if layout is None:
        raise UserError(f"TRAIN.KNN {text}: no such folder, file or data set.")
    return layout[0], text


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
