"""TRAIN.KNN: at each validation of a model that learns without labels, how well its features separate classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from datasets import ImageDataset, ValLoader, source_of
from datasets.loading.order import whole_batches
from engine.amp.precision import Precision
from engine.features.labelled import labelled_data, open_labelled
from engine.features.nearest import Rows, classify
from engine.features.pooling import pooled_features
from engine.machine.late_compiler import uncompiled
from engine.parallel.shards import whole_outside_blocks
from utils.config import Config
from utils.distributed.world import World, sum_over_ranks
from utils.errors import UserError
from utils.log import log
from utils.record.tasks import always_guessing
from utils.terminal import DETAIL

SETTING, NAMED_BY = "TRAIN.KNN.K", "TRAIN.KNN.DATA_PATH=DIR"


class Neighbours:
    """Images with labels, and the accuracy of the nearest neighbours of a model's features on them.

    It is the number of scripts/evaluate.py -knn on the same images.
    """

    def __init__(self, config: Config, world: World, device: torch.device, workers: int) -> None:
        data = labelled_data(config)
        try:
            self._bank, self._images = open_labelled(data, config.TRAIN.KNN.K, config.SEED, device, SETTING, NAMED_BY)
        except UserError as error:
            raise UserError(f"The images of TRAIN.KNN: {error}") from None
        self._count, self._world, self._workers = config.TRAIN.KNN.K, world, workers
        self._batch_size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
        labels = self._images.sample_labels()
        largest = None if labels is None else 100 * float(np.bincount(labels).max()) / len(labels)
        log.info(
            "TRAIN.KNN: at each validation, %s images of %s get the class of the nearest %d of %s training images%s.",
            f"{len(self._images):,}",
            source_of(data),
            self._count,
            f"{len(self._bank):,}",
            "" if largest is None else f"; {always_guessing(largest)}",
            extra=DETAIL,
        )

    @torch.no_grad()
    def accuracy(
        self, model: nn.Module, inputs: nn.Module, precision: Precision, between: Callable[[], None] = lambda: None
    ) -> float:
        """In percent; NaN if features are not finite. A collective call. `between`: as in `evaluate`."""
        training, finite = model.training, torch.ones((), dtype=torch.bool, device=precision.device)

        def rows(dataset: ImageDataset) -> Iterator[Rows]:
            world, device = self._world, precision.device
            # Whole batches: the last bits of features, and so their neighbours, may depend on the size of a batch.
            how = (self._batch_size, world.rank, world.size, self._workers, device)
            loader = ValLoader(dataset, *how, shard=whole_batches)
            try:
                for batch in loader:
                    between()
                    with uncompiled(), precision.autocast(training=False):
                        features = pooled_features(model, inputs(batch.images))
                    real = batch.indices >= 0  # False for samples that only pad the batch
                    finite.logical_and_(features.isfinite().all())
                    yield features[real], batch.labels[real], batch.indices[real]
                loader.broken.raise_together(world)
                loader.transparent.log_once(world)
            finally:
                loader.close()

        model.eval()
        try:
            with whole_outside_blocks(model):
                guesses, labels = classify(rows(self._images), rows(self._bank), self._count, self._world)
        finally:
            model.train(training)
        if sum_over_ranks((~finite).float(), self._world).item():
            return math.nan
        return 100 * int((guesses == labels).sum()) / len(labels)
