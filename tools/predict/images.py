"""scripts/predict.py: batch by batch, from files to rows of the result."""

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


def predict(
    trained: Trained,
    paths: list[str],
    form: Form,
    topk: int,
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Write a row an image, in order; gives the number of images that could not be read."""
    workers = auto_workers(1) if workers is None else workers
    unread, failed, row = Unread(), 0, 0
    size = batch or batch_size(trained)
    workers = 0 if len(paths) <= size else workers  # one batch: nothing to load ahead
    loader = ValLoader(open_given(paths, trained.config.DATA), size, 0, 1, workers, trained.precision.device, unread)
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    form.begin()
    try:
        for images, _, indices in loader:
            found = _found(trained, images, topk)
            for index, best in zip(indices.tolist()[: len(paths) - row], found, strict=False):
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


def _found(trained: Trained, images: Tensor, topk: int) -> list[list[Guess]]:
    logits = trained.logits(images)
    labels = guesses(logits, topk)
    shares = torch.softmax(logits, dim=-1).gather(-1, labels)
    return [
        [Guess(label, trained.name_of(label), share) for label, share in zip(of_image, of_labels, strict=True)]
        for of_image, of_labels in zip(labels.tolist(), shares.tolist(), strict=True)
    ]
