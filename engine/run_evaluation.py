"""Evaluation (-eval) in one process."""

from __future__ import annotations

import time

from engine.amp.fp32_modules import force_fp32
from engine.banner import banner
from engine.checkpoint.chosen import chosen_checkpoint
from engine.checkpoint.folder import read_state, read_tensors
from engine.checkpoint.refusals import check_task
from engine.checkpoint.restore import load_weights
from engine.evaluate import validate
from engine.evaluated_data import copies_evaluated, evaluated_weights
from engine.fit.batch_size import settle_batch
from engine.machine.context import Run
from engine.measure.progress import Position
from engine.report.in_context import in_context
from engine.report.reporter import Reporter
from engine.run_folder import largest_class, make_run_folder, write_run_files
from engine.setup import Ready, build_for_evaluation
from engine.task.base import Metrics
from utils.distributed.world import on_every_rank
from utils.log import log
from utils.record.tasks import metric_named
from utils.record.weight_sets import PLAIN, SETS, WeightSet, best_set


def evaluate_only(given: Run, dry: bool) -> None:
    """Validate the given weights; of a checkpoint, all that it has."""
    world, device = given.world, given.device
    checkpoint = chosen_checkpoint(given.config, world)
    if checkpoint is not None:
        on_every_rank(world, lambda: check_task(checkpoint, given.config, world))
    began = time.perf_counter()
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
            load_weights(ready.model, read_tensors(checkpoint), str(checkpoint.folder))
        weights = "the weights match the model" if has_weights else "no weights were loaded"
        log.info("Dry run: %s. Nothing was validated or written.", weights)
        return
    write_run_files(run, ready, folder)
    metrics: dict[WeightSet, Metrics] = {}
    for which in SETS if checkpoint else (PLAIN,):
        if checkpoint:
            if not checkpoint.has(which.file):
                continue
            load_weights(ready.model, read_tensors(checkpoint, which.file), str(checkpoint.folder / which.file))
        metrics[which] = validate(ready, ready.model, world)
    # The epoch that the weights come from; the saved position may already be the start of the next one.
    position = Position(epoch=checkpoint.meta["epoch"], update=checkpoint.meta["update"]) if checkpoint else Position()
    reporter = Reporter(config, 1, folder if world.first else None, False, Position())
    reporter.validation(position, metrics, time.perf_counter() - began)
    reporter.close()
    name = f"{checkpoint.folder.name}, " if checkpoint else ""
    if words := _in_context(metrics, config.SAVE_BEST_BY, ready):
        log.info(words)
    saved = evaluated_weights(config)
    if saved is not None and (words := copies_evaluated(config, saved, len(ready.val_set))):
        log.info(words)
    log.info("Done: %s%s; everything is in %s", name, _in_words(metrics, config.SAVE_BEST_BY), folder)


def _compared(metrics: dict[WeightSet, Metrics], by: str) -> tuple[dict[WeightSet, float], WeightSet]:
    """The metric `by` of all weights, and the better weights."""
    values = {which: means.value(by) for which, means in metrics.items()}
    return values, best_set(values, metric_named(by)) or PLAIN


def _in_context(metrics: dict[WeightSet, Metrics], by: str, ready: Ready) -> str:
    values, better = _compared(metrics, by)
    return in_context(metric_named(by), values[better], len(ready.val_set), largest_class(ready))


def _in_words(metrics: dict[WeightSet, Metrics], by: str) -> str:
    """All metrics of the better weights; of the other weights, the metric `by` that they are compared by."""
    values, better = _compared(metrics, by)
    text = ", ".join(f"{name} {value:.4f}" for name, value in metrics[better].fields().items() if value is not None)
    if len(metrics) == 1:
        return text
    others = [f"{which.label}: {by} {value:.4f}" for which, value in values.items() if which != better]
    return f"{better.label} weights, {text}; {'; '.join(others)}"
