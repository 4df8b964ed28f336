"""Validation without training (-eval)."""

import math
import time
from dataclasses import replace

from engine.checkpoint.find import chosen_checkpoint
from engine.checkpoint.restore import (
    check_classes,
    check_task,
    check_unchanged,
    load_weights,
    log_changes,
    restore_fp32,
)
from engine.evaluation.data import evaluated_weights, found_in_own_data, warn_of_images
from engine.evaluation.evaluate import validate
from engine.machine.device import Run
from engine.measure.meters import Position
from engine.report.banner import banner
from engine.report.outcome import in_context
from engine.report.reporter import Reporter
from engine.report.trust import doubts
from engine.run_folder import largest_class, make_run_folder, write_run_files
from engine.setup import Ready, build_for_evaluation
from engine.task.base import Metrics
from utils.config import Config
from utils.config.keys import deciding
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.log import log, log_lines
from vitamp.checkpoints import Checkpoint
from vitamp.metrics import PLAIN, SETS, WeightSet, best_set, metric_named
from vitamp.tensors import open_tensors


def evaluate_only(as_given: Run, dry: bool) -> None:
    """Validate weights without training, and write their metrics into a new folder (-eval). A collective call.

    The weights are a checkpoint, of which each set of weights is validated, or those of MODEL.PRETRAINED.
    `as_given`: the run, whose batch size may still be auto. `dry`: build everything and load the weights, but validate
    and write nothing.
    """
    world = as_given.world
    checkpoint = chosen_checkpoint(as_given.config, world)
    if checkpoint is not None:
        on_every_rank(world, lambda: check_task(checkpoint, as_given.config, world))
        on_every_rank(world, lambda: check_unchanged(checkpoint, as_given.config))
    run = as_given
    if as_given.config.DATA.BATCH_SIZE == AUTO:
        from engine.memory.batch_size import with_largest_batch

        with_number = with_largest_batch(as_given.config, None, world, as_given.device)
        run = replace(as_given, config=with_number, auto_batch_size=True)
    config = run.config
    ready = on_every_rank(world, lambda: build_for_evaluation(run, checkpoint))
    if world.size > 1:
        from engine.machine.environment import check_images

        check_images(ready, world)
    recorded = evaluated_weights(config)  # the weights with the record of their training
    if recorded is not None:
        on_every_rank(world, lambda: check_classes(recorded.place, recorded.classes, ready.val_set.classes, config))
    if recorded is not None and checkpoint is None:  # other settings of the input were compared as they were taken over
        log_changes(recorded.meta["settings"], config, deciding("evaluation"))
    folder = None if dry else make_run_folder(run, "eval")
    log.info(banner(run, ready, folder))
    if world.first:
        warn_of_images(config, recorded, ready.val_set)
    weights_sentence = "the weights match the model"
    if checkpoint is None and not config.MODEL.PRETRAINED:
        weights_sentence = "no weights were loaded"
        log.warning(
            "-eval without -pretrained or a checkpoint: no weights are loaded, the model is randomly initialised."
        )
    # `build_for_evaluation` has loaded MODEL.PRETRAINED. The weights of a checkpoint are loaded below, for a dry run or
    # by `_validate_each`.
    if checkpoint:
        restore_fp32(ready.model, checkpoint, ready.precision)
    if folder is None:
        if checkpoint:
            load_weights(ready.model, dict(open_tensors(checkpoint)), str(checkpoint.folder))
        log.info("Dry run: %s; nothing was validated or written.", weights_sentence)
        return
    write_run_files(run, ready, folder)
    began = time.perf_counter()
    metrics = _validate_each(ready, checkpoint, world)
    seconds = time.perf_counter() - began
    # The epoch that the weights come from; the saved position may already be the start of the next one.
    position = Position(epoch=checkpoint.meta["epoch"], update=checkpoint.meta["update"]) if checkpoint else Position()
    reporter = Reporter(config, 1, folder if world.first else None, Position())
    reporter.validation(position, metrics, seconds)
    reporter.close()
    for which, found in metrics.items():
        if not math.isfinite(found.value("loss")):
            log.warning("The outputs with %s are NaN or infinite, so that no metric means anything.", which.words)
    context, metrics_text = _describe_metrics(config, ready, metrics)
    log_lines([context, *(doubt.words() for doubt in doubts(found_in_own_data(config, recorded)))])
    if checkpoint:
        metrics_text = f"{checkpoint.folder.name}, {metrics_text}"
    log.info("Done: %s; everything is in %s", metrics_text, folder)


def _validate_each(ready: Ready, checkpoint: Checkpoint | None, world: World) -> dict[WeightSet, Metrics]:
    """Measure the metrics of each set of weights that the checkpoint has, such as the EMA. A collective call.

    Each set is loaded into the model in turn. Without a checkpoint, the model is measured with the weights that it has.
    """
    if checkpoint is None:
        return {PLAIN: validate(ready, ready.model, world)}
    metrics: dict[WeightSet, Metrics] = {}
    for which in SETS:
        if checkpoint.has(which.file):
            tensors = dict(open_tensors(checkpoint, which.file))
            load_weights(ready.model, tensors, str(checkpoint.folder / which.file))
            metrics[which] = validate(ready, ready.model, world)
    return metrics


def _describe_metrics(config: Config, ready: Ready, metrics: dict[WeightSet, Metrics]) -> tuple[str, str]:
    """Describe the metrics of the set of weights that validated better, by the metric of SAVE_BEST_BY.

    Returns two texts for the log: how far noise may have moved that metric ('' if unknown), and a list of all metrics.
    """
    deciding_metric = metric_named(config.SAVE_BEST_BY)
    fields_of_sets = {which: metrics_of_set.fields() for which, metrics_of_set in metrics.items()}
    values = {which: metrics_of_set.value(deciding_metric.name) for which, metrics_of_set in metrics.items()}
    better = best_set(fields_of_sets, deciding_metric) or PLAIN  # none is better if no value is finite
    context = in_context(
        deciding_metric,
        values[better],
        largest_class(ready),
        labels=ready.val_set.sample_labels(),
        guesses=metrics[better].predictions.get("guess"),  # None for a task that predicts no single class
        groups=ready.val_set.groups(),
    )
    # All metrics of the better weights; of the others, the one that they are compared by.
    fields = fields_of_sets[better].items()
    text = ", ".join(f"{name} {value:.4f}" for name, value in fields if value is not None)
    if len(metrics) > 1:
        name = deciding_metric.name
        others = [f"{which.label}: {name} {value:.4f}" for which, value in values.items() if which != better]
        text = f"{better.label} weights, {text}; {'; '.join(others)}"
    return context, text
