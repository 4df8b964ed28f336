"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import Batch, ImageDataset, ValLoader, auto_workers
from datasets.base import PADDING
from datasets.given import Unread
from engine.task.several import HALF
from engine.trained.model import Trained
from engine.trained.predictions import batch_size, guesses
from tools.predict.show import Guess
from utils.errors import UserError
from utils.log import log
from vitamp.metrics import ONE_LABEL

TOP = 5
"""Classes per image without -topk"""


def predict_images(
    models: Sequence[Trained],
    datasets: Sequence[ImageDataset],
    paths: list[str],
    form: Any,
    results: Callable[[Sequence[Batch]], Iterable[Any]],
    batch: int | None,
    workers: int | None,
    progress: bool,
) -> int:
    """Write one result per image, in order, with its name in `paths`. Returns the number of unreadable images.

    `datasets`: the images as each model takes them. `results`: those of a batch, from the batches of all models.
    `form`: where they are written, with the methods of `show.Form`.
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
                if index == PADDING:  # unreadable for one of the models
                    failed, reason = failed + 1, next(filter(None, [one.take(row) for one in unread]))
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
    if failed:
        log.warning("%d of %d images could not be read.", failed, len(paths))
    return failed


class Chosen:
    """The predicted classes of an image.

    With one label per image these are the most probable ones, else those whose probability reaches their threshold.
    `averaged`: of several models, whose mean has no thresholds of its own.
    """

    words = ""
    _limits: Tensor | None = None

    def __init__(self, trained: Trained, topk: int | None, threshold: float | None, averaged: bool) -> None:
        self._trained, classes = trained, int(trained.config.MODEL.NUM_CLASSES)
        if trained.task.kind == ONE_LABEL:
            if threshold is not None:
                raise UserError(
                    f"-threshold {threshold:g}: this model has one label per image, so it needs no threshold."
                )
            self.most = topk or TOP
            return
        self.most = topk or classes
        limits, self.words = trained.thresholds()
        threshold = HALF if averaged and threshold is None else threshold
        if threshold is not None:
            limits, self.words = [threshold] * classes, f"a class is predicted if its probability reaches {threshold:g}"
        self._limits = torch.tensor(limits, dtype=torch.float64)

    def __call__(self, logits: Tensor) -> list[list[Guess]]:
        """Of each image, the most probable class first."""
        if self._limits is None:
            labels = guesses(logits, self.most)
            probabilities = torch.softmax(logits, dim=-1).gather(-1, labels)
            pairs = zip(labels.tolist(), probabilities.tolist(), strict=True)
            return [self._named(zip(*of_image, strict=True)) for of_image in pairs]
        found = []
        for row in logits.cpu().double().sigmoid():  # in fp64, in which validation compares them too
            chosen = torch.nonzero(row >= self._limits)[:, 0]
            order = chosen[row[chosen].argsort(descending=True, stable=True)][: self.most]
            found.append(self._named(zip(order.tolist(), row[order].tolist(), strict=True)))
        return found

    def _named(self, guessed: Iterable[tuple[int, float]]) -> list[Guess]:
        return [Guess(label, self._trained.name_of(label), value) for label, value in guessed]
