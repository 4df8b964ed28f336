"""Data sets that DATA.DATASET can name. A new source is one file with a SOURCE and one line here.

A layout of folders that people have is also recognised (recognise.py) and described in model cards.
"""

import importlib

import torch

from datasets.base import (
    CSV_PREFIX,
    HUB_PREFIX,
    UNSPLIT,
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
"""Name -> file and `Source` in it, below this folder. Only the data set that a run reads is imported."""


def names() -> list[str]:
    """Names of all data sets, in alphabetical order."""
    return sorted(PLACES)


def source_named(name: str) -> Source | None:
    """The data set of this name; None if the name is unknown, or one of the hub's."""
    name = "csv" if name.startswith(CSV_PREFIX) else name
    if name not in PLACES:
        return None
    file, _, variable = PLACES[name].partition(":")
    return getattr(importlib.import_module(f"datasets.{file}"), variable)


def open_dataset(
    data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device, world: World = ALONE
) -> ImageDataset:
    """Open the training or validation split of DATA.DATASET. In-memory data sets are put on `device`.

    `world`: ranks that open it together; those of a machine share the list of its files.
    """
    source = _source(data)
    dataset = _open(source, data, train, num_classes, seed, device, world)
    _check_fold(source, data)
    return dataset


def _open(
    source: Source, data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device, world: World
) -> ImageDataset:
    if source.open is not None:
        return source.open(data, train, num_classes, seed, device)
    part = part_of(data, train)
    cropped = source.arrays == "cropped"

    def opened(part: Part) -> Samples:
        assert source.samples is not None, "a source has one of the two"
        samples = source.samples(data, part, num_classes)
        samples.most_bytes = data.MAX_IMAGE_BYTES
        return samples

    # Random crops of arrays, too, are made one image at a time, in loading processes.
    if source.arrays is not None and not (train and cropped and data.CROP == "random"):
        from datasets.memory import ArraySamples, InMemory

        samples = opened(part)
        assert isinstance(samples, ArraySamples)
        return InMemory(samples, data, train, seed, device, cropped)
    from datasets.images import Images, Joined

    parts = source.parts(data) if part == "all" else UNSPLIT
    if "all" not in parts:
        samples = Joined([opened(one) for one in distinct(parts)])
    elif source.shares_list and world.size > 1:
        from datasets.sources.shared import listed_once

        samples = listed_once(lambda: opened(part), world)
    else:
        samples = opened(part)
    samples.machines = world.machines
    samples.by_machine = train and data.SAMPLER == "by_machine"
    return Images(samples, data, train, seed)


def open_test(data: DataConfig) -> Samples | None:
    """The test split, to look at it; None without one of its own, and, with a warning, if it cannot be opened."""
    if "test" not in distinct(_named(data).parts(data)) or data.PART not in (AUTO, "val"):
        return None
    try:
        data = data.changed(PART="test")
        return open_dataset(data, False, ANY_LABEL, 0, torch.device("cpu")).single_images()
    except UserError as error:
        warn_once(f"The test split is not checked: {error}")
        return None


def count_classes(data: DataConfig, train: bool) -> int:
    """Number of classes of a split of DATA.DATASET, which is downloaded first if DATA.DOWNLOAD is set."""
    source = _source(data)
    try:
        if source.count is not None:
            return source.count(data, train)
        # None of these takes a class away: of folds, all images count.
        whole = {"FOLD": None, "PART": "all"} if data.FOLD else {}
        given = data.changed(RELABEL=None, EXCLUDE=None, **whole)
        split = _open(source, given, train and not whole, ANY_LABEL, 0, torch.device("cpu"), ALONE)
    except UserError as error:
        from datasets.recognise import offering_layout

        raise offering_layout(error, data) from None
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
    _check_lists(source, data, train)
    if source.arrays is None:
        from datasets.decoding import warn_of_decoder

        warn_of_decoder()
    elif not data.is_plain:
        raise UserError(f"DATA.BITS, DATA.IMAGE_CHANNELS: {data.DATASET} has 8-bit images of 1 or 3 channels.")
    if data.DOWNLOAD and not source.fetches:
        log.warning("DATA.DOWNLOAD has no effect on the data set %s: it cannot be downloaded.", data.DATASET)
    unread = unread_path(data)
    if unread:
        log.warning("%s", unread)
    if data.COLUMNS is not None and data.DATASET.partition(":")[0] != "csv":
        raise UserError(f"DATA.COLUMNS {data.COLUMNS}: the data set {source_of(data)} is no csv table; leave it out.")
    try:
        if source.check is not None:
            source.check(data, num_classes, train)
        elif source.samples is not None:
            parts = parts_read(data, train, source.parts(data))
            of_parts = [source.samples(data, part, num_classes).classes for part in parts]
            classes = of_parts[0]
            if classes is not None:
                log_unused_outputs(len(classes), num_classes, f"The data set {data.DATASET}")
    except UserError as error:
        from datasets.recognise import offering_layout

        raise offering_layout(error, data) from None
    _check_fold(source, data)


def _check_lists(source: Source, data: DataConfig, train: bool) -> None:
    """Check the files of DATA.EXCLUDE and DATA.RELABEL."""
    if data.EXCLUDE is not None:
        from datasets.exclude import excluded

        excluded(data)
    if data.RELABEL is not None and part_of(data, train) == "train":
        from datasets.exclude import read_rows

        if source.samples is None or source.arrays is not None or not source.labelled:
            why = "is held in memory: its images have no names" if source.labelled else "has no labels"
            raise UserError(f"DATA.RELABEL {data.RELABEL}: the data set {data.DATASET} {why}. Leave DATA.RELABEL out.")
        read_rows(data)


def unread_path(data: DataConfig) -> str:
    """What is wrong with DATA_PATH if the data set is not read from it; else ''."""
    if data.DATA_PATH is None or _named(data).reads_path:
        return ""
    return (
        f"DATA.DATA_PATH (-data_path) {data.DATA_PATH} is not used: the data set {data.DATASET} is not read from it. "
        "To use the images there, name their layout, as in -dataset imagefolder; else leave it out."
    )


def warn_of_splits(data: DataConfig, train: Samples | None, validation: Samples | None, *knn: Samples | None) -> None:
    """Warn of what shows only once both splits are open. None stands for a split in memory. `knn`: of TRAIN.KNN."""
    if data.EXCLUDE is not None:
        from datasets.exclude import report_excluded

        report_excluded(data, (train, validation, open_test(data), *knn))
    if data.RELABEL is not None and train is not None:
        from datasets.exclude import warn_unmatched_rows

        warn_unmatched_rows(data, train, validation)


def comes_unsplit(data: DataConfig) -> bool:
    """Whether the data comes without a validation split, so that DATA.VAL_FRACTION or DATA.FOLD makes one."""
    return _named(data).is_unsplit(data)


def validates_on_test(data: DataConfig) -> bool:
    """Whether the split test of the data is used for validation, because it has no other."""
    parts = _named(data).parts(data)
    return "test" in parts and parts["test"] == parts.get("val")


def has_test(data: DataConfig) -> bool:
    """Whether the data has a split test that is not used for validation."""
    return "test" in distinct(_named(data).parts(data))


def has_labels(data: DataConfig) -> bool:
    """Whether the data has labels that mean something."""
    return _named(data).labelled


def source_of(data: DataConfig) -> str:
    """The data set, and where it is read from, for messages."""
    return f"{data.DATASET} in {data.DATA_PATH}" if data.DATA_PATH and _named(data).reads_path else data.DATASET


def _check_fold(source: Source, data: DataConfig) -> None:
    if data.GROUP is not None and not source.groups:
        raise UserError(f"DATA.GROUP {data.GROUP}: the data set {source_of(data)} names no groups. Leave it out.")
    if data.fold is not None and not source.is_unsplit(data):
        instead = ", or make folds of train by DATA.KEEP_TEST=true" if validates_on_test(data) else ""
        raise UserError(
            f"DATA.FOLD {data.fold}: the data set {source_of(data)} comes with its own validation split. Leave "
            f"DATA.FOLD out{instead}, or use data that names no splits: class folders alone, one csv file, or tar "
            "files."
        )


def _source(data: DataConfig) -> Source:
    source = _named(data)
    if data.MULTI_LABEL and not source.multi_label:
        sources = {name: source_named(name) for name in names()}
        multi = [name for name, other in sources.items() if other and other.multi_label]
        raise UserError(
            f"DATA.MULTI_LABEL: the data set {data.DATASET} has one label per image. Use a data set with several: "
            f"{', '.join(multi)}; see docs/several_labels.md."
        )
    return source


def _named(data: DataConfig) -> Source:
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
    """Whether validation squeezes the whole image instead of cropping its centre."""
    source = source_named(data.DATASET)
    return data.CROP == "none" or (source is not None and source.arrays == "whole")


def crop_of(data: DataConfig) -> tuple[str, float]:
    """How validation crops, in timm's words: `crop_mode` and `crop_pct`."""
    return ("squash", 1.0) if squeezes(data) else (data.CROP_MODE, data.CROP_PCT)
