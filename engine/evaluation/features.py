"""Features of all images of a split, computed once and kept on the disk: for -probe, -knn, and frozen backbones.

Blocks of images are computed one by one, by whichever process is free; a file beside them says which are complete. So
a killed process loses one block, and any number of processes can share the work. Nothing is held in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from datasets import Batch, ImageDataset, ValLoader, auto_workers
from datasets.base import TITLES, Key, Part
from datasets.loading.order import data_identity
from datasets.memory import ArraySamples
from datasets.variants import Variant
from engine.amp.precision import Precision
from engine.checkpoint.saver import size_words
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.machine.late_compiler import uncompiled
from models.parts import classifiers, is_inside
from utils.cache import cache_folder
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World, broadcast
from utils.errors import UserError
from utils.log import log
from vitamp.files import read_json, write_atomically
from vitamp.pooling import BLOCKS, POOLED, pool_of, pooled_features, pools_of

if TYPE_CHECKING:
    from engine.setup import Ready, TunedModel
    from engine.update import TrainState

ABOUT = "about.json"
BLOCK = 512
"""Images"""
AT_ONCE = 1 << 13
"""Rows that are read at once"""
Rows = tuple[Tensor, Tensor, Tensor]
"""Features, labels and indices of some images"""


class Features(NamedTuple):
    """Maps of files: memory holds what is read of them."""

    table: np.ndarray
    """Images x the columns of all poolings, float32"""
    labels: np.ndarray
    pools: dict[str, slice]
    """The columns of each pooling"""

    def of(self, pool: str) -> np.ndarray:
        return self.table[:, self.pools[pool]]

    def rows(self, pool: str, device: torch.device) -> Iterator[Rows]:
        for first in range(0, len(self.table), AT_ONCE):
            here = slice(first, first + AT_ONCE)
            features, labels = (torch.from_numpy(np.array(of[here])) for of in (self.of(pool), self.labels))
            yield features.to(device), labels.to(device), torch.arange(first, first + len(labels), device=device)


class Extractor(NamedTuple):
    """The model that sees, and what it sees with."""

    model: nn.Module
    inputs: nn.Module
    precision: Precision
    name: str
    """Of the model, for messages"""
    batch_size: int
    workers: int
    world: World = ALONE
    """Processes that share the work. Those that are done return; the first one waits until all is there."""
    between: Callable[[int], object] = lambda _: None
    """Called after so many images, for a bar"""

    @torch.no_grad()
    def columns(self, images: Tensor) -> Tensor:
        """Of uint8 images: what the classifier sees, and with tokens the parts of all other poolings."""
        with uncompiled(), self.precision.autocast(training=False):
            return pooled_features(self.model, self.inputs(images), *dict.fromkeys((POOLED, pools_of(self.model)[-1])))

    def layout(self, data: DataConfig) -> tuple[int, dict[str, slice]]:
        """Number of columns, and those of each pooling."""
        images = torch.zeros(1, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, dtype=torch.uint8)
        end, pools = self.columns(images.to(self.precision.device)).shape[1], pools_of(self.model)
        model: Any = self.model
        width = getattr(model, "embed_dim", 0)
        blocks = 1 + min(BLOCKS, len(model.blocks)) if pools[-1] == "blocks" else 1
        first = end if pools == (POOLED,) else end - blocks * width
        begins = {POOLED: 0, "class": end - 2 * width, "mean": end - width, "both": end - 2 * width, "blocks": first}
        ends = {POOLED: first, "class": end - width}
        return end, {pool: slice(begins[pool], ends.get(pool, end)) for pool in pools}


def features_of(extractor: Extractor, dataset: ImageDataset, data: DataConfig, classes: int, title: str) -> Features:
    """The features of `dataset`, which `data` describes; computed as far as they are not kept yet.

    `title`: of the images, for messages. Of several processes, only the first one waits until they are complete.
    """
    training = extractor.model.training
    extractor.model.eval()
    try:
        number, pools = extractor.layout(data)
        about = {
            "format": 1,
            "model": extractor.name,
            "weights": _weights_digest(extractor.model),
            "images": _images_digest(dataset),
            "input": input_of(data),
            "precision": extractor.precision.name,
            "columns": number,
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        folder, images = cache_folder(data, "features") / key, len(dataset)
        labels = ((images, classes), np.float32) if data.MULTI_LABEL else ((images,), np.int64)
        arrays = {"features": ((images, number), np.float32), "labels": labels}
        arrays["complete"] = (-(-images // BLOCK),), np.uint8
        _make(
            folder, about, {name: math.prod(shape) * np.dtype(kind).itemsize for name, (shape, kind) in arrays.items()}
        )
        table, labels, complete = (
            np.memmap(folder / name, kind, "r", shape=shape) for name, (shape, kind) in arrays.items()
        )
        missing = np.flatnonzero(complete == 0).tolist()
        left = sum(min(BLOCK, images - BLOCK * block) for block in missing)
        what = f"are computed once, {left:,} of them now, and kept in" if left else "are kept in"
        log.info("%s: features of %s images %s %s (%s).", title, f"{images:,}", what, folder, size_words(table.nbytes))
        extractor.between(images - left)
        world = extractor.world
        _compute(extractor, dataset, folder, missing[world.rank :: world.size])
        while world.first and (missing := np.flatnonzero(complete == 0).tolist()):  # of a process that is slower
            _compute(extractor, dataset, folder, missing[-1:])
        return Features(table, labels, pools)
    finally:
        extractor.model.train(training)


def _make(folder: Path, about: dict[str, Any], sizes: dict[str, int]) -> None:
    """The folder with files of these sizes, if it is not there. UserError if they do not fit on the disk."""
    if (folder / ABOUT).exists():
        return
    for other in folder.parent.glob(f"*/{ABOUT}"):
        kept = read_json(other)
        if {**kept, "images": None} == {**about, "images": None} and kept["name"] == about["name"]:
            log.info("The images have changed since their features were kept in %s: computed anew.", other.parent)
    free, needed = shutil.disk_usage(folder.parent).free, sum(sizes.values())
    if needed > free:
        raise UserError(
            f"{folder.parent}: the features take {size_words(needed)}, and {size_words(free)} are free. Name a folder "
            "on a larger disk (DATA.CACHE=DIR), or take fewer images (DATA.EXCLUDE)."
        )
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        with (folder / name).open("ab") as file:
            file.truncate(size)
    write_atomically(folder / ABOUT, json.dumps(about, indent=1))  # last: all is there that it describes


def _compute(extractor: Extractor, dataset: ImageDataset, folder: Path, blocks: list[int]) -> None:
    size, total = extractor.batch_size, len(dataset)
    ranges = [range(BLOCK * block, min(BLOCK * (block + 1), total)) for block in blocks]
    batches = [np.arange(first, min(first + size, one.stop)) for one in ranges for first in one[::size]]
    loader = ValLoader(dataset, size, 0, 1, extractor.workers, extractor.precision.device, shard=lambda *_: batches)
    found: list[tuple[Tensor, Tensor]] = []
    done = iter(zip(blocks, ranges, strict=True))
    try:
        block, one = next(done, (0, range(0)))
        for batch in loader:
            if loader.broken is not None:
                loader.broken.raise_together(ALONE)
            found.append((extractor.columns(batch.images).cpu(), batch.labels.cpu()))
            extractor.between(len(batch.labels))
            if int(batch.indices[-1]) != one.stop - 1:
                continue
            features, labels = (torch.cat(column).numpy() for column in zip(*found, strict=True))
            if not np.isfinite(features).all():
                raise UserError("The model has NaN or infinite features on these images; nothing can be compared.")
            for name, rows in (("features", features), ("labels", labels), ("complete", np.ones(1, np.uint8))):
                row = block if name == "complete" else one.start
                with (folder / name).open("r+b") as file:  # no map: other machines may write beside this one
                    file.seek(row * rows[0].nbytes)
                    file.write(rows.tobytes())
            found, (block, one) = [], next(done, (0, range(0)))
    finally:
        loader.close()


def _weights_digest(model: nn.Module) -> str:
    """Of all but the classifier, which features do not depend on."""
    digest, heads = hashlib.sha256(), classifiers(model)
    for name, value in model.state_dict().items():
        if not is_inside(name, heads):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _images_digest(dataset: ImageDataset) -> str:
    """Of names, labels and order; and of what tells that contents have changed, without reading them all."""
    digest, samples = hashlib.sha256(data_identity(dataset).encode()), dataset.single_images()
    if samples is not None and samples.stored == "files":
        for index in range(len(samples)):
            about = os.stat(samples.name(index))
            digest.update(f"{about.st_size} {about.st_mtime_ns} ".encode())
    pixels = getattr(dataset, "samples", samples)
    if isinstance(pixels, ArraySamples):
        digest.update(pixels.pixels.data)
    return digest.hexdigest()


class FeatureSet(Variant):
    """A split whose images are replaced by what the model's classifier sees of them."""

    def __init__(self, inner: ImageDataset, features: Features, pool: str, device: torch.device) -> None:
        super().__init__(inner)
        self._features, self._pool, self._device, self.in_memory = features, pool, device, True

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = np.array([index for _, index in keys])
        rows = np.maximum(indices, 0)  # where padding is
        columns = self._features.of(self._pool)[rows], self._features.labels[rows], indices
        return Batch(*(torch.from_numpy(column).to(self._device) for column in columns))


def extractor_of(run: Run, tuned: TunedModel) -> Extractor:
    data = run.config.DATA
    workers = auto_workers(run.world) if data.NUM_WORKERS is None else data.NUM_WORKERS
    size = int(data.BATCH_SIZE_EVAL or data.BATCH_SIZE)
    return Extractor(tuned.model, tuned.inputs, tuned.precision, run.config.MODEL.NAME, size, workers, run.world)


def see_features(run: Run, ready: Ready, parts: TrainState, train_set: ImageDataset) -> ImageDataset:
    """Let training and validation read features in place of images. Returns the training split. A collective call."""
    config, model, device = run.config, ready.model, run.device
    extractor, pool, classes = extractor_of(run, ready), pool_of(model), int(config.MODEL.NUM_CLASSES)

    def features(dataset: ImageDataset, part: Part) -> FeatureSet:
        data = config.DATA.model_copy(update={"PART": part})
        found = features_of(extractor, dataset, data, classes, TITLES[part].capitalize())
        broadcast(None, run.world)  # the first process is here once they are complete
        return FeatureSet(dataset, found, pool, device)

    train_set, ready.val_set = features(train_set, "train"), features(ready.val_set, "val")
    ready.val_loader = ValLoader(ready.val_set, extractor.batch_size, run.world.rank, run.world.size, 0, device)
    model.forward = MethodType(_of_features, model)
    ready.inputs = parts.inputs = nn.Identity()
    return train_set


def _of_features(self: nn.Module, seen: Tensor) -> Tensor:
    return self.get_submodule(classifiers(self)[0])(seen)
