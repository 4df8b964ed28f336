"""The table of data sets that DATA.DATASET can name, and how to open one. A new source is one file and one line here.

A layout of folders that people have is also recognised (recognise.py) and described in model cards.
"""

import importlib
from typing import Any

import torch

from datasets.base import (
    CSV_PREFIX,
    HUB_PREFIX,
    ImageDataset,
    Part,
    Samples,
    Source,
    distinct,
    part_of,
    parts_read,
)
from datasets.labels import ANY_LABEL, check_gaps, log_unused_outputs
from utils.config.data import DataConfig
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE, World
from utils.errors import UserError, nearest
from utils.log import log, warn_once
from vitamp.registry import own_named

PLACES = {
    "caltech101": "sources.published:CALTECH101",
    "caltech256": "sources.published:CALTECH256",
    "cifar10": "sources.published:CIFAR10",
    "cifar100": "sources.published:CIFAR100",
    "csv": "sources.csv_table:SOURCE",
    "digits": "sources.digits:SOURCE",
    "imagefolder": "sources.imagefolder:SOURCE",
    "imagenet2012": "sources.imagenet2012:SOURCE",
    "images": "sources.unlabelled:SOURCE",
    "shards": "shards.source:SOURCE",
    "synthetic": "sources.synthetic:SOURCE",
}
"""Name -> file below this folder, and the `Source` in it. Only the data set that a run reads is imported."""


def names() -> list[str]:
    """List the names of all data sets, in alphabetical order."""
    return sorted(PLACES)


def source_named(name: str) -> Source | None:
    """Import the source of this name from PLACES; None for other names, such as those of the hub and of own code."""
    key = "csv" if name.startswith(CSV_PREFIX) else name
    if key not in PLACES:
        return None
    module, _, variable = PLACES[key].partition(":")
    return getattr(importlib.import_module(f"datasets.{module}"), variable)


def open_dataset(
    data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device, world: World = ALONE
) -> ImageDataset:
    """Open the training split of DATA.DATASET, or with `train=False` the split that DATA.PART names.

    In-memory data sets are put on `device`. `world`: ranks that open it together; those of a machine share the list of
    its files.
    """
    source = _checked_source(data)
    dataset = _open(source, data, train, num_classes, seed, device, world)
    _check_fold(source, data)
    return dataset


def _open(
    source: Source, data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device, world: World
) -> ImageDataset:
    """Open a split of a source: in memory, or with images that are read one by one.

    Opens the training split, or else the one that DATA.PART names. The ranks of `world` open it together.
    """
    if source.open is not None:
        return source.open(data, train, num_classes, seed, device)
    part = part_of(data, train)
    cropped = source.arrays == "cropped"  # or "whole"; None if images are not arrays

    def open_part(part: Part) -> Samples:
        assert source.samples is not None, "a source has `open` or `samples`"
        samples = source.samples(data, part, num_classes)
        samples.most_bytes = data.MAX_IMAGE_BYTES
        return samples

    # Arrays stay in memory, unless they get random crops, which are made image by image in loading processes.
    has_random_crops = train and cropped and data.CROP == "random"
    if source.arrays is not None and not has_random_crops:
        from datasets.memory import ArraySamples, InMemory

        samples = open_part(part)
        assert isinstance(samples, ArraySamples)
        return InMemory(samples, data, train, seed, device, cropped)
    from datasets.images import Images, Joined

    # All images of a data set that comes with splits are its splits, one after the other.
    if part == "all" and not source.is_unsplit(data):
        samples = Joined([open_part(stored_part) for stored_part in distinct(source.parts(data))])
    elif source.shares_list and world.size > 1:  # one rank of each machine lists the images for its other ranks
        from datasets.sources.shared import listed_once

        samples = listed_once(lambda: open_part(part), world)
    else:
        samples = open_part(part)
    samples.machines = world.machines
    samples.by_machine = train and data.SAMPLER == "by_machine"
    return Images(samples, data, train, seed)


def open_test(data: DataConfig) -> Samples | None:
    """Open the test split to check its images; None if there is none, or with a warning if it cannot be opened.

    The result is also None if the test split is used for validation, or if DATA.PART names another split to evaluate.
    """
    if not has_test(data) or data.PART not in (AUTO, "val"):
        return None
    try:
        data_of_test = data.changed(PART="test")
        dataset = open_dataset(data_of_test, train=False, num_classes=ANY_LABEL, seed=0, device=torch.device("cpu"))
        return dataset.single_images()
    except UserError as error:
        warn_once(f"The test split is not checked: {error}")
        return None


def count_classes(data: DataConfig, train: bool) -> int:
    """Count the classes of a split of DATA.DATASET, which is downloaded first if DATA.DOWNLOAD is set.

    Images that DATA.EXCLUDE, DATA.RELABEL or DATA.FOLD take away still count, so that no class is lost by them.
    """
    source = _checked_source(data)
    try:
        if source.count is not None:
            return source.count(data, train)
        changes: dict[str, Any] = {"RELABEL": None, "EXCLUDE": None}
        if data.FOLD:
            # Count the classes of all images. DATA.PART chooses the split of an evaluation only, so open it for one.
            changes |= {"FOLD": None, "PART": "all"}
            train = False
        device = torch.device("cpu")
        split = _open(source, data.changed(**changes), train, num_classes=ANY_LABEL, seed=0, device=device, world=ALONE)
    except UserError as error:
        from datasets.recognise import offering_layout

        raise offering_layout(error, data) from None
    if split.classes is not None:
        return len(split.classes)
    # Classes without names are counted by the labels of the images.
    samples = split.single_images()
    if samples is None:
        return 0
    if data.MULTI_LABEL:
        return samples.labels.shape[1]
    check_gaps(samples.labels, samples.name)
    return int(samples.labels.max()) + 1


def check_dataset(data: DataConfig, num_classes: int, train: bool = True) -> None:
    """Raise UserError for problems that show without opening an image. It is quick, and runs before processes start.

    `train=False`: check only the split to evaluate, for a run that does not train.
    """
    source = _checked_source(data)
    _check_lists(source, data, train)
    if source.arrays is None:  # images are files, which have to be decoded
        from datasets.decoding import warn_of_decoder

        warn_of_decoder()
    elif not data.is_plain:
        raise UserError(f"DATA.BITS, DATA.IMAGE_CHANNELS: {data.DATASET} has 8-bit images of 1 or 3 channels.")
    if data.DOWNLOAD and not source.fetches:
        log.warning("DATA.DOWNLOAD has no effect on the data set %s: it cannot be downloaded.", data.DATASET)
    warning = unread_path(data)
    if warning:
        log.warning("%s", warning)
    if data.COLUMNS is not None and data.DATASET.partition(":")[0] != "csv":
        raise UserError(f"DATA.COLUMNS {data.COLUMNS}: the data set {source_of(data)} is no csv table; leave it out.")
    try:
        if source.check is not None:
            source.check(data, num_classes, train)
        elif source.samples is not None:
            parts = parts_read(data, train, source.parts(data))
            # All splits are listed, for their errors. The first one has the classes.
            classes_of_parts = [source.samples(data, part, num_classes).classes for part in parts]
            classes = classes_of_parts[0]
            if classes is not None:
                log_unused_outputs(len(classes), num_classes, f"The data set {data.DATASET}")
    except UserError as error:
        from datasets.recognise import offering_layout

        raise offering_layout(error, data) from None
    _check_fold(source, data)


def _check_lists(source: Source, data: DataConfig, train: bool) -> None:
    """Raise UserError if the file DATA.EXCLUDE or DATA.RELABEL cannot be read, or if DATA.RELABEL cannot be applied.

    DATA.RELABEL needs images with names, so none in memory, and with labels.
    """
    if data.EXCLUDE is not None:
        from datasets.exclude import excluded

        excluded(data)
    if data.RELABEL is not None and part_of(data, train) == "train":
        from datasets.exclude import read_rows

        in_memory = source.samples is None or source.arrays is not None
        if in_memory or not source.labelled:
            reason = "is held in memory: its images have no names" if source.labelled else "has no labels"
            raise UserError(
                f"DATA.RELABEL {data.RELABEL}: the data set {data.DATASET} {reason}. Leave DATA.RELABEL out."
            )
        read_rows(data)


def unread_path(data: DataConfig) -> str:
    """Warn that the data set is not read from DATA_PATH; '' if it is, or if DATA_PATH is not set."""
    if data.DATA_PATH is None or _source(data).reads_path:
        return ""
    return (
        f"DATA.DATA_PATH (-data_path) {data.DATA_PATH} is not used: the data set {data.DATASET} is not read from it. "
        "To use the images there, name their layout, as in -dataset imagefolder; else leave it out."
    )


def warn_of_splits(data: DataConfig, train: Samples | None, validation: Samples | None, *knn: Samples | None) -> None:
    """Report what DATA.EXCLUDE and DATA.RELABEL did, which shows only once the splits are open.

    None stands for a split in memory. `knn`: the splits of labelled images that TRAIN.KNN reads. DATA.EXCLUDE may
    also list images of the test split, so it is opened for the report. DATA.RELABEL changes training images only.
    """
    if data.EXCLUDE is not None:
        from datasets.exclude import report_excluded

        report_excluded(data, (train, validation, open_test(data), *knn))
    if data.RELABEL is not None and train is not None:
        from datasets.exclude import warn_unmatched_rows

        warn_unmatched_rows(data, train, validation)


def comes_unsplit(data: DataConfig) -> bool:
    """Tell whether the data comes without a validation split, so that DATA.VAL_FRACTION or DATA.FOLD makes one."""
    return _source(data).is_unsplit(data)


def validates_on_test(data: DataConfig) -> bool:
    """Tell whether the data's test split is used for validation, because there is no other."""
    parts = _source(data).parts(data)
    return "test" in parts and parts["test"] == parts.get("val")


def has_test(data: DataConfig) -> bool:
    """Tell whether the data has a test split that is not used for validation."""
    return "test" in distinct(_source(data).parts(data))


def has_labels(data: DataConfig) -> bool:
    """Tell whether the data has labels; those of images alone are placeholders."""
    return _source(data).labelled


def source_of(data: DataConfig) -> str:
    """Name the data set, and where it is read from, for messages."""
    if data.DATA_PATH and _source(data).reads_path:
        return f"{data.DATASET} in {data.DATA_PATH}"
    return data.DATASET


def _check_fold(source: Source, data: DataConfig) -> None:
    """Raise UserError if DATA.GROUP or DATA.FOLD is set for a data set that cannot be split by it."""
    if data.GROUP is not None and not source.groups:
        raise UserError(f"DATA.GROUP {data.GROUP}: the data set {source_of(data)} names no groups. Leave it out.")
    if data.fold is not None and not source.is_unsplit(data):
        alternative = ", or make folds of train by DATA.KEEP_TEST=true" if validates_on_test(data) else ""
        raise UserError(
            f"DATA.FOLD {data.fold}: the data set {source_of(data)} comes with its own validation split. Leave "
            f"DATA.FOLD out{alternative}, or use data that names no splits: class folders alone, one csv file, or tar "
            "files."
        )


def _checked_source(data: DataConfig) -> Source:
    """Return the source of DATA.DATASET; UserError if it does not have the several labels of DATA.MULTI_LABEL."""
    source = _source(data)
    if data.MULTI_LABEL and not source.multi_label:
        sources = {name: source_named(name) for name in names()}
        with_several_labels = [name for name, candidate in sources.items() if candidate and candidate.multi_label]
        raise UserError(
            f"DATA.MULTI_LABEL: the data set {data.DATASET} has one label per image. Use a data set with several: "
            f"{', '.join(with_several_labels)}; see docs/several_labels.md."
        )
    return source


def _source(data: DataConfig) -> Source:
    """Return the source of DATA.DATASET: one of the hub, of PLACES, or of own code. UserError for an unknown name."""
    if data.DATASET.startswith(HUB_PREFIX):
        from datasets.shards import hub

        return hub.SOURCE
    source = source_named(data.DATASET)
    if source is not None:
        return source
    own = own_named("dataset", data.DATASET)
    if own:
        from datasets.sources.own import source_of_own

        return source_of_own(own)
    raise UserError(
        f"DATA.DATASET (-dataset): unknown data set {data.DATASET!r}.{nearest(data.DATASET, PLACES)} "
        f"Known data sets: {', '.join(names())}, and hf:NAME_OR_PATH. One of your own needs its file: -use FILE."
    )


def squeezes(data: DataConfig) -> bool:
    """Tell whether validation squeezes the whole image into the model's size instead of cropping its centre."""
    source = source_named(data.DATASET)
    return data.CROP == "none" or (source is not None and source.arrays == "whole")


def crop_of(data: DataConfig) -> tuple[str, float]:
    """Return how validation crops, as timm's `crop_mode` and `crop_pct`."""
    return ("squash", 1.0) if squeezes(data) else (data.CROP_MODE, data.CROP_PCT)
