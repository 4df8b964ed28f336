"""Validation: each sample counts once, with any number of processes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from datasets import ValLoader
from engine.amp.precision import Precision
from engine.checkpoint.run_folder import largest_class
from engine.machine.device import Run
from engine.machine.late_compiler import uncompiled
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.measure.meters import Position
from engine.report.outcome import in_context
from engine.setup import Ready, build_for_evaluation
from engine.task.base import Metrics, Task
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.log import log
from vitamp.metrics import KNN, PLAIN, SETS, WeightSet, best_set, metric_named


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


def evaluate_only(given: Run, dry: bool) -> None:
    """Validate the given weights; of a checkpoint, all that it has."""
    from engine.amp.low_precision import force_fp32
    from engine.checkpoint.find import chosen_checkpoint
    from engine.checkpoint.restore import check_task, load_weights
    from engine.checkpoint.run_folder import make_run_folder, write_run_files
    from engine.evaluated_data import copies_evaluated, evaluated_weights
    from engine.report.banner import banner
    from engine.report.reporter import Reporter
    from vitamp.tensors import open_tensors, read_state

    world, device = given.world, given.device
    checkpoint = chosen_checkpoint(given.config, world)
    if checkpoint is not None:
        on_every_rank(world, lambda: check_task(checkpoint, given.config, world))
    began = time.perf_counter()
    run = given
    if given.config.DATA.BATCH_SIZE == AUTO:
        from engine.memory.batch_size import settle_batch

        run = settle_batch(given, checkpoint)
    config = run.config
    ready = on_every_rank(world, lambda: build_for_evaluation(run, checkpoint))
    folder = None if dry else make_run_folder(run, "eval")
    log.info(banner(run, ready, folder))
    has_weights = checkpoint is not None or bool(config.MODEL.PRETRAINED)
    if not has_weights:
        log.warning(
            "-eval without -pretrained or a checkpoint: no weights are loaded, the model is randomly initialised."
        )
    if checkpoint and ready.precision.level in ("O1", "O2"):
        force_fp32(ready.model, read_state(checkpoint)["fp32_modules"], device.type)
    if folder is None:
        if checkpoint:
            load_weights(ready.model, dict(open_tensors(checkpoint)), str(checkpoint.folder))
        weights = "the weights match the model" if has_weights else "no weights were loaded"
        log.info("Dry run: %s. Nothing was validated or written.", weights)
        return
    write_run_files(run, ready, folder)
    metrics: dict[WeightSet, Metrics] = {}
    for which in SETS if checkpoint else (PLAIN,):
        if checkpoint:
            if not checkpoint.has(which.file):
                continue
            load_weights(ready.model, dict(open_tensors(checkpoint, which.file)), str(checkpoint.folder / which.file))
        metrics[which] = validate(ready, ready.model, world)
    # The epoch that the weights come from; the saved position may already be the start of the next one.
    position = Position(epoch=checkpoint.meta["epoch"], update=checkpoint.meta["update"]) if checkpoint else Position()
    reporter = Reporter(config, 1, folder if world.first else None, False, Position())
    reporter.validation(position, metrics, time.perf_counter() - began)
    reporter.close()
    by = metric_named(config.SAVE_BEST_BY)
    values = {which: means.value(by.name) for which, means in metrics.items()}
    better = best_set(values, by) or PLAIN
    if words := in_context(by, values[better], len(ready.val_set), largest_class(ready)):
        log.info(words)
    saved = evaluated_weights(config)
    if saved is not None and (words := copies_evaluated(config, saved, len(ready.val_set))):
        log.info(words)
    # All metrics of the better weights; of the others, the one that they are compared by.
    fields = metrics[better].fields().items()
    text = ", ".join(f"{name} {value:.4f}" for name, value in fields if value is not None)
    if len(metrics) > 1:
        others = [f"{which.label}: {by.name} {value:.4f}" for which, value in values.items() if which != better]
        text = f"{better.label} weights, {text}; {'; '.join(others)}"
    name = f"{checkpoint.folder.name}, " if checkpoint else ""
    log.info("Done: %s%s; everything is in %s", name, text, folder)
