"""Finds the image files that predict.py is asked for, and predicts them batch by batch."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import Batch, ImageDataset, ValLoader, auto_workers
from datasets.base import PADDING
from datasets.decoding import ENDINGS
from datasets.given import Unread
from datasets.sources.files import SkippedFiles, images_below
from engine.task.several import HALF
from engine.trained.model import Trained, batch_size, guesses
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


NO_IMAGES = f"no images found (files ending in {' '.join(ENDINGS)})"
LONGEST_NAME = 4096
"""Bytes; the longest path on Linux"""
CHUNK = 1 << 16
LARGEST_LIST = 1 << 28
"""Bytes: millions of paths, while `yes | predict.py RUN -` reaches it within seconds."""


def find_images(words: list[str]) -> list[str]:
    """Paths in the order of the arguments; those of a folder or glob are sorted."""
    by_word = {word: _paths_of(word) for word in words}
    found = [path for word in words for path in by_word[word]]
    empty = [word for word, paths in by_word.items() if not paths and word != "-"]
    if not found and empty:
        raise UserError(f"{', '.join(empty)}: {NO_IMAGES}.")
    if not found:
        raise UserError("standard input names no images.")
    for word in empty:
        log.warning("%s: %s; skipped.", word, NO_IMAGES)
    return found


def _paths_of(word: str) -> list[str]:
    if word == "-":
        return _names_in(sys.stdin.buffer)
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`, so an existing path is not read as a glob.
    matched = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matched:
        reason = "no file matches" if glob.has_magic(word) else "no such file or folder"
        raise UserError(f"{word}: {reason}.")
    found = []
    for one in matched:
        if not os.path.isdir(one):
            found.append(one)
            continue
        skipped = SkippedFiles()
        found += [os.path.join(one, file) for file in images_below(one, skipped)]
        skipped.warn(one)
    return found


def _names_in(stream: BinaryIO) -> list[str]:
    """Names separated by newlines, or by zero bytes, as `find -print0` prints them.

    Standard input may be endless, so UserError is raised as soon as it cannot be a list of files.
    """
    content = bytearray()
    why = ""
    while not why and (chunk := stream.read(CHUNK)):
        checked = max(0, len(content) - LONGEST_NAME)  # also across the border of two chunks
        content += chunk
        new = bytes(content[checked:])
        if len(content) > LARGEST_LIST:
            why = f"it is larger than {LARGEST_LIST >> 20} MiB; name a folder instead, or split the list"
        elif b"\0\0" in new:
            why = "it has two zero bytes in a row; give one name per line, or the output of find -print0"
        elif any(len(name) > LONGEST_NAME for name in new.replace(b"\0", b"\n").split(b"\n")):
            why = f"a name has over {LONGEST_NAME} bytes; give one name per line, or the output of find -print0"
    if why:
        raise UserError(f"standard input is not a list of files: {why}.")
    names = content.split(b"\0") if b"\0" in content else (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.fsdecode(bytes(name)) for name in names if name]
