"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import ImageDataset, ValLoader, auto_workers
from datasets.base import PADDING
from datasets.given import Unread
from engine.saved.predictions import batch_size, guesses
from engine.saved.trained import Trained
from tools.predict.show import Form, Guess
from utils.log import log

TOP = 5
"""Classes per image without -topk"""


def predict_images(
    trained: Trained,
    dataset: ImageDataset,
    paths: list[str],
    form: Form,
    topk: int | None,
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
    threshold: float | None = None,
) -> int:
    """Write one result per image, in order, with its name in `paths`. Returns the number of unreadable images.

    `topk` None: the usual number. `threshold`: of all classes, where an image has several labels; None: their own.
    """
    workers = auto_workers() if workers is None else workers
    unread, failed, row = Unread(), 0, 0
    choose = (
        _label_chooser(trained, topk, threshold) if trained.multi_label else partial(_predict_batch, topk=topk or TOP)
    )
    size = batch or batch_size(trained)
    workers = 0 if len(paths) <= size else workers  # nothing to prefetch
    loader = ValLoader(dataset, size, 0, 1, workers, trained.precision.device, unread)
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    form.begin()
    try:
        for images, _, indices in loader:
            predicted = choose(trained, images)
            for index, best in zip(indices.tolist()[: len(paths) - row], predicted, strict=False):
                if index == PADDING:
                    failed, reason = failed + 1, unread.take(row)
                    log.warning("%s cannot be read: %s", paths[row], reason)
                    form.failure(paths[row], reason)
                else:
                    form.image(paths[row], best)
                row += 1
                bar.update()
    finally:
        loader.close()
        bar.close()
    form.end()
    if transparent := loader.transparent.summary():
        print(transparent, file=sys.stderr)
    if failed:
        log.warning("%d of %d images could not be read.", failed, len(paths))
    return failed


def _predict_batch(trained: Trained, images: Tensor, topk: int) -> list[list[Guess]]:
    logits = trained.logits(images)
    labels = guesses(logits, topk)
    probabilities = torch.softmax(logits, dim=-1).gather(-1, labels)
    return [
        [Guess(label, trained.name_of(label), probability) for label, probability in zip(*of_image, strict=True)]
        for of_image in zip(labels.tolist(), probabilities.tolist(), strict=True)
    ]


def _label_chooser(
    trained: Trained, most: int | None, threshold: float | None
) -> Callable[[Trained, Tensor], list[list[Guess]]]:
    """Predicts the classes whose probability reaches their threshold, the most probable first, at most `most`."""
    own = trained.thresholds()[0] if threshold is None else [threshold] * int(trained.config.MODEL.NUM_CLASSES)
    limits = torch.tensor(own, dtype=torch.float64)

    def choose(trained: Trained, images: Tensor) -> list[list[Guess]]:
        # In fp64, in which validation compares them too.
        probabilities = trained.logits(images).cpu().double().sigmoid()
        chosen = [torch.nonzero(row >= limits)[:, 0] for row in probabilities]
        orders = [
            of[row[of].argsort(descending=True, stable=True)] for of, row in zip(chosen, probabilities, strict=True)
        ]
        return [
            [Guess(label, trained.name_of(label), float(row[label])) for label in order[:most].tolist()]
            for order, row in zip(orders, probabilities, strict=True)
        ]

    return choose
