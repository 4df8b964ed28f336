"""One process's part in a run, from joining the others to the last line."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from engine.amp.fp32_modules import force_fp32, forced
from engine.amp.half_copy import HalfCopy
from engine.amp.op_lists import OpLists
from engine.amp.precision import check_precision
from engine.amp.prepare_model import hint
from engine.amp.print_amp import amp_table
from engine.banner import banner
from engine.branch import prepare_folder
from engine.checkpoint.chosen import chosen_checkpoint
from engine.checkpoint.folder import EMA, Checkpoint
from engine.checkpoint.state import load_weights, say_what_changed
from engine.compile.choice import choose_compiling
from engine.compile.compiled import compile_update
from engine.evaluate import evaluate
from engine.fit.batch_size import settle_batch
from engine.fit.dry_run import try_out
from engine.fit.out_of_memory import before_training, while_training
from engine.machine import no_gpu
from engine.machine.device import pick_device, prepare
from engine.machine.environment import enter
from engine.machine.memory import is_out_of_memory
from engine.machine.stopping import signals
from engine.measure.bottleneck import Judge
from engine.measure.meters import Means
from engine.measure.mfu import Peak, Utilisation
from engine.measure.progress import Best, Position, clock, updates_left
from engine.measure.throughput import Pace
from engine.parallel.fsdp import sharding_of
from engine.report.curves import title_of
from engine.report.reporter import METRICS, Reporter
from engine.report.wandb import open_board
from engine.run_folder import folder_of, lock_what_is_there, write_down
from engine.run_lock import FolderLock
from engine.setup import (
    ReadyToTrain,
    build_for_evaluation,
    build_for_training,
    checkpoint_meta,
    model_in_precision,
    setting_of,
)
from engine.trainer import Trainer
from engine.wrapping import wrap
from utils.better_weights import best_prefix
from utils.config import Config, Loaded, config_hash
from utils.distributed.group import leave
from utils.distributed.world import ALONE, World, together
from utils.errors import EXIT_DONE, TrainingError, UserError
from utils.log import log


def run(loaded: Loaded, world: World, dry: bool) -> int:
    """The exit code, where nothing goes wrong."""
    config = loaded.config
    device = pick_device(config.DEVICE, world)
    threads = prepare(config, device, world)
    for note in loaded.notes:
        log.info(note)
    for warning in () if config.EVAL else loaded.warnings:
        log.warning(warning)
    if world.first and (advice := no_gpu.hint(config, device)):
        log.info(advice)
    enter(config, world, device, threads)
    try:
        check_precision(config.AMP, device)
        with (
            FolderLock() as lock,
            OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST) as lists,
        ):
            if not config.EVAL and not dry:
                together(world, lambda: lock_what_is_there(config, lock) if world.first else None)
            checkpoint = chosen_checkpoint(config, world)
            if config.EVAL:
                _evaluate_only(config, world, device, threads, checkpoint, dry)
                return EXIT_DONE
            return _train(config, world, device, threads, checkpoint, None if dry else lock, lists)
    except Exception as error:
        signals.patient = True  # the reason is told before anybody ends this process because another went first
        if is_out_of_memory(error):
            raise (UserError if world.size == 1 else TrainingError)(before_training(error, config, device)) from None
        raise
    finally:
        leave(world)


def show_precisions(config: Config) -> str:
    """-print_amp: the precision that every part of the model really has, seen in one forward pass."""
    device = pick_device(config.DEVICE, ALONE)
    prepare(config, device, ALONE)
    check_precision(config.AMP, device)
    model, inputs, precision = model_in_precision(config, device)
    if precision.computes_in_copy:
        keeps_norms = precision.level == "O2"
        model = HalfCopy(model, precision.choice.dtype, keeps_norms, forced(model)).model
    size = (2, config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE)
    images = torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    def run_forward() -> None:
        with precision.autocast():
            model(inputs(images))

    with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
        return f"{config.MODEL.NAME} in {precision.line()}\n\n{amp_table(model, run_forward)}"


def _train(
    config: Config,
    world: World,
    device: torch.device,
    threads: int,
    checkpoint: Checkpoint | None,
    lock: FolderLock | None,
    lists: OpLists,
) -> int:
    """The exit code. `lock` None: a dry run."""
    config, found = settle_batch(config, checkpoint, world, device)
    sharding = sharding_of(config, world, device)
    ready = together(world, lambda: build_for_training(config, world, device, checkpoint, sharding))
    ready.choices.update(found)
    ready.parts.batch_found = bool(found)
    if ready.precision.level != "O0":  # without AMP the settings' remarks say that lists have no effect
        ready.parts.op_lists = lists
    kept = checkpoint.meta.get("choices", {}) if checkpoint else {}
    left = updates_left(config, ready.position, ready.train_loader.order.updates)
    compiling = choose_compiling(config, ready.parts, world, left, kept)
    ready.choices |= compiling.as_noted()
    warning = ready.precision.choice.warning
    if warning:
        log.warning(warning)
    advice = hint(ready.model, config.DATA.BATCH_SIZE, device.type)
    if advice and ready.precision.level != "O0":
        log.info(advice)
    folder = None if lock is None else folder_of(config, world, "train", lock)
    log.info(banner(config, ready, world, device, threads, folder))
    if checkpoint:
        say_what_changed(checkpoint, config, ready.parts, ready.position)
    if folder is None:
        wrap(ready.parts, config)
        try_out(config, ready, world, left)
        return EXIT_DONE
    if _finished(config, ready.position, ready.best, folder):
        return EXIT_DONE
    if checkpoint:
        ready.best = prepare_folder(folder, checkpoint, ready.best, world)
    peak = write_down(config, ready, world, device, threads, folder)
    wrap(ready.parts, config)
    compile_update(ready.parts, compiling, config)
    return _fit(config, ready, world, folder, peak)


def _fit(config: Config, ready: ReadyToTrain, world: World, folder: Path, peak: Peak | None) -> int:
    wandb = open_board(config, folder, ready.precision.name, folder / METRICS) if world.first else None
    reporter = Reporter(
        config, ready.train_loader.order.updates, folder if world.first else None, world.first, ready.position, wandb
    )
    trainer = Trainer(
        config=config,
        world=world,
        parts=ready.parts,
        train_loader=ready.train_loader,
        val_loader=ready.val_loader,
        validation_samples=len(ready.val_set),
        reporter=reporter,
        pace=Pace(
            ready.precision.device,
            ready.parts.stages,
            peak and Utilisation(config, peak, world.size, ready.position),
        ),
        judge=Judge(setting_of(ready), world),
        folder=folder,
        position=ready.position,
        best=ready.best,
        meta=checkpoint_meta(config, ready, world.size, config_hash),
        title=title_of(config, ready.precision.name, ready.precision.level != "O0"),
    )
    try:
        code = trainer.fit()
        if wandb is not None:
            wandb.ended(trainer.best)
    except Exception as error:
        if is_out_of_memory(error):
            raise while_training(error, trainer) from None
        raise
    finally:
        reporter.close()
    if broken := ready.train_loader.broken.summary():
        log.warning(broken)
    words = "Paused, to be resumed by -resume" if trainer.paused else "Done"
    best, total = trainer.best_words(": best "), clock(trainer.pace.total)
    log.info("%s%s; total time %s; everything is in %s", words, best, total, folder)
    return code


def _finished(config: Config, position: Position, best: Best, folder: Path) -> bool:
    limit = config.TRAIN.MAX_UPDATES or sys.maxsize
    open_end = position.update == limit and position.validated < limit  # it was stopped in its last validation
    if position.epoch <= config.TRAIN.NUM_EPOCHS and (position.update < limit or open_end):
        return False
    log.info("This run had already finished: %d updates, best %s; it is in %s", position.update, best.words(), folder)
    return True


def _evaluate_only(
    config: Config, world: World, device: torch.device, threads: int, checkpoint: Checkpoint | None, dry: bool
) -> None:
    """-eval: the figures of given weights, and of their average where the checkpoint holds one."""
    began = time.perf_counter()
    config, found = settle_batch(config, checkpoint, world, device)
    ready = together(world, lambda: build_for_evaluation(config, world, device, checkpoint))
    ready.choices.update(found)
    folder = None if dry else folder_of(config, world, "eval")
    log.info(banner(config, ready, world, device, threads, folder))
    if checkpoint is None and not config.MODEL.PRETRAINED:
        log.warning("-eval without -pretrained or -resume: these are the figures of untrained weights.")
    if checkpoint and ready.precision.level in ("O1", "O2"):
        force_fp32(ready.model, checkpoint.state()["fp32_modules"], device.type)
    if folder is None:
        if checkpoint:
            load_weights(ready.model, checkpoint.tensors(), str(checkpoint.folder))
        log.info("Dry run: the weights fit; nothing was validated, nothing written.")
        return
    write_down(config, ready, world, device, threads, folder)
    figures: dict[str, Means] = {}
    files = {"": "model.safetensors", "ema_": EMA} if checkpoint else {"": None}
    for prefix, name in files.items():
        if checkpoint and name:
            if not checkpoint.has(name):
                continue
            load_weights(ready.model, checkpoint.tensors(name), str(checkpoint.folder / name))
        figures[prefix] = evaluate(
            ready.model, ready.val_loader, len(ready.val_set), ready.inputs, ready.precision, world
        )
    # The epoch the weights come from, where the saved position is already the next one's beginning.
    position = Position(epoch=checkpoint.meta["epoch"], update=checkpoint.meta["update"]) if checkpoint else Position()
    reporter = Reporter(config, 1, folder if world.first else None, False, Position())
    reporter.validation(position, figures, time.perf_counter() - began)
    reporter.close()
    name = f"{checkpoint.folder.name}, " if checkpoint else ""
    log.info("Done: %s%s; everything is in %s", name, _in_words(figures, config.SAVE_BEST_BY), folder)


def _in_words(figures: dict[str, Means], by: str) -> str:
    """The metrics of the better weights, and which these are; then what decided of the others."""
    prefix = best_prefix({f"{name}{by}": getattr(means, by) for name, means in figures.items()}, by) or ""
    text = ", ".join(f"{name} {value:.4f}" for name, value in asdict(figures[prefix]).items())
    if len(figures) == 1:
        return text
    other = "" if prefix else "ema_"
    names = {"": "plain", "ema_": "EMA"}
    return f"{names[prefix]} weights, {text}; {names[other]}: {by} {getattr(figures[other], by):.4f}"
