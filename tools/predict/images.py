"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from tqdm import tqdm

from datasets import Batch, ImageDataset, ValLoader, auto_workers
from datasets.base import PADDING
from datasets.given import Unread
from engine.saved.predictions import batch_size
from engine.saved.trained import Trained
from utils.log import log

Result = TypeVar("Result")
Taken = TypeVar("Taken", contravariant=True)


class Output(Protocol[Taken]):
    """Where results are written, in the order of the images."""

    def begin(self) -> None: ...

    def image(self, path: str, best: Taken, /) -> None: ...

    def failure(self, path: str, reason: str, /) -> None: ...

    def end(self) -> None: ...


def predict_images(
    models: Sequence[Trained],
    datasets: Sequence[ImageDataset],
    paths: list[str],
    form: Output[Result],
    results: Callable[[Sequence[Batch]], Iterable[Result]],
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Write one result per image, in order, with its name in `paths`. Returns the number of unreadable images.

    `datasets`: the images as each model takes them. `results`: those of a batch, from the batches of all models.
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
            indices = torch.stack([one.indices.cpu() for one in batches]).amin(0)  # PADDING is below all others
            for index, result in zip(indices.tolist()[: len(paths) - row], results(batches), strict=False):
                if index == PADDING:
                    failed, reason = failed + 1, _reason(unread, row)
                    log.warning("%s cannot be read: %s", paths[row], reason)
                    form.failure(paths[row], reason)
                else:
                    form.image(paths[row], result)
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
