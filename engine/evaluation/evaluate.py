"""Validation: each sample counts once, with any number of processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from datasets import ValLoader
from engine.amp.precision import Precision
from engine.machine.late_compiler import uncompiled
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.setup import Ready
from engine.task.base import Metrics, Task
from utils.distributed.world import World
from vitamp.metrics import KNN


@torch.no_grad()  # not inference mode: fp8 layers do not run in it
def evaluate(
    model: nn.Module,
    loader: ValLoader,
    samples: int,
    inputs: nn.Module,
    precision: Precision,
    world: World,
    task: Task,
    between: Callable[[], None] = lambda: None,
) -> Metrics:
    """Metrics of the validation split. A collective call.

    `between` is called before each batch, and may raise to end the validation.
    """
    tally = task.tally(samples, precision.device)
    if task.own_metrics:
        from engine.task.own_code import WithOwnMetrics

        tally = WithOwnMetrics(tally, task, samples, precision.device)
    training = model.training
    model.eval()
    try:
        for batch in loader:
            between()
            with uncompiled(), precision.autocast(training=False):
                logits = model(inputs(batch.images))
            tally.add(logits.float(), batch)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(IN_VALIDATION)
        raise
    finally:
        model.train(training)
    if loader.broken is not None:
        loader.broken.raise_together(world)
    return tally.metrics(world)


def validate(ready: Ready, model: nn.Module, world: World, between: Callable[[], None] = lambda: None) -> Metrics:
    """All metrics of a validation of `model`, which is the run's own or has its shape. Otherwise as `evaluate`."""
    inputs, precision = ready.inputs, ready.precision
    metrics = evaluate(model, ready.val_loader, len(ready.val_set), inputs, precision, world, ready.task, between)
    if ready.neighbours is None:
        return metrics
    accuracy = ready.neighbours.accuracy(model, inputs, precision, between)
    return replace(metrics, more={**metrics.more, KNN.name: accuracy})


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """`model`, or a copy of it on `device` if it is elsewhere, as an EMA in host memory is.

    Moving it there and back would replace the tensors that the EMA updates.
    """
    elsewhere = next(model.parameters()).device.type != device.type
    return copy.deepcopy(model).to(device) if elsewhere else model
