"""Validation: each sample counts once, with any number of processes."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from datasets import ImageDataset
from datasets.base import name_prefix
from engine.machine.late_compiler import uncompiled
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.setup import Ready
from engine.task.base import Metrics
from models.parts import in_eval_mode
from utils.config.schema import DataConfig
from utils.distributed.world import World
from utils.log import log
from utils.record.predictions import GROUPS, PREDICTIONS, write_predictions
from vitamp.metrics import KNN, WeightSet


@torch.no_grad()  # not inference mode: fp8 layers do not run in it
def validate(ready: Ready, model: nn.Module, world: World, between: Callable[[], None] = lambda: None) -> Metrics:
    """Measure all metrics of `model` on the validation split. A collective call.

    `model`: the run's own, or one of the same shape, such as the EMA. `between`: is called before each batch, and may
    raise an error to end the validation; by default it does nothing.
    """
    loader = ready.val_loader
    precision = ready.precision
    tally = ready.task.tally(len(ready.val_set), precision.device)
    if ready.task.own_metrics:
        from engine.task.own_code import WithOwnMetrics

        tally = WithOwnMetrics(tally, ready.task, len(ready.val_set), precision.device)
    try:
        with in_eval_mode(model):
            for batch in loader:
                between()
                # In eager mode: the shape of these batches is not worth another compiled graph.
                with uncompiled(), precision.autocast(training=False):
                    logits = model(ready.inputs(batch.images))
                tally.add(logits.float(), batch)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(IN_VALIDATION)
        raise
    if loader.broken is not None:
        loader.broken.raise_together(world)
    metrics = tally.metrics(world)
    if ready.neighbours is None:
        return metrics
    accuracy = ready.neighbours.accuracy(model, ready.inputs, precision, between)
    return replace(metrics, more={**metrics.more, KNN.name: accuracy})


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return `model` if it is on `device`; else a copy of it there, such as of an EMA in host memory.

    It is not moved there and back, since that would replace the tensors that the EMA updates.
    """
    elsewhere = next(model.parameters()).device.type != device.type
    return copy.deepcopy(model).to(device) if elsewhere else model


def keep_predictions(
    folder: Path, val_set: ImageDataset, data: DataConfig, metrics: Mapping[WeightSet, Metrics], update: int
) -> None:
    """Write the predictions of this validation for each image into the run's folder, to compare runs by them.

    Rank 0 calls this. `metrics`: those of each set of weights, which contain its predictions. `update`: number of the
    last update. A full disk causes only a warning, and does not end the training.
    """
    predictions = dict[str, np.ndarray]()
    for which, metrics_of_set in metrics.items():
        predictions |= {f"{which.prefix}{name}": column for name, column in metrics_of_set.predictions.items()}
    if not predictions:
        return
    # Another run recognises the images by these names: file names without the folder of the data, since another
    # machine may have the data in another folder. Images without files have their numbers as names.
    samples = val_set.single_images()
    prefix = name_prefix(data)
    names = map(str, range(len(val_set)))
    if samples is not None:
        names = (samples.name(index).removeprefix(prefix) for index in range(len(samples)))
    labels = val_set.sample_labels()
    smallest_type = np.min_scalar_type(int(labels.max(initial=0)))
    groups = val_set.groups()
    try:
        table = {"names": _hashes(names), "labels": labels.astype(smallest_type)}
        if groups:
            table[GROUPS] = _hashes(groups)
        write_predictions(folder, update, table | predictions)
    except OSError as error:
        log.warning("%s: cannot be written (%s).", folder / PREDICTIONS, error.strerror)


def _hashes(names: Iterable[str]) -> np.ndarray:
    """Return a hash of 8 bytes per name, as one array: names would take more room."""
    digests = (hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), np.uint64)
