"""Validation without training (-eval)."""

import time
from dataclasses import replace

from engine.checkpoint.find import chosen_checkpoint
from engine.checkpoint.restore import check_classes, check_task, check_unchanged, load_weights, restore_fp32
from engine.evaluation.data import copies_evaluated, evaluated_weights, warn_of_images
from engine.evaluation.evaluate import validate
from engine.machine.device import Run
from engine.measure.meters import Position
from engine.report.banner import banner
from engine.report.outcome import in_context
from engine.report.reporter import Reporter
from engine.run_folder import largest_class, make_run_folder, write_run_files
from engine.setup import Ready, build_for_evaluation
from engine.task.base import Metrics
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.log import log, log_lines
from vitamp.checkpoints import Checkpoint
from vitamp.metrics import PLAIN, SETS, WeightSet, best_set, metric_named
from vitamp.tensors import open_tensors


def evaluate_only(given: Run, dry: bool) -> None:
    """Validate the given weights (of a checkpoint, each set that it has), and write the metrics into a new folder.

    `dry`: build everything and load the weights, but validate and write nothing.
    """
    world = given.world
    checkpoint = chosen_checkpoint(given.config, world)
    if checkpoint is not None:
        on_every_rank(world, lambda: check_task(checkpoint, given.config, world))
        on_every_rank(world, lambda: check_unchanged(checkpoint, given.config))
    run = given
    if given.config.DATA.BATCH_SIZE == AUTO:
        from engine.memory.batch_size import with_largest_batch

        config = with_largest_batch(given.config, None, world, given.device)
        run = replace(given, config=config, auto_batch_size=True)
    config = run.config
    ready = on_every_rank(world, lambda: build_for_evaluation(run, checkpoint))
    if world.size > 1:
        from engine.machine.environment import check_images

        check_images(ready, world)
    saved = evaluated_weights(config)
    if saved is not None:
        on_every_rank(world, lambda: check_classes(saved.place, saved.classes, ready.val_set.classes, config))
    folder = None if dry else make_run_folder(run, "eval")
    log.info(banner(run, ready, folder))
    if world.first:
        warn_of_images(config, saved, ready.val_set)
    weights_sentence = "the weights match the model"
    if checkpoint is None and not config.MODEL.PRETRAINED:
        weights_sentence = "no weights were loaded"
        log.warning(
            "-eval without -pretrained or a checkpoint: no weights are loaded, the model is randomly initialised."
        )
    if checkpoint:
        restore_fp32(ready.model, checkpoint, ready.precision)
    if folder is None:
        if checkpoint:
            load_weights(ready.model, dict(open_tensors(checkpoint)), str(checkpoint.folder))
        log.info("Dry run: %s. Nothing was validated or written.", weights_sentence)
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
    context, text = _describe_metrics(config, ready, metrics)
    log_lines((context, copies_evaluated(config, saved, len(ready.val_set))))
    if checkpoint:
        text = f"{checkpoint.folder.name}, {text}"
    log.info("Done: %s; everything is in %s", text, folder)


def _validate_each(ready: Ready, checkpoint: Checkpoint | None, world: World) -> dict[WeightSet, Metrics]:
    """Measure the metrics of the loaded weights; of a checkpoint, of each set that it has, such as the EMA."""
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
    """Say how far noise may have moved the better weights' metric, and list their metrics for the last line."""
    by = metric_named(config.SAVE_BEST_BY)
    values = {which: means.value(by.name) for which, means in metrics.items()}
    better = best_set(values, by) or PLAIN
    context = in_context(
        by,
        values[better],
        largest_class(ready),
        labels=ready.val_set.sample_labels(),
        guesses=metrics[better].predictions.get("guess"),
        groups=ready.val_set.groups(),
    )
    # All metrics of the better weights; of the others, the one that they are compared by.
    fields = metrics[better].fields().items()
    text = ", ".join(f"{name} {value:.4f}" for name, value in fields if value is not None)
    if len(metrics) > 1:
        others = [f"{which.label}: {by.name} {value:.4f}" for which, value in values.items() if which != better]
        text = f"{better.label} weights, {text}; {'; '.join(others)}"
    return context, text
