"""Computes features of all images of a split once, and keeps them on the disk: for -probe, -knn and frozen backbones.

They are computed in blocks of images, and a second file says which images are complete. So a killed process loses one
block, and any number of processes share the work. The files are memory maps: memory holds only what is read.
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
from utils.log import DETAIL, log
from utils.own_code import executed_own_files
from utils.program import started_as
from utils.progress import Progress
from vitamp.pooling import BLOCKS, POOLED, pool_of, pooled_features, pools_of

BLOCK = 512
"""Images per block"""
AT_ONCE = 1 << 13
"""Rows that are read at once"""
# Files of a folder of features
TABLE = "features.npy"
COMPLETE = "complete.npy"
"""Whether the features of each image are complete"""
DIGESTS = "images.npy"
"""Hash of each image's bytes"""
ABOUT = "about.json"
"""What the features depend on besides the images"""


class Seeing(Protocol):
    """A model with its normalisation and its precision: all that features are computed by."""

    model: nn.Module
    inputs: nn.Module
    precision: Precision


class Validating(Seeing, Protocol):
    """The same, with the images that it is validated on."""

    val_set: ImageDataset
    val_loader: ValLoader


class Features(NamedTuple):
    """Features and labels of all images of a split."""

    table: np.ndarray
    """Images x the columns of all poolings, float32: a memory map"""
    labels: np.ndarray
    """As in `Samples.labels`"""
    pools: dict[str, slice]
    """The columns of each pooling"""
    groups: list[str]
    """As `ImageDataset.groups`"""

    def of(self, pool: str) -> np.ndarray:
        """Return the features of a pooling, images x columns."""
        return self.table[:, self.pools[pool]]

    def rows(self, pool: str, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield features, labels and indices of the images, a chunk at a time."""
        indices = np.arange(len(self.table))
        for start in range(0, len(self.table), AT_ONCE):
            chunk = slice(start, start + AT_ONCE)
            arrays = np.array(self.of(pool)[chunk]), self.labels[chunk], indices[chunk]
            features, labels, chunk_indices = (torch.from_numpy(array).to(device) for array in arrays)
            yield features, labels, chunk_indices


@torch.no_grad()
def columns_of(seeing: Seeing, images: Tensor) -> Tensor:
    """Compute one row of features for each of some uint8 images. `_pools` says which columns each pooling has.

    The first columns are the pooling that timm's classifier sees. For a model with tokens, the columns of the widest
    pooling follow, which contain all other poolings.
    """
    with uncompiled(), seeing.precision.autocast(training=False):
        widest = pools_of(seeing.model)[-1]  # `pools_of` lists the widest one last
        pools = [POOLED] if widest == POOLED else [POOLED, widest]
        return pooled_features(seeing.model, seeing.inputs(images.to(seeing.precision.device)), *pools)


def _pools(model: Any, column_count: int) -> dict[str, slice]:
    """Return the columns of each pooling that the model has, among the `column_count` columns of `columns_of`.

    The columns are, in this order: the pooling that timm's classifier sees, of any width; the class token after each of
    the last blocks, of which the last is the class token itself; and the mean of the patches. Each class token and the
    mean have `embed_dim` columns. The widest pooling (the last of `pools_of`) ends with the last column.
    """
    pools = pools_of(model)
    width = getattr(model, "embed_dim", 0)
    blocks = min(BLOCKS, len(getattr(model, "blocks", ())))
    # Number of class tokens and means in the widest pooling, whichever that is.
    tokens_in_widest = {POOLED: 0, "mean": 1, "both": 2, "blocks": blocks + 1}
    widest_start = column_count - tokens_in_widest[pools[-1]] * width
    mean_start = column_count - width
    class_start = column_count - 2 * width
    columns = {
        POOLED: slice(0, widest_start),
        "class": slice(class_start, mean_start),
        "mean": slice(mean_start, column_count),
        "both": slice(class_start, column_count),
        "blocks": slice(widest_start, column_count),
    }
    return {pool: columns[pool] for pool in pools}


def features_of(
    seeing: Seeing, config: Config, dataset: ImageDataset, data: DataConfig, world: World = ALONE
) -> Features:
    """Return the features of all images of `dataset`. Features that the disk does not have yet are computed.

    `config`: settings of the run. `data`: the settings of DATA that `dataset` was opened with. `world`: processes that
    share the work; only rank 0 waits until all features are complete.
    """
    images = len(dataset)
    labels = dataset.sample_labels()
    workers = auto_workers(world, config.DATA.NUM_WORKERS)
    with in_eval_mode(seeing.model):
        width = columns_of(seeing, torch.zeros(1, *data.shape, dtype=torch.uint8)).shape[1]
        about = _about(seeing, config, data)
        about_hash = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        folder = cache_folder(data, f"features/{about_hash}-{contents_of(dataset)[:16]}")
        size = size_words(4 * images * width)  # float32
        _make_files(folder, about, dataset, width)
        computing = _Computing(seeing, dataset, folder, min(config.DATA.val_batch, BLOCK), workers)
        missing = computing.missing()
        if world.size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()  # until all processes have made their lists, none computes
        state = "features are kept in"
        if len(missing):
            kept = f"features of {images - len(missing):,} are kept"
            if len(missing) == images:
                kept = f"no features of these very weights and images are kept yet{_why_not_others(folder, about)}"
            state = f"{kept}, {len(missing):,} are computed now in"
        title = TITLES[part_of(data, False)]
        log.info("%s: %s images; %s %s (%s).", title, f"{images:,}", state, folder, size, extra=DETAIL)
        with Progress(None, len(missing), "images", "features", shown=world.first) as bar:
            # Each process takes every N-th block, for N processes.
            is_of_this_rank = missing // BLOCK % world.size == world.rank
            computing.compute(missing[is_of_this_rank], bar)
            # Then rank 0 computes what is still missing, block by block from the last one on: blocks of a process that
            # is slower, or that could not read them.
            while world.first and len(missing := computing.missing()):
                is_in_last_block = missing // BLOCK == missing[-1] // BLOCK
                computing.compute(missing[is_in_last_block], bar)
        if world.first:
            try:
                computing.broken.raise_together(ALONE)  # if any image could not be read
            except AllRanksError as error:
                # Only this process has the error, so all ranks cannot raise it. A TrainingError ends the others at
                # once.
                error_type = UserError if world.size == 1 else TrainingError
                raise error_type(str(error)) from None
    labels = labels.astype(np.int64 if labels.ndim == 1 else np.float32)
    return Features(computing.table, labels, _pools(seeing.model, width), dataset.groups())


def _make_files(folder: Path, about: dict[str, Any], dataset: ImageDataset, width: int) -> None:
    """Make the files of a folder of features, unless they exist. Raises UserError if the disk has no room.

    The table of features is empty at first, but for features that another folder has of the same images and weights:
    these are copied. A second file marks the images whose features are complete. `about`: what the features depend on
    (`_about`). `width`: number of columns.
    """
    needed = 4 * len(dataset) * width  # bytes, of float32
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
        table = open_memmap(folder / TABLE, "w+", np.float32, (len(dataset), width))
        is_complete = _copy_from_other_folders(dataset.single_images(), folder, table)
        # Renamed at last, since this file shows that all others exist.
        np.save(folder / "new.npy", is_complete)
        os.replace(folder / "new.npy", folder / COMPLETE)


class _Computing:
    """Computes features into the files of a folder."""

    def __init__(self, seeing: Seeing, dataset: ImageDataset, folder: Path, batch: int, workers: int) -> None:
        self.seeing = seeing
        self.dataset = dataset
        self.table = open_memmap(folder / TABLE, "r+")
        self.complete = open_memmap(folder / COMPLETE, "r+")
        self.batch = batch
        self.workers = workers
        self.broken = BrokenInValidation("image")

    def missing(self) -> np.ndarray:
        """Return the indices of images without features, but for those that could not be read."""
        return np.setdiff1d(np.flatnonzero(~self.complete), [*self.broken.images])

    def compute(self, wanted: np.ndarray, bar: Progress) -> None:
        """Compute the features of some images, and mark them as complete block by block.

        `wanted`: indices of the images, in ascending order. `bar`: is advanced by the number of images.
        """
        # Divide the images into batches that do not cross the end of a block.
        batches = list[np.ndarray]()
        block_ends = set[int]()
        starts = np.flatnonzero(np.diff(wanted // BLOCK)) + 1
        for block in np.split(wanted, starts):
            if len(block):
                block_ends.add(int(block[-1]))
                batches += [block[start : start + self.batch] for start in range(0, len(block), self.batch)]
        device = self.seeing.precision.device
        loader = ValLoader(
            self.dataset,
            self.batch,
            rank=0,
            world=1,
            workers=self.workers,
            device=device,
            broken=self.broken,
            shard=lambda *_: batches,
        )
        computed_in_block = list[np.ndarray]()
        try:
            for indices, batch in zip(batches, loader, strict=True):
                is_readable = batch.indices.cpu().numpy() >= 0  # a broken image has the index -1
                readable = indices[is_readable]
                features = columns_of(self.seeing, batch.images).cpu().numpy()[is_readable]
                computed_in_block.append(readable)
                self.table[readable] = features
                if not np.isfinite(features).all():
                    raise UserError("The model has NaN or infinite features; nothing can be compared.")
                # At the end of a block, the table goes to the disk. Only then are its images marked as complete.
                if int(indices[-1]) in block_ends:
                    self.table.flush()
                    self.complete[np.concatenate(computed_in_block)] = True
                    computed_in_block.clear()
                bar.update(len(indices))
        finally:
            loader.close()


def _about(seeing: Seeing, config: Config, data: DataConfig) -> dict[str, Any]:
    """Return all that the features of an image depend on besides the image: weights, precision, preprocessing, code."""
    amp = config.AMP.model_dump(mode="json", include={"CUSTOM_WHITE_LIST", "CUSTOM_BLACK_LIST", "FP32_MODULES"})
    about = {
        "weights": [config.MODEL.NAME, str(sizes_of(seeing.model)), _hash_of_backbone(seeing.model)],
        "precision": [seeing.precision.name, amp if seeing.precision.level != "O0" else {}],
        "preprocessing": input_of(data),
    }
    if config.USE:  # the user's own code may compute otherwise with the same weights
        about["own code"] = [sorted(own.sha256 for own, _ in executed_own_files.values()), list(config.USE)]
    # Lists in place of tuples, as the file has them, so that both can be compared.
    return json.loads(json.dumps(about))


def _why_not_others(folder: Path, about: dict[str, Any]) -> str:
    """Say why features that another folder has of the same weights are not used; '' if there is no such folder.

    `about`: what the features of `folder` depend on (`_about`). The others may have been computed in another precision,
    for example.
    """
    for file in folder.parent.glob(f"*/{ABOUT}"):
        other = json.loads(file.read_text())
        differing = [key for key in about if other.get(key) != about[key]]
        same_weights = other["weights"] == about["weights"]
        if differing and same_weights:
            return f" (those in {file.parent.name} have another {' and '.join(differing)})"
    return ""


def _copy_from_other_folders(samples: Samples | None, folder: Path, table: np.ndarray) -> np.ndarray:
    """Copy features of the same images from other folders into `table`, and return for each image whether it has some.

    Another folder has features of the same images if they come from a copy of the data set, for example. Images are the
    same if their bytes are. `samples`: the images, by the rows of the table; None if they cannot be read singly.
    """
    is_copied = np.zeros(len(table), bool)
    if samples is None or samples.remote:
        return is_copied
    digests = np.zeros(len(table), "S16")  # numpy keeps the first 16 of the 32 bytes, which is enough
    for index in Progress(range(len(table)), len(table), "images", "reading"):
        with contextlib.suppress(OSError, Unreadable):  # the loader reports an image that cannot be read
            content = samples.read(index)
            shape = "" if isinstance(content, bytes) else str(content.shape)
            digests[index] = hashlib.sha256(shape.encode() + bytes(content)).digest()
    np.save(folder / DIGESTS, digests)
    about_hash = folder.name.partition("-")[0]
    for complete_file in folder.parent.glob(f"{about_hash}-*/{COMPLETE}"):
        if not complete_file.with_name(DIGESTS).exists():
            continue
        names = (COMPLETE, DIGESTS, TABLE)
        complete, other_digests, other_table = (np.load(complete_file.with_name(name), "r") for name in names)
        # For each image, look up the row there that would have its digest in sorted order. `same` says where it does.
        order = np.argsort(other_digests)
        place_in_order = np.searchsorted(other_digests, digests, sorter=order).clip(max=len(order) - 1)
        row = order[place_in_order]
        is_read = digests != b""
        same = (other_digests[row] == digests) & is_read & complete[row]
        table[same] = other_table[row[same]]
        is_copied[same] = True
    return is_copied


def _hash_of_backbone(model: nn.Module) -> str:
    """Return a hash of all weights but those of the classifier, which features do not depend on."""
    digest = hashlib.sha256()
    names_of_classifiers = classifiers(model)
    for name, value in model.state_dict().items():
        if not is_inside(name, names_of_classifiers):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def contents_of(dataset: ImageDataset) -> str:
    """Return a hash that changes if any image of the data set does. Files are not read for it.

    It covers names, labels and order, pixels in memory, and sizes and times of files (or hashes of tar files).
    """
    digest = hashlib.sha256(data_identity(dataset).encode())
    samples = dataset.single_images()
    if samples is not None:
        for index in range(len(samples)):
            try:
                stamp = samples.stamp(index)
                if stamp:
                    digest.update(f"{stamp} ".encode())
            except OSError:
                # There is no file of that name: the user's own code may make the image, so its pixels count. If a file
                # is missing, loading reports it.
                with contextlib.suppress(OSError, Unreadable):
                    digest.update(bytes(np.asarray(samples.read(index)).data))
    samples_in_memory = getattr(dataset, "samples", None)
    pixels = getattr(samples_in_memory, "pixels", None)
    if pixels is not None:
        digest.update(pixels.data)
    return digest.hexdigest()


class FeatureSet(Variant):
    """A split whose images are replaced by their features, which the model's classifier sees."""

    def __init__(self, inner: ImageDataset, features: Features, pool: str, device: torch.device) -> None:
        super().__init__(inner)
        self._features = features.of(pool)
        self._labels = features.labels
        self._device = device
        self.in_memory = True

    def __getitems__(self, keys: list[Key]) -> Batch:
        indices = np.array([index for _, index in keys])
        # Padding has index -1, and gets any row. Copies of images have higher indices (variants.Repeated).
        rows = np.maximum(indices, 0) % len(self._labels)
        arrays = self._features[rows], self._labels[rows], indices
        return Batch(*(torch.from_numpy(array).to(self._device) for array in arrays))


def sees_features_alone(seeing: Seeing, data: DataConfig) -> bool:
    """Whether the model only applies its classifier to its features, so that features can take the place of images.

    This is tried with a black image: the input of the classifier must be the features, and its output the model's.
    False if an error occurs, as for a model without a classifier.
    """
    model = seeing.model
    pixels = seeing.inputs(torch.zeros(1, *data.shape, device=seeing.precision.device))
    calls = list[Any]()

    def record(_module: nn.Module, inputs: Any, output: Any) -> None:
        calls.append((inputs, output))

    autocast = seeing.precision.autocast(training=False)
    with torch.no_grad(), autocast, in_eval_mode(model), contextlib.suppress(Exception):
        classifier = model.get_submodule(classifiers(model)[0])
        with classifier.register_forward_hook(record):
            outputs = model(pixels)
        (classifier_input,), classifier_output = calls[0]
        # The input is compared too: the output of a new classifier may be all zeros.
        pooled = pooled_features(model, pixels, pool_of(model))
        return _are_close(outputs, classifier_output) and _are_close(classifier_input, pooled)
    return False  # an error was suppressed


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Whether two results agree up to rounding in half precision."""
    return torch.allclose(first.float().flatten(1), second.float().flatten(1), rtol=1e-2, atol=1e-2)


def see_features(
    run: Run, ready: Validating, parts: TrainState, train_set: ImageDataset, dry: bool
) -> ImageDataset | None:
    """Let training and validation read features in place of images, if only the classifier is trained.

    Returns the training split of features. The validation split and its loader in `ready`, the normalisation in `ready`
    and `parts`, and the forward of the models in `parts` are replaced to match. A collective call.

    Returns None, and changes nothing, if the backbone must compute in each epoch: for images that change at random, in
    a `dry` run, or for a model that does more with its features than to apply its classifier.
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
    # All sets of weights must have the same backbone. The EMA has another one if earlier updates trained it.
    hashes = {_hash_of_backbone(module) for module in parts.weights.values()}
    if len(hashes) > 1:
        log.info("The features of this %s are not kept: the EMA has another backbone.", kind)
        return None

    def to_features(dataset: ImageDataset, part: Part) -> FeatureSet:
        """Compute the features of a split on all ranks together, and return them in place of its images."""
        data = config.DATA.changed(PART=part)
        images = open_dataset(data, False, config.MODEL.NUM_CLASSES, config.SEED, run.device)
        features_of_split = on_every_rank(world, lambda: features_of(ready, config, images, data, world))
        # Rank 0 has waited until all features are complete. The other ranks have not, so they read all again; a rank
        # on a machine with another disk computes what is missing there.
        if not world.first:
            features_of_split = features_of(ready, config, images, data)
        return FeatureSet(dataset, features_of_split, pool, run.device)

    train_set = to_features(train_set, "train")
    ready.val_set = to_features(ready.val_set, "val")
    batch = config.DATA.val_batch
    ready.val_loader = ValLoader(ready.val_set, batch, world.rank, world.size, workers=0, device=run.device)
    for module in parts.weights.values():
        module.forward = MethodType(_classify_features, module)
    ready.inputs = nn.Identity()
    parts.inputs = ready.inputs
    return train_set


def _classify_features(self: nn.Module, features: Tensor) -> Tensor:
    """Forward of a model that gets features in place of images: its classifier alone."""
    classifier = self.get_submodule(classifiers(self)[0])
    inputs = features[..., None, None] if isinstance(classifier, nn.Conv2d) else features
    return classifier(inputs).flatten(1)
