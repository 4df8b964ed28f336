"""Features of all images of a split, computed once and kept on the disk: for -probe, -knn, and frozen backbones.

They are computed in blocks, and a second file says which blocks are complete. So a killed process loses one block, any
number of processes share the work, and memory holds what is read of a map.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn

from datasets import Batch, ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import TITLES, Key, Part, Unreadable, part_of
from datasets.damage import BrokenInValidation
from datasets.loading.order import data_identity
from datasets.variants import Variant
from engine.amp.precision import Precision
from engine.checkpoint.saver import size_words
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.machine.late_compiler import uncompiled
from models.parts import classifiers, is_inside
from models.sizes import sizes_of
from utils.cache import cache_folder, process_lock
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World, on_every_rank
from utils.errors import AllRanksError, TrainingError, UserError
from utils.log import log
from utils.own_code import executed
from vitamp.pooling import BLOCKS, POOLED, pool_of, pooled_features, pools_of

if TYPE_CHECKING:
    from engine.update import TrainState

BLOCK = 512
"""Images"""
AT_ONCE = 1 << 13
"""Rows that are read at once"""


class Seeing(Protocol):
    """A model with what it sees with."""

    model: nn.Module
    inputs: nn.Module
    precision: Precision


class Validating(Seeing, Protocol):
    val_set: ImageDataset
    val_loader: ValLoader


class Features(NamedTuple):
    table: np.ndarray
    """Images x the columns of all poolings, float32: a map"""
    labels: np.ndarray
    """As in `Samples.labels`"""
    pools: dict[str, slice]
    """The columns of each pooling"""

    def of(self, pool: str) -> np.ndarray:
        return self.table[:, self.pools[pool]]

    def rows(self, pool: str, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features, labels and indices of some images after others."""
        for first in range(0, len(self.table), AT_ONCE):
            here = slice(first, first + AT_ONCE)
            columns = np.array(self.of(pool)[here]), self.labels[here], np.arange(len(self.table))[here]
            features, labels, indices = (torch.from_numpy(column).to(device) for column in columns)
            yield features, labels, indices


@torch.no_grad()
def _columns(seeing: Seeing, images: Tensor) -> Tensor:
    """Of uint8 images: what timm's classifier sees, and with tokens the widest pooling, which has all others."""
    with uncompiled(), seeing.precision.autocast(training=False):
        pools = dict.fromkeys((POOLED, pools_of(seeing.model)[-1]))
        return pooled_features(seeing.model, seeing.inputs(images.to(seeing.precision.device)), *pools)


def _pools(model: Any, end: int) -> dict[str, slice]:
    """Where each pooling is in `_columns`, which are `end` in number."""
    known, width = pools_of(model), getattr(model, "embed_dim", 0)
    parts = {POOLED: 0, "mean": 1, "both": 2, "blocks": 1 + min(BLOCKS, len(getattr(model, "blocks", ())))}[known[-1]]
    first, both = end - parts * width, end - 2 * width
    columns = {POOLED: (0, first), "class": (both, end - width), "mean": (end - width, end), "both": (both, end)}
    columns["blocks"] = (first, end)
    return {pool: slice(*columns[pool]) for pool in known}


def features_of(
    seeing: Seeing,
    config: Config,
    dataset: ImageDataset,
    data: DataConfig,
    world: World = ALONE,
    between: Callable[[int], object] = lambda _: None,
) -> Features:
    """The features of `dataset`, which `data` describes; computed as far as they are not kept yet.

    Several processes share the work; only the first one waits until it is done. `between`: called after so many images.
    """
    model, images, labels = seeing.model, len(dataset), dataset.sample_labels()
    workers = auto_workers(world, config.DATA.NUM_WORKERS)
    batch = min(config.DATA.val_batch, BLOCK)
    training = model.training
    model.eval()
    try:
        empty = torch.zeros(1, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, dtype=torch.uint8)
        shape = images, _columns(seeing, empty).shape[1]
        model_is = [config.MODEL.NAME, str(sizes_of(model)), _weights(model)]
        about = [1, shape, *model_is, _images(dataset), seeing.precision.name, config.AMP.model_dump(mode="json")]
        if config.USE:  # the same weights, and perhaps another forward
            about += [sorted(own.sha256 for own, _ in executed.values()), list(config.USE)]
        key = hashlib.sha256(json.dumps([*about, input_of(data)]).encode()).hexdigest()[:16]
        folder = cache_folder(data, f"features/{key}")
        needed, free = 4 * shape[0] * shape[1], shutil.disk_usage(folder).free
        table, complete = (folder / name for name in ("features.npy", "complete.npy"))
        with process_lock(folder / ".lock", "makes room for features"):
            if not complete.exists():
                if needed > free:
                    raise UserError(
                        f"{folder}: the features take {size_words(needed)}, and {size_words(free)} are free. Name a "
                        "folder on a larger disk (DATA.CACHE=DIR). MODEL.NEW_CLASSIFIER=zero needs no features."
                    )
                open_memmap(table, "w+", np.float32, shape)
                open_memmap(complete, "w+", np.bool_, (-(-images // BLOCK),))
        table, complete = (open_memmap(file, "r+") for file in (table, complete))

        def compute(blocks: list[int]) -> None:
            starts = [range(BLOCK * one, min(BLOCK * (one + 1), images), batch) for one in blocks]
            plan = [np.arange(first, min(first + batch, of_block.stop)) for of_block in starts for first in of_block]
            broken = BrokenInValidation("image")
            loader = ValLoader(dataset, batch, 0, 1, workers, seeing.precision.device, broken, lambda *_: plan)
            try:
                for one in loader:
                    try:  # before a broken image, whose index is -1, is written as the last row
                        broken.raise_together(ALONE)
                    except AllRanksError as error:  # nothing is trained yet; a TrainingError ends others at once
                        raise (UserError if world.size == 1 else TrainingError)(str(error)) from None
                    rows = one.indices.cpu().numpy()
                    table[rows] = found = _columns(seeing, one.images).cpu().numpy()
                    if not np.isfinite(found).all():
                        raise UserError("The model has NaN or infinite features; nothing can be compared.")
                    if (last := int(rows[-1]) + 1) % BLOCK == 0 or last == images:
                        table.flush()
                        complete[(last - 1) // BLOCK] = True
                    between(len(rows))
            finally:
                loader.close()

        missing = np.flatnonzero(~complete).tolist()
        left = sum(min(BLOCK, images - BLOCK * one) for one in missing)
        what = f"no features of these very weights and images are kept yet, {left:,} are computed now in"
        what = what if left else "features are kept in"
        log.info(
            "%s: %s images; %s %s (%s).", TITLES[part_of(data, False)], f"{images:,}", what, folder, size_words(needed)
        )
        between(images - left)
        compute([one for one in missing if one % world.size == world.rank])  # others may have begun already
        while world.first and len(missing := np.flatnonzero(~complete)):  # of a process that is slower
            compute([int(missing[-1])])
        return Features(table, labels.astype(np.int64 if labels.ndim == 1 else np.float32), _pools(model, shape[1]))
    finally:
        model.train(training)


def _weights(model: nn.Module) -> str:
    """A hash of all but the classifier, which features do not depend on."""
    digest, heads = hashlib.sha256(), classifiers(model)
    for name, value in model.state_dict().items():
        if not is_inside(name, heads):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _images(dataset: ImageDataset) -> str:
    """A hash of names, labels and order, of pixels in memory, and of sizes and times of files."""
    digest, samples = hashlib.sha256(data_identity(dataset).encode()), dataset.single_images()
    if samples is not None and samples.stored == "files":
        for index in range(len(samples)):
            try:
                about = os.stat(samples.name(index))
                digest.update(f"{about.st_size} {about.st_mtime_ns} ".encode())
            except OSError:  # no file, such as an image that own code makes; loading reports one that is missing
                with contextlib.suppress(OSError, Unreadable):
                    digest.update(bytes(np.asarray(samples.read(index)).data))
    pixels = getattr(getattr(dataset, "samples", None), "pixels", None)
    if pixels is not None:
        digest.update(pixels.data)
    return digest.hexdigest()


class FeatureSet(Variant):
    """A split whose images are replaced by what the model's classifier sees of them."""

    def __init__(self, inner: ImageDataset, features: Features, pool: str, device: torch.device) -> None:
        super().__init__(inner)
        self._columns, self._labels, self._device, self.in_memory = features.of(pool), features.labels, device, True

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = np.array([index for _, index in keys])
        rows = np.maximum(indices, 0) % len(self._labels)  # not padding, nor a copy (variants.Repeated)
        columns = self._columns[rows], self._labels[rows], indices
        return Batch(*(torch.from_numpy(column).to(self._device) for column in columns))


def sees_features_alone(seeing: Seeing, data: DataConfig) -> bool:
    """Whether the model's output is that of its classifier for the features, as of `_of_features`."""
    model, size, device = seeing.model, data.IMAGE_SIZE, seeing.precision.device
    pixels = seeing.inputs(torch.zeros(1, data.IMAGE_CHANNELS, size, size, device=device))
    training, agrees = model.training, False
    model.eval()
    with torch.no_grad(), seeing.precision.autocast(training=False), contextlib.suppress(Exception):
        calls, classifier = list[Any](), model.get_submodule(classifiers(model)[0])
        with classifier.register_forward_hook(lambda _, *call: calls.append(call)):
            outputs = model(pixels)
        ((seen,), found), pooled = calls[0], pooled_features(model, pixels, pool_of(model))
        # What the classifier sees, not only its output: a new one may be all zeros.
        pairs = ([one.float().flatten(1) for one in pair] for pair in ((outputs, found), (seen, pooled)))
        agrees = all(torch.allclose(one, other, rtol=1e-2, atol=1e-2) for one, other in pairs)
    model.train(training)
    return agrees


def see_features(run: Run, ready: Validating, parts: TrainState, train_set: ImageDataset) -> ImageDataset | None:
    """Let training and validation read features in place of images. Returns the training split. A collective call.

    None: the model does more with its features than `_of_features`.
    """
    config, model, world = run.config, ready.model, run.world
    pool, kind = pool_of(model), type(model).__name__
    if not sees_features_alone(ready, config.DATA) or len(classifiers(model)) > 1:
        log.info("The features of this %s are not kept: its classifier is not applied to them alone.", kind)
        return None
    # One backbone's features are those of all: an average may be of earlier updates, which trained it.
    if len({_weights(module) for module in parts.weights.values()}) > 1:
        log.info("The features of this %s are not kept: the EMA has another backbone.", kind)
        return None

    def features(dataset: ImageDataset, part: Part) -> FeatureSet:
        data = config.DATA.model_copy(update={"PART": part})
        images = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, run.device)
        # The first process is here once all are complete; one on a machine with another disk computes its own then.
        found = on_every_rank(world, lambda: features_of(ready, config, images, data, world))
        found = found if world.first else features_of(ready, config, images, data)
        return FeatureSet(dataset, found, pool, run.device)

    train_set, ready.val_set = features(train_set, "train"), features(ready.val_set, "val")
    ready.val_loader = ValLoader(ready.val_set, config.DATA.val_batch, world.rank, world.size, 0, run.device)
    for module in parts.weights.values():
        module.forward = MethodType(_of_features, module)
    ready.inputs = parts.inputs = nn.Identity()
    return train_set


def _of_features(self: nn.Module, seen: Tensor) -> Tensor:
    classifier = self.get_submodule(classifiers(self)[0])
    return classifier(seen[..., None, None] if isinstance(classifier, nn.Conv2d) else seen).flatten(1)
