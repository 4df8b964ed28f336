"""k-NN: classifies images by the classes of the training images with the most similar features.

TRAIN.KNN measures this accuracy at each validation of a model that learns without labels; evaluate.py -knn does so
after training. Training images are read in batches, since the features of all may not fit in memory.
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
    """Name the data set and the real path that it is read from, as one string, to compare whether two are the same."""
    path = data.DATA_PATH
    if path is not None and "://" not in path:
        data = data.changed(DATA_PATH=os.path.realpath(os.path.expanduser(path)))
    try:
        return source_of(data)
    except UserError:  # no data set has this name here
        return data.DATASET


def labelled_data(config: Config) -> DataConfig:
    """Return DATA for the images of TRAIN.KNN: the name of a data set, NAME=PATH, or a path whose layout is recognised.

    If they are other images than the run's, settings that fit the run's own data alone are reset, such as the fold.
    DATA.EXCLUDE stays, since this run reads both: unlabelled `images` and the class folders of k-NN can be one folder,
    and a broken image that only k-NN reads must be excludable too.
    """
    text = config.TRAIN.KNN or ""
    name, equals_sign, path = text.partition("=")
    is_path = os.path.exists(os.path.expanduser(text))  # it may contain a "="
    has_name_and_path = equals_sign != "" and not is_path
    if has_name_and_path:
        pass  # `name` and `path` are known
    elif text in names() or own_named("dataset", text) or text.startswith("hf:"):
        path = None
    else:
        from datasets.recognise import recognise

        try:
            layout = recognise(text)
        except UserError as error:
            raise UserError(f"The images of TRAIN.KNN: {error}") from None
        if layout is None:
            raise UserError(f"TRAIN.KNN {text}: no such folder, file or data set.")
        name, _ = layout
        path = text
    data = config.DATA.changed(DATASET=name, DATA_PATH=path, PART="val")
    if place_of(data) == place_of(config.DATA):
        return data
    # The run's data set, such as digits, may squeeze images into a square whatever CROP is. Do so with these, too.
    changes = {"DATA.CROP": "none"} if squeezes(config.DATA) else {}
    changes |= {key: default_of(key) for key in OF_OWN_DATA if key != "DATA.EXCLUDE"}
    return data.changed(**nested(changes)["DATA"])


def open_labelled(
    data: DataConfig, count: int, seed: int, device: torch.device, setting: str, do: str, several: bool = False
) -> tuple[ImageDataset, ImageDataset]:
    """Open the training split, whose images are the neighbours, and the split of DATA.PART, which is classified.

    Their classes need not be those of a model. UserError if the images have no labels or are too few.

    `count`: number of neighbours. `setting`: name of the setting or flag that asked for k-NN, for errors. `do`: a
    setting with which the user can name images with labels, as advice in an error. `several`: allow several labels per
    image, and any number of images, for a linear probe.
    """
    if data.MULTI_LABEL and not several:
        raise UserError(f"{setting}: needs one label per image; this data has several (DATA.MULTI_LABEL).")
    if not has_labels(data):
        raise UserError(f"{setting}: {source_of(data)} has no labels. Name images with labels, as in {do}.")
    classes = count_classes(data, train=True)
    check_dataset(data, classes)
    # Both as for validation (False), without augmentation.
    bank = open_dataset(data.changed(PART="train"), False, classes, seed, device)
    images = open_dataset(data, False, classes, seed, device)
    if count > len(bank) and not several:
        raise UserError(f"{setting} {count}: {source_of(data)} has only {len(bank):,} training images.")
    if not len(images):
        raise UserError(f"{setting}: {source_of(data)}, {TITLES[data.PART]}: the split has no images.")
    return bank, images


TEMPERATURE = 0.07
"""A neighbour's vote weighs exp(similarity / 0.07), as in Wu et al. 2018 (arXiv:1805.01978)"""
COUNT = 20
"""Nearest images that vote for TRAIN.KNN"""
AT_ONCE = 1 << 14
"""Images to classify that are compared with a batch of training images at once"""
Rows = tuple[Tensor, Tensor, Tensor]
"""Features, labels and indices of some images"""


def classify(images: Iterable[Rows], bank: Iterable[Rows], count: int, world: World = ALONE) -> tuple[Tensor, Tensor]:
    """Classify each image by the `count` nearest images of `bank`. Returns the guessed and the true classes of all.

    A collective call: each rank gives its part of the images and of the bank, and gets the classes of all images.
    """
    # Each rank compares all images with its part of the bank.
    features, labels, indices = (torch.cat(column) for column in zip(*images, strict=True))
    total = int(sum_over_ranks(torch.tensor(len(indices), device=indices.device), world))
    rows = _unit_vectors(_gather_rows(features, total, indices, world))
    truth = _gather_rows(labels, total, indices, world)

    # Similarities and classes of the nearest images so far, a row per image. `_keep_nearest` updates chunks of both
    # tables in place.
    similarities = rows.new_full((total, count), -torch.inf)
    classes = torch.zeros(total, count, dtype=torch.int64, device=rows.device)
    chunks = [slice(first, first + AT_ONCE) for first in range(0, total, AT_ONCE)]
    for bank_features, bank_labels, _ in bank:
        bank_rows = _unit_vectors(bank_features)
        for chunk in chunks:
            new_similarities = rows[chunk] @ bank_rows.T
            new_classes = bank_labels.expand(len(rows[chunk]), -1)  # the same for each image of the chunk
            _keep_nearest(similarities[chunk], classes[chunk], new_similarities, new_classes)

    # The nearest images in the parts of all ranks: each rank gives its chunk as one row of a table by rank.
    this_rank = [world.rank]
    for chunk in chunks:
        similarities_by_rank = _gather_rows(similarities[chunk][None], world.size, this_rank, world)
        classes_by_rank = _gather_rows(classes[chunk][None], world.size, this_rank, world)
        for rank in range(world.size):
            if rank != world.rank:
                _keep_nearest(similarities[chunk], classes[chunk], similarities_by_rank[rank], classes_by_rank[rank])

    # Votes of the nearest images, by class.
    votes = rows.new_zeros(total, int(classes.max()) + 1)
    weights = (similarities / TEMPERATURE).exp()
    return votes.scatter_add_(1, classes, weights).argmax(1), truth


def _gather_rows(rows: Tensor, count: int, indices: Tensor | list[int], world: World) -> Tensor:
    """Return a table of `count` rows to which each rank gives the `rows` at its `indices`. A collective call."""
    table = rows.new_zeros(count, *rows.shape[1:])
    table[indices] = rows
    return sum_over_ranks(table, world)


def _unit_vectors(features: Tensor) -> Tensor:
    """Scale features to length 1, in double precision: in single precision, similar images are often equally near."""
    return F.normalize(features.to(sum_type_of(features.device)), dim=1)


def _keep_nearest(similarities: Tensor, labels: Tensor, new_similarities: Tensor, new_labels: Tensor) -> None:
    """Replace the nearest images so far by those of the new ones that are nearer, in place."""
    nearest = torch.cat((similarities, new_similarities), 1).topk(similarities.shape[1], dim=1)
    labels.copy_(torch.cat((labels, new_labels), 1).gather(1, nearest.indices))
    similarities.copy_(nearest.values)


class Neighbours:
    """The labelled images of TRAIN.KNN, on which the k-NN accuracy of a model's features is measured.

    It is the number of scripts/evaluate.py -knn on the same images.
    """

    def __init__(self, config: Config, world: World, device: torch.device, workers: int) -> None:
        """Open the images. UserError if they cannot be used. `workers`: processes that load them on this rank."""
        data = labelled_data(config)
        setting = "TRAIN.KNN"
        try:
            training_split, validation_split = open_labelled(
                data, COUNT, config.SEED, device, setting, f"{setting}=DIR"
            )
        except UserError as error:
            raise UserError(f"The images of TRAIN.KNN: {error}") from None
        self.bank = training_split
        """Images whose classes vote"""
        self.images = validation_split
        """Images that are classified"""
        self._world = world
        self._workers = workers
        self._batch_size = config.DATA.val_batch
        labels = self.images.sample_labels()
        percent_of_largest_class = 100 * float(np.bincount(labels).max()) / len(labels)
        log.info(
            "TRAIN.KNN: at each validation, %s images of %s get the class of the nearest %d of %s training images%s.",
            f"{len(self.images):,}",
            source_of(data),
            COUNT,
            f"{len(self.bank):,}",
            f"; {always_guessing(percent_of_largest_class)}",
            extra=DETAIL,
        )

    @property
    def batches(self) -> int:
        """Number of batches that this process reads per validation."""
        images_at_once = self._batch_size
        return sum(math.ceil(len(split) / images_at_once / self._world.size) for split in (self.images, self.bank))

    @torch.no_grad()
    def accuracy(
        self, model: nn.Module, inputs: nn.Module, precision: Precision, between: Callable[[], None] = lambda: None
    ) -> float:
        """Return the k-NN accuracy of the model's features in percent; NaN if any is not finite. A collective call.

        Each validation image gets the class for which the nearest training images vote. `inputs`: normalises images.
        `between`: is called before each batch, and may raise an error to end the validation.
        """
        world = self._world
        finite = torch.ones((), dtype=torch.bool, device=precision.device)

        def rows(dataset: ImageDataset) -> Iterator[Rows]:
            """Yield features, labels and indices of this rank's batches."""
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

        fsdp_model: Any = model
        has_shards = any(is_sharded(weight) for weight in model.parameters())
        try:
            if has_shards:
                # Blocks gather their own weights when they are called. Other weights are gathered when the model is
                # called, but features are computed without that.
                fsdp_model.unshard()
            with in_eval_mode(model):
                guesses, labels = classify(rows(self.images), rows(self.bank), COUNT, world)
        finally:
            if has_shards:
                fsdp_model.reshard()
        if sum_over_ranks((~finite).float(), world).item():
            return math.nan
        # Ranks may choose differently among equally near images, so rank 0's number counts.
        return broadcast(100 * int((guesses == labels).sum()) / len(labels), world)
