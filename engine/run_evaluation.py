"""Evaluation (-eval) in one process."""

from __future__ import annotations

import time

from engine.amp.fp32_modules import force_fp32
from engine.banner import banner
from engine.checkpoint.chosen import chosen_checkpoint
from engine.checkpoint.folder import EMA
from engine.checkpoint.state import load_weights
from engine.evaluate import evaluate
from engine.fit.batch_size import settle_batch
from engine.machine.context import Run
from engine.measure.progress import Position
from engine.measure.task import Metrics, task_of
from engine.report.reporter import Reporter
from engine.run_folder import make_run_folder, write_run_files
from engine.setup import build_for_evaluation
from utils.distributed.world import on_every_rank
from utils.log import log
from utils.record.better_weights import best_prefix


def evaluate_only(given: Run, dry: bool) -> None:
    """Validate the given weights, and their EMA if the checkpoint has one."""
    world, device = given.world, given.device
    checkpoint = chosen_checkpoint(given.config, world)
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
        force_fp32(ready.model, checkpoint.state()["fp32_modules"], device.type)
    if folder is None:
        if checkpoint:
            load_weights(ready.model, checkpoint.tensors(), str(checkpoint.folder))
        weights = "the weights match the model" if has_weights else "no weights were loaded"
        log.info("Dry run: %s. Nothing was validated or written.", weights)
        return
    write_run_files(run, ready, folder)
    metrics: dict[str, Metrics] = {}
    files = {"": "model.safetensors", "ema_": EMA} if checkpoint else {"": None}
    for prefix, name in files.items():
        if checkpoint and name:
            if not checkpoint.has(name):
                continue
            load_weights(ready.model, checkpoint.tensors(name), str(checkpoint.folder / name))
        metrics[prefix] = evaluate(
            ready.model,
            ready.val_loader,
            len(ready.val_set),
            ready.inputs,
            ready.precision,
            world,
            task=task_of(config),
        )
    # The epoch that the weights come from; the saved position may already be the start of the next one.
    position = Position(epoch=checkpoint.meta["epoch"], update=checkpoint.meta["update"]) if checkpoint else Position()
    reporter = Reporter(config, 1, folder if world.first else None, False, Position())
    reporter.validation(position, metrics, time.perf_counter() - began)
    reporter.close()
    name = f"{checkpoint.folder.name}, " if checkpoint else ""
    log.info("Done: %s%s; everything is in %s", name, _in_words(metrics, config.SAVE_BEST_BY), folder)


def _in_words(metrics: dict[str, Metrics], by: str) -> str:
    """All metrics of the better weights; of the other weights, the metric `by` that they are compared by."""
    prefix = best_prefix({f"{name}{by}": getattr(means, by) for name, means in metrics.items()}, by) or ""
    text = ", ".join(f"{name} {value:.4f}" for name, value in metrics[prefix].fields().items() if value is not None)
    if len(metrics) == 1:
        return text
    other = "" if prefix else "ema_"
    names = {"": "plain", "ema_": "EMA"}
    return f"{names[prefix]} weights, {text}; {names[other]}: {by} {getattr(metrics[other], by):.4f}"
