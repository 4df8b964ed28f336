"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import ValLoader, auto_workers
from datasets.base import PADDING
from datasets.given import Unread, open_given
from engine.saved.predictions import batch_size, guesses
from engine.saved.trained import Trained
from tools.predict.show import Form, Guess
from utils.log import log


def predict_images(
    trained: Trained,
    paths: list[str],
    form: Form,
    topk: int,
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Write one result per image, in order. Returns the number of unreadable images."""
    workers = auto_workers(1) if workers is None else workers
    unread, failed, row = Unread(), 0, 0
    size = batch or batch_size(trained)
    workers = 0 if len(paths) <= size else workers  # nothing to prefetch
    loader = ValLoader(open_given(paths, trained.config.DATA), size, 0, 1, workers, trained.precision.device, unread)
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    form.begin()
    try:
        for images, _, indices in loader:
            predicted = _predict_batch(trained, images, topk)
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
