"""Prediction of image files, batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
    trained: Trained,
    dataset: ImageDataset,
    paths: list[str],
    form: Form,
    choose: Callable[[Tensor], list[list[Guess]]],
    batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Write one result per image, in order, with its name in `paths`. Returns the number of unreadable images.

    `choose`: what is predicted for the images of a batch.
    """
    workers = auto_workers() if workers is None else workers
    unread, failed, row = Unread(), 0, 0
    size = batch or batch_size(trained)
    workers = 0 if len(paths) <= size else workers  # nothing to prefetch
    loader = ValLoader(dataset, size, 0, 1, workers, trained.precision.device, unread)
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    form.begin()
    try:
        for images, _, indices in loader:
            for index, best in zip(indices.tolist()[: len(paths) - row], choose(images), strict=False):
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
