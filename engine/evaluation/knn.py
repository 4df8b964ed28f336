"""k-NN: classifies images by the training images with the most similar features, of which only batches fit in memory.

TRAIN.KNN measures so at each validation of a model that learns without labels; evaluate.py -knn does after training.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import ImageDataset, ValLoader, check_dataset, count_classes, has_labels, names, open_dataset, source_of
from datasets.base import TITLES
from datasets.loading.order import whole_batches
from datasets.registry import squeezes
from engine.amp.precision import Precision
from engine.machine.late_compiler import uncompiled
from engine.parallel.shards import is_sharded
from engine.task.base import sum_type_of
from models.parts import in_eval_mode
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.keys import deciding, default_of, nested
from utils.distributed.world import ALONE, World, broadcast, sum_over_ranks
from utils.errors import UserError
from utils.log import DETAIL, log
from vitamp.metrics import always_guessing
from vitamp.pooling import POOLED, pooled_features
from vitamp.registry import own_named

OF_OWN_DATA = deciding("images", "training images", "split")
"""Settings that fit the run's own data alone."""


def place_of(data: DataConfig) -> str:
    """The data set and the real path that it is read from."""
    path = data.DATA_PATH
    if path is not None and "://" not in path:
        data = data.changed(DATA_PATH=os.path.realpath(os.path.expanduser(path)))
    try:
        return source_of(data)
    except UserError:  # an unknown name of a data set, such as that of a folder that was not exported
        return data.DATASET


def labelled_data(config: Config) -> DataConfig:
    """The images of TRAIN.KNN, as DATA describes images. Other images than the run's get no settings of OF_OWN_DATA.

    DATA.EXCLUDE stays, since this run reads both: unlabelled `images` and the class folders of k-NN can be one folder,
    and a broken image that only k-NN reads must be excludable too.
    """
    text = config.TRAIN.KNN or ""
    name, named, path = text.partition("=")
    named = named and not os.path.exists(os.path.expanduser(text))
    if not named and (text in names() or own_named("dataset", text) or text.startswith("hf:")):
        path = None
    elif not named:
        from datasets.recognise import recognise

        try:
            layout = recognise(text)
        except UserError as error:
            raise UserError(f"The images of TRAIN.KNN: {error}") from None
        if layout is None:
            raise UserError(f"TRAIN.KNN {text}: no such folder, file or data set.")
        name = layout[0]
        path = text
    data = config.DATA.changed(DATASET=name, DATA_PATH=path, PART="val")
    if place_of(data) == place_of(config.DATA):
        return data
    own = {"DATA.CROP": "none"} if squeezes(config.DATA) else {}  # as of digits, whatever CROP is
    own |= {key: default_of(key) for key in OF_OWN_DATA if key != "DATA.EXCLUDE"}
    return data.changed(**nested(own)["DATA"])


def open_labelled(
    data: DataConfig, count: int, seed: int, device: torch.device, setting: str, do: str, several: bool = False
) -> tuple[ImageDataset, ImageDataset]:
    """Training images, and those of DATA.PART, which need not have the labels of any model.

    `count`: of neighbours. `setting` asked for it; `do`: what names other images. `several`: labels are possible.
    """
    if data.MULTI_LABEL and not several:
        raise UserError(f"{setting}: needs one label per image; this data has several (DATA.MULTI_LABEL).")
    if not has_labels(data):
        raise UserError(f"{setting}: {source_of(data)} has no labels. Name images with labels, as in {do}.")
    classes = count_classes(data, train=True)
    check_dataset(data, classes)
    bank, images = (open_dataset(one, False, classes, seed, device) for one in (data.changed(PART="train"), data))
    if count > len(bank) and not several:
        raise UserError(f"{setting} {count}: {source_of(data)} has only {len(bank):,} training images.")
    if not len(images):
        raise UserError(f"{setting}: {source_of(data)}, {TITLES[data.PART]}: the split has no images.")
    return bank, images


TEMPERATURE = 0.07
"""Of the votes: exp(similarity / 0.07), as Wu et al. 2018 (arXiv:1805.01978)"""
COUNT = 20
"""Nearest images that vote for TRAIN.KNN"""
AT_ONCE = 1 << 14
"""Images to classify that are compared with a batch of training images at once"""
Rows = tuple[Tensor, Tensor, Tensor]
"""Features, labels and indices of some images"""


def classify(images: Iterable[Rows], bank: Iterable[Rows], count: int, world: World = ALONE) -> tuple[Tensor, Tensor]:
    """Guessed and true class of each image, by the `count` nearest images of `bank`. A collective call.

    Each rank gives its part of both, and gets the classes of all images.
    """
    features, labels, indices = (torch.cat(column) for column in zip(*images, strict=True))
    total = int(sum_over_ranks(torch.tensor(len(indices), device=indices.device), world))
    rows = _directions(_of_all_ranks(features, total, indices, world))
    truth = _of_all_ranks(labels, total, indices, world)
    similar = rows.new_full((total, count), -torch.inf)
    classes = torch.zeros(total, count, dtype=torch.int64, device=rows.device)
    parts = [slice(first, first + AT_ONCE) for first in range(0, total, AT_ONCE)]
    for others, labels, _ in bank:
        more = _directions(others)
        for part in parts:
            of_more = labels.expand(len(rows[part]), -1)
            _keep_nearest(similar[part], classes[part], rows[part] @ more.T, of_more)
    for part in parts:
        found = _of_all_ranks(similar[part][None], world.size, [world.rank], world)
        of_found = _of_all_ranks(classes[part][None], world.size, [world.rank], world)
        for rank in range(world.size):
            if rank != world.rank:
                _keep_nearest(similar[part], classes[part], found[rank], of_found[rank])
    votes = rows.new_zeros(total, int(classes.max()) + 1)
    weights = (similar / TEMPERATURE).exp()
    return votes.scatter_add_(1, classes, weights).argmax(1), truth


def _of_all_ranks(own: Tensor, count: int, places: Tensor | list[int], world: World) -> Tensor:
    """A table of `count` rows, of which each rank has its own, for these places."""
    table = own.new_zeros(count, *own.shape[1:])
    table[places] = own
    return sum_over_ranks(table, world)


def _directions(features: Tensor) -> Tensor:
    """Features of length 1, in double precision: in single precision, similar images are often equally near."""
    return F.normalize(features.to(sum_type_of(features.device)), dim=1)


def _keep_nearest(similar: Tensor, labels: Tensor, more: Tensor, of_more: Tensor) -> None:
    """Keep the most similar images of those that are known and of more, in place."""
    found = torch.cat((similar, more), 1).topk(similar.shape[1], dim=1)
    labels.copy_(torch.cat((labels, of_more), 1).gather(1, found.indices))
    similar.copy_(found.values)


class Neighbours:
    """Images with labels, and the accuracy of the nearest neighbours of a model's features on them.

    It is the number of scripts/evaluate.py -knn on the same images.
    """

    def __init__(self, config: Config, world: World, device: torch.device, workers: int) -> None:
        data = labelled_data(config)
        try:
            self.bank, self.images = open_labelled(data, COUNT, config.SEED, device, "TRAIN.KNN", "TRAIN.KNN=DIR")
        except UserError as error:
            raise UserError(f"The images of TRAIN.KNN: {error}") from None
        self._world = world
        self._workers = workers
        self._batch_size = config.DATA.val_batch
        labels = self.images.sample_labels()
        largest = 100 * float(np.bincount(labels).max()) / len(labels)
        log.info(
            "TRAIN.KNN: at each validation, %s images of %s get the class of the nearest %d of %s training images%s.",
            f"{len(self.images):,}",
            source_of(data),
            COUNT,
            f"{len(self.bank):,}",
            f"; {always_guessing(largest)}",
            extra=DETAIL,
        )

    @property
    def batches(self) -> int:
        """Of this process, at a validation"""
        return sum(math.ceil(len(each) / self._batch_size / self._world.size) for each in (self.images, self.bank))

    @torch.no_grad()
    def accuracy(
        self, model: nn.Module, inputs: nn.Module, precision: Precision, between: Callable[[], None] = lambda: None
    ) -> float:
        """In percent; NaN if features are not finite. A collective call. `between`: as in `validate`."""
        world = self._world
        finite = torch.ones((), dtype=torch.bool, device=precision.device)

        def rows(dataset: ImageDataset) -> Iterator[Rows]:
            loader = ValLoader(
                dataset,
                self._batch_size,
                world.rank,
                world.size,
                self._workers,
                precision.device,
                # Whole batches: the last bits of features, and so their neighbours, may depend on the size of a batch.
                shard=whole_batches,
            )
            try:
                for batch in loader:
                    between()
                    with uncompiled(), precision.autocast(training=False):
                        features = pooled_features(model, inputs(batch.images), POOLED)
                    real = batch.indices >= 0  # False for samples that only pad the batch
                    finite.logical_and_(features.isfinite().all())
                    yield features[real], batch.labels[real], batch.indices[real]
                if loader.broken is not None:
                    loader.broken.raise_together(world)
            finally:
                loader.close()

        sharded: Any = model if any(is_sharded(weight) for weight in model.parameters()) else None
        try:
            if sharded is not None:  # blocks gather their own weights; the others only where forward is called
                sharded.unshard()
            with in_eval_mode(model):
                guesses, labels = classify(rows(self.images), rows(self.bank), COUNT, world)
        finally:
            if sharded is not None:
                sharded.reshard()
        if sum_over_ranks((~finite).float(), world).item():
            return math.nan
        # Of equally near images, which rank looks first decides.
        return broadcast(100 * int((guesses == labels).sum()) / len(labels), world)
