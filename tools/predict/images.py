"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import ImageDataset, ValLoader, auto_workers
from datasets.base import PADDING
from datasets.given import Unread
from engine.saved.predictions import batch_size
from engine.saved.trained import Trained
from tools.predict.show import Form, Guess
from utils.log import log


def predict_images(
    models: Sequence[Trained],
    datasets: Sequence[ImageDataset],
    paths: list[str],
    form: Form,
    choose: Callable[[Tensor], list[list[Guess]]],
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Write one result per image, in order, with its name in `paths`. Returns the number of unreadable images.

    `datasets`: the images as each model takes them. `choose`: what is predicted from the logits of a batch.
    """
    workers = auto_workers() if workers is None else workers
    failed, row = 0, 0
    size = batch or batch_size(models[0])
    workers = 0 if len(paths) <= size else workers // len(models)  # nothing to prefetch
    unread = [Unread() for _ in models]
    loaders = [
        ValLoader(dataset, size, 0, 1, workers, trained.precision.device, broken)
        for dataset, trained, broken in zip(datasets, models, unread, strict=True)
    ]
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    form.begin()
    try:
        for batches in zip(*loaders, strict=True):
            outputs = [trained.logits(one.images) for trained, one in zip(models, batches, strict=True)]
            logits = outputs[0] if len(outputs) == 1 else models[0].task.averaged(outputs)
            indices = torch.stack([one.indices.cpu() for one in batches]).amin(0)  # PADDING is below all others
            for index, best in zip(indices.tolist()[: len(paths) - row], choose(logits), strict=False):
                if index == PADDING:
                    failed, reason = failed + 1, _reason(unread, row)
                    log.warning("%s cannot be read: %s", paths[row], reason)
                    form.failure(paths[row], reason)
                else:
                    form.image(paths[row], best)
                row += 1
                bar.update()
    finally:
        for loader in loaders:
            loader.close()
        bar.close()
    form.end()
    if transparent := loaders[0].transparent.summary():
        print(transparent, file=sys.stderr)
    if failed:
        log.warning("%d of %d images could not be read.", failed, len(paths))
    return failed


def _reason(unread: Sequence[Unread], index: int) -> str:
    """Why an image could not be read for one of the models."""
    return next(filter(None, [one.take(index) for one in unread]))
