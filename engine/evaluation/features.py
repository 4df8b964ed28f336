"""Features of all images of a split, computed once and kept on the disk: for -probe, -knn, and frozen backbones.

They are computed in blocks, and a second file says which images are complete. So a killed process loses one block, any
number of processes share the work, and memory holds what is read of a map.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn

from datasets import Batch, ImageDataset, ValLoader, auto_workers, open_dataset
from datasets.base import TITLES, Key, Part, Samples, Unreadable, part_of
from datasets.damage import BrokenInValidation
from datasets.loading.order import data_identity
from datasets.variants import Variant
from engine.amp.precision import Precision
from engine.checkpoint.saver import size_words
from engine.inputs.batches import input_of
from engine.machine.device import Run
from engine.machine.late_compiler import uncompiled
from engine.update import TrainState
from models.parts import classifiers, in_eval_mode, is_inside
from models.sizes import sizes_of
from utils.cache import cache_folder, process_lock
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World, on_every_rank
from utils.errors import AllRanksError, TrainingError, UserError
from utils.log import log
from utils.own_code import executed
from utils.program import started_as
from utils.progress import Progress
from vitamp.pooling import BLOCKS, POOLED, pool_of, pooled_features, pools_of

BLOCK = 512
"""Images"""
AT_ONCE = 1 << 13
"""Rows that are read at once"""
# Files of a folder of features
TABLE = "features.npy"
COMPLETE = "complete.npy"
"""Which images are complete"""
DIGESTS = "images.npy"
"""Hashes of their bytes"""
ABOUT = "about.json"


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
    groups: list[str]
    """As `ImageDataset.groups`"""

    def of(self, pool: str) -> np.ndarray:
        return self.table[:, self.pools[pool]]

    def rows(self, pool: str, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features, labels and indices of some images after others."""
        indices = np.arange(len(self.table))
        for first in range(0, len(self.table), AT_ONCE):
            here = slice(first, first + AT_ONCE)
            columns = np.array(self.of(pool)[here]), self.labels[here], indices[here]
            features, labels, numbers = (torch.from_numpy(column).to(device) for column in columns)
            yield features, labels, numbers


@torch.no_grad()
def columns_of(seeing: Seeing, images: Tensor) -> Tensor:
    """Of uint8 images: what timm's classifier sees, and with tokens the widest pooling, which has all others."""
    with uncompiled(), seeing.precision.autocast(training=False):
        pools = dict.fromkeys((POOLED, pools_of(seeing.model)[-1]))
        return pooled_features(seeing.model, seeing.inputs(images.to(seeing.precision.device)), *pools)


def _pools(model: Any, end: int) -> dict[str, slice]:
    """Where each pooling is in `columns_of`, which are `end` in number."""
    known = pools_of(model)
    width = getattr(model, "embed_dim", 0)
    blocks = min(BLOCKS, len(getattr(model, "blocks", ())))
    widths = {POOLED: 0, "mean": 1, "both": 2, "blocks": 1 + blocks}
    first = end - widths[known[-1]] * width
    both = end - 2 * width
    columns = {
        POOLED: slice(0, first),
        "class": slice(both, end - width),
        "mean": slice(end - width, end),
        "both": slice(both, end),
        "blocks": slice(first, end),
    }
    return {pool: columns[pool] for pool in known}


def features_of(
    seeing: Seeing, config: Config, dataset: ImageDataset, data: DataConfig, world: World = ALONE
) -> Features:
    """The features of `dataset`, which `data` describes; computed as far as they are not kept yet.

    Several processes share the work; only the first one waits until it is done.
    """
    images = len(dataset)
    labels = dataset.sample_labels()
    workers = auto_workers(world, config.DATA.NUM_WORKERS)
    with in_eval_mode(seeing.model):
        width = columns_of(seeing, torch.zeros(1, *data.shape, dtype=torch.uint8)).shape[1]
        about = _about(seeing, config, data)
        kind = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        folder = cache_folder(data, f"features/{kind}-{contents_of(dataset)[:16]}")
        size = size_words(4 * images * width)
        _make_files(folder, about, dataset, width)
        computing = _Computing(seeing, dataset, folder, min(config.DATA.val_batch, BLOCK), workers)
        missing = computing.missing()
        if world.size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()  # all have counted before one computes
        what = "features are kept in"
        if len(missing):
            kept = f"features of {images - len(missing):,} are kept"
            if len(missing) == images:
                kept = f"no features of these very weights and images are kept yet{_of_others(folder, about)}"
            what = f"{kept}, {len(missing):,} are computed now in"
        log.info("%s: %s images; %s %s (%s).", TITLES[part_of(data, False)], f"{images:,}", what, folder, size)
        with Progress(None, len(missing), "images", "features", shown=world.first) as bar:
            # Others may have begun already.
            computing.compute(missing[missing // BLOCK % world.size == world.rank], bar)
            # Those of a process that is slower, or that could not read them
            while world.first and len(missing := computing.missing()):
                computing.compute(missing[missing // BLOCK == missing[-1] // BLOCK], bar)
        if world.first:
            try:
                computing.broken.raise_together(ALONE)
            except AllRanksError as error:  # nothing is trained yet; a TrainingError ends others at once
                raise (UserError if world.size == 1 else TrainingError)(str(error)) from None
    labels = labels.astype(np.int64 if labels.ndim == 1 else np.float32)
    return Features(computing.table, labels, _pools(seeing.model, width), dataset.groups())


def _make_files(folder: Path, about: dict[str, Any], dataset: ImageDataset, width: int) -> None:
    """Make the files for these features, if none are there yet. UserError if the disk has no room."""
    needed = 4 * len(dataset) * width
    free = shutil.disk_usage(folder).free
    with process_lock(folder / ".lock", "makes room for features"):
        if (folder / COMPLETE).exists():
            return
        if needed > free:
            raise UserError(
                f"{folder}: the features take {size_words(needed)}, and {size_words(free)} are free. Name a "
                "folder on a larger disk (DATA.CACHE=DIR). MODEL.NEW_CLASSIFIER=zero needs no features."
            )
        (folder / ABOUT).write_text(json.dumps(about))
        empty = open_memmap(folder / TABLE, "w+", np.float32, (len(dataset), width))
        np.save(folder / "new.npy", _copy_kept(dataset.single_images(), folder, empty))
        os.replace(folder / "new.npy", folder / COMPLETE)


class _Computing:
    """Features in the files of a folder."""

    def __init__(self, seeing: Seeing, dataset: ImageDataset, folder: Path, batch: int, workers: int) -> None:
        self.seeing = seeing
        self.dataset = dataset
        self.table = open_memmap(folder / TABLE, "r+")
        self.complete = open_memmap(folder / COMPLETE, "r+")
        self.batch = batch
        self.workers = workers
        self.broken = BrokenInValidation("image")

    def missing(self) -> np.ndarray:
        """Images without features, but for those that could not be read."""
        return np.setdiff1d(np.flatnonzero(~self.complete), [*self.broken.images])

    def compute(self, rows: np.ndarray, bar: Progress) -> None:
        """Of these images, in blocks."""
        plan = list[np.ndarray]()
        ends = set[int]()
        for block in np.split(rows, np.flatnonzero(np.diff(rows // BLOCK)) + 1):
            if len(block):
                ends.add(int(block[-1]))
                plan += [block[first : first + self.batch] for first in range(0, len(block), self.batch)]
        device = self.seeing.precision.device
        loader = ValLoader(self.dataset, self.batch, 0, 1, self.workers, device, self.broken, lambda *_: plan)
        computed = list[np.ndarray]()
        try:
            for wanted, one in zip(plan, loader, strict=True):
                read = one.indices.cpu().numpy() >= 0  # -1 of a broken image
                found = columns_of(self.seeing, one.images).cpu().numpy()[read]
                computed.append(wanted[read])
                self.table[wanted[read]] = found
                if not np.isfinite(found).all():
                    raise UserError("The model has NaN or infinite features; nothing can be compared.")
                if int(wanted[-1]) in ends:
                    self.table.flush()
                    self.complete[np.concatenate(computed)] = True
                    computed.clear()
                bar.update(len(wanted))
        finally:
            loader.close()


def _about(seeing: Seeing, config: Config, data: DataConfig) -> dict[str, Any]:
    """What the features of an image depend on."""
    amp = config.AMP.model_dump(mode="json", include={"CUSTOM_WHITE_LIST", "CUSTOM_BLACK_LIST", "FP32_MODULES"})
    about = {
        "weights": [config.MODEL.NAME, str(sizes_of(seeing.model)), _weights(seeing.model)],
        "precision": [seeing.precision.name, amp if seeing.precision.level != "O0" else {}],
        "preprocessing": input_of(data),
    }
    if config.USE:  # the same weights, and perhaps another forward
        about["own code"] = [sorted(own.sha256 for own, _ in executed.values()), list(config.USE)]
    return json.loads(json.dumps(about))  # as it is read again


def _of_others(folder: Path, about: dict[str, Any]) -> str:
    """Why kept features of the same weights are not used."""
    for file in folder.parent.glob(f"*/{ABOUT}"):
        theirs = json.loads(file.read_text())
        differing = [key for key in about if theirs.get(key) != about[key]]
        if differing and theirs["weights"] == about["weights"]:
            return f" (those in {file.parent.name} have another {' and '.join(differing)})"
    return ""


def _copy_kept(samples: Samples | None, folder: Path, table: np.ndarray) -> np.ndarray:
    """Copy features of the same images from other lists of them, such as the data's copy. Returns which were found."""
    found = np.zeros(len(table), bool)
    if samples is None or samples.remote:
        return found
    digests = np.zeros(len(table), "S16")
    for index in Progress(range(len(table)), len(table), "images", "reading"):
        with contextlib.suppress(OSError, Unreadable):  # the loader says so
            read = samples.read(index)
            shape = "" if isinstance(read, bytes) else str(read.shape)
            digests[index] = hashlib.sha256(shape.encode() + bytes(read)).digest()
    np.save(folder / DIGESTS, digests)
    for other in folder.parent.glob(f"{folder.name.partition('-')[0]}-*/{COMPLETE}"):
        if not other.with_name(DIGESTS).exists():
            continue
        complete, theirs, rows = (np.load(other.with_name(name), "r") for name in (COMPLETE, DIGESTS, TABLE))
        order = np.argsort(theirs)
        place = order[np.searchsorted(theirs, digests, sorter=order).clip(max=len(order) - 1)]
        same = (theirs[place] == digests) & (digests != b"") & complete[place]
        table[same] = rows[place[same]]
        found[same] = True
    return found


def _weights(model: nn.Module) -> str:
    """A hash of all but the classifier, which features do not depend on."""
    digest = hashlib.sha256()
    heads = classifiers(model)
    for name, value in model.state_dict().items():
        if not is_inside(name, heads):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def contents_of(dataset: ImageDataset) -> str:
    """A hash of names, labels and order, of pixels in memory, and of sizes and times of files."""
    digest = hashlib.sha256(data_identity(dataset).encode())
    samples = dataset.single_images()
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
        self._columns = features.of(pool)
        self._labels = features.labels
        self._device = device
        self.in_memory = True

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = np.array([index for _, index in keys])
        rows = np.maximum(indices, 0) % len(self._labels)  # not padding, nor a copy (variants.Repeated)
        columns = self._columns[rows], self._labels[rows], indices
        return Batch(*(torch.from_numpy(column).to(self._device) for column in columns))


def sees_features_alone(seeing: Seeing, data: DataConfig) -> bool:
    """Whether the model's output is that of its classifier for the features, as of `_of_features`."""
    model = seeing.model
    pixels = seeing.inputs(torch.zeros(1, *data.shape, device=seeing.precision.device))
    calls = list[Any]()
    autocast = seeing.precision.autocast(training=False)
    with torch.no_grad(), autocast, in_eval_mode(model), contextlib.suppress(Exception):
        classifier = model.get_submodule(classifiers(model)[0])
        with classifier.register_forward_hook(lambda _, *call: calls.append(call)):
            outputs = model(pixels)
        (seen,), found = calls[0]
        # What the classifier sees, not only its output: a new one may be all zeros.
        pooled = pooled_features(model, pixels, pool_of(model))
        return _are_close(outputs, found) and _are_close(seen, pooled)
    return False


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float().flatten(1), other.float().flatten(1), rtol=1e-2, atol=1e-2)


def see_features(
    run: Run, ready: Validating, parts: TrainState, train_set: ImageDataset, dry: bool
) -> ImageDataset | None:
    """Let training and validation read features in place of images. Returns the training split. A collective call.

    None: the images change, it is a `dry` run, or the model does more with its features than `_of_features`.
    """
    config = run.config
    epochs = config.TRAIN.NUM_EPOCHS
    if not config.trains_on_features and epochs > 1:
        log.info(
            "MODEL.FREEZE backbone: it is computed in each of %d epochs, because the images change at random. "
            "%s -probe computes it once, and fits the classifier in seconds.",
            epochs,
            started_as("scripts/evaluate.py"),
        )
    if dry or not config.trains_on_features:
        return None
    world = run.world
    model = ready.model
    pool = pool_of(model)
    kind = type(model).__name__
    if not sees_features_alone(ready, config.DATA) or len(classifiers(model)) > 1:
        log.info("The features of this %s are not kept: its classifier is not applied to them alone.", kind)
        return None
    # One backbone's features are those of all: an average may be of earlier updates, which trained it.
    if len({_weights(module) for module in parts.weights.values()}) > 1:
        log.info("The features of this %s are not kept: the EMA has another backbone.", kind)
        return None

    def features(dataset: ImageDataset, part: Part) -> FeatureSet:
        data = config.DATA.changed(PART=part)
        images = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, run.device)
        # The first process is here once all are complete; one on a machine with another disk computes its own then.
        found = on_every_rank(world, lambda: features_of(ready, config, images, data, world))
        found = found if world.first else features_of(ready, config, images, data)
        return FeatureSet(dataset, found, pool, run.device)

    train_set = features(train_set, "train")
    ready.val_set = features(ready.val_set, "val")
    ready.val_loader = ValLoader(ready.val_set, config.DATA.val_batch, world.rank, world.size, 0, run.device)
    for module in parts.weights.values():
        module.forward = MethodType(_of_features, module)
    ready.inputs = nn.Identity()
    parts.inputs = ready.inputs
    return train_set


def _of_features(self: nn.Module, seen: Tensor) -> Tensor:
    classifier = self.get_submodule(classifiers(self)[0])
    return classifier(seen[..., None, None] if isinstance(classifier, nn.Conv2d) else seen).flatten(1)
