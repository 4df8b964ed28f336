"""Validation: each sample counts once, with any number of processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from engine.machine.late_compiler import uncompiled
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.setup import Ready
from engine.task.base import Metrics
from utils.distributed.world import World
from vitamp.metrics import KNN


@torch.no_grad()  # not inference mode: fp8 layers do not run in it
def validate(ready: Ready, model: nn.Module, world: World, between: Callable[[], None] = lambda: None) -> Metrics:
    """All metrics of the validation split, of `model`, which is the run's own or has its shape. A collective call.

    `between` is called before each batch, and may raise to end the validation.
    """
    loader, task, precision = ready.val_loader, ready.task, ready.precision
    tally = task.tally(len(ready.val_set), precision.device)
    if task.own_metrics:
        from engine.task.own_code import WithOwnMetrics

        tally = WithOwnMetrics(tally, task, len(ready.val_set), precision.device)
    training = model.training
    model.eval()
    try:
        for batch in loader:
            between()
            with uncompiled(), precision.autocast(training=False):
                logits = model(ready.inputs(batch.images))
            tally.add(logits.float(), batch)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(IN_VALIDATION)
        raise
    finally:
        model.train(training)
    if loader.broken is not None:
        loader.broken.raise_together(world)
    metrics = tally.metrics(world)
    if ready.neighbours is None:
        return metrics
    accuracy = ready.neighbours.accuracy(model, ready.inputs, precision, between)
    return replace(metrics, more={**metrics.more, KNN.name: accuracy})


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """`model`, or a copy of it on `device` if it is elsewhere, as an EMA in host memory is.

    Moving it there and back would replace the tensors that the EMA updates.
    """
    elsewhere = next(model.parameters()).device.type != device.type
    return copy.deepcopy(model).to(device) if elsewhere else model
