"""Data sets that DATA.DATASET can name. A new source is one file with a SOURCE and one line here."""

from __future__ import annotations

import torch

from datasets.base import ImageDataset, Source
from datasets.damage.exclude import check_exclude
from datasets.decoding.reader import check_decoder
from datasets.labels import ANY_LABEL, check_gaps
from datasets.recognise import offering_layout
from datasets.shards import hub
from datasets.shards import source as shards
from datasets.sources import (
    caltech,
    cifar,
    csv_table,
    digits,
    imagefolder,
    imagenet2012,
    synthetic,
)
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log

SOURCES: dict[str, Source] = {
    "caltech101": caltech.CALTECH101,
    "caltech256": caltech.CALTECH256,
    "cifar10": cifar.CIFAR10,
    "cifar100": cifar.CIFAR100,
    "csv": csv_table.SOURCE,
    "digits": digits.SOURCE,
    "imagefolder": imagefolder.SOURCE,
    "imagenet2012": imagenet2012.SOURCE,
    "shards": shards.SOURCE,
    "synthetic": synthetic.SOURCE,
}

ON_HUB = {"flowers102": "hf:OWNER/NAME", "food101": "hf:ethz/food101", "pets": "hf:timm/oxford-iiit-pet"}
"""Retired data sets -> the data set that has the same images"""


def names() -> list[str]:
    """Names of all data sets, in alphabetical order."""
    return sorted(SOURCES)


def open_dataset(data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> ImageDataset:
    """Open the training or validation split of DATA.DATASET. In-memory data sets are put on `device`."""
    source = _source(data)
    dataset = source.open(data, train, num_classes, seed, device)
    _check_fold(source, data)
    return dataset


def count_classes(data: DataConfig, train: bool) -> int:
    """Number of classes of a split of DATA.DATASET, which is downloaded first if DATA.DOWNLOAD is set."""
    source = _source(data)
    if source.fetches and data.DOWNLOAD:
        source.check(data, ANY_LABEL, train)
    with offering_layout(data):
        if source.count is not None:
            return source.count(data, train)
        split = source.open(data, train, ANY_LABEL, 0, torch.device("cpu"))
    samples = split.single_images()
    if split.classes is None and samples is not None:
        if data.MULTI_LABEL:
            return samples.labels.shape[1]
        check_gaps(samples.labels, samples.name)
        return int(samples.labels.max()) + 1
    return len(split.classes or ())


def check_dataset(data: DataConfig, num_classes: int, train: bool = True) -> None:
    """Raise UserError for problems that show without opening an image. Quick: it runs before processes start.

    `train=False`: check the validation split alone, for a run that only evaluates.
    """
    source = _source(data)
    check_exclude(data)
    check_decoder(data)
    if data.DOWNLOAD and not source.fetches:
        log.warning("DATA.DOWNLOAD has no effect on the data set %s: it cannot be downloaded.", data.DATASET)
    if data.DATA_PATH is not None and not source.reads_path:
        log.warning(
            "DATA.DATA_PATH %s is not used: the data set %s is not read from it. To use the images there, name their "
            "layout, as in -dataset imagefolder.",
            data.DATA_PATH,
            data.DATASET,
        )
    with offering_layout(data):
        source.check(data, num_classes, train)
    _check_fold(source, data)


def comes_unsplit(data: DataConfig) -> bool:
    """Whether the data comes without a validation split, so that DATA.VAL_FRACTION or DATA.FOLD makes one."""
    return _named(data).is_unsplit(data)


def validates_on_test(data: DataConfig) -> bool:
    """Whether the split test of the data is used for validation, because it has no other."""
    return _named(data).tests(data)


def source_of(data: DataConfig) -> str:
    """The data set, and where it is read from, for messages."""
    return f"{data.DATASET} in {data.DATA_PATH}" if data.DATA_PATH and _named(data).reads_path else data.DATASET


def _check_fold(source: Source, data: DataConfig) -> None:
    if data.fold is not None and not source.is_unsplit(data):
        where = "" if data.DATA_PATH is None else f" in {data.DATA_PATH}"
        raise UserError(
            f"DATA.FOLD {data.fold}: the data set {data.DATASET}{where} comes with its own validation split, and folds "
            "would mix it with the training images. Leave DATA.FOLD out, or use a data set without splits: class "
            "folders alone, one csv file, or tar files named neither train nor val."
        )


def _source(data: DataConfig) -> Source:
    source = _named(data)
    if data.MULTI_LABEL and not source.multi_label:
        able = ", ".join([*(name for name in names() if SOURCES[name].multi_label), f"{hub.PREFIX}NAME"])
        raise UserError(
            f"DATA.MULTI_LABEL: the data set {data.DATASET} has one label per image. Use a data set with several: "
            f"{able} (shards only as a copy that hf:NAME made); see docs/data.md."
        )
    return source


def _named(data: DataConfig) -> Source:
    if data.DATASET.startswith(hub.PREFIX):
        return hub.SOURCE
    if data.DATASET in ON_HUB:
        raise UserError(
            f"DATA.DATASET {data.DATASET} is retired: the Hugging Face Hub has it. Use -dataset {ON_HUB[data.DATASET]} "
            f"DATA.DOWNLOAD=true. Version 0.1.0 of vitamp is the last that has it."
        )
    if data.DATASET not in SOURCES:
        raise UserError(
            f"DATA.DATASET (-dataset): unknown data set {data.DATASET!r}.{nearest(data.DATASET, SOURCES)} "
            f"Known data sets: {', '.join(names())}, and hf:NAME_OR_PATH."
        )
    return SOURCES[data.DATASET]
