"""The story of a training in one process, from joining the others to the last line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.amp.fp32_modules import forced
from engine.amp.half_copy import HalfCopy
from engine.amp.op_lists import OpLists
from engine.amp.precision import check_precision
from engine.amp.prepare_model import hint
from engine.amp.print_amp import amp_table
from engine.banner import banner
from engine.branch import prepare_folder
from engine.checkpoint.chosen import chosen_checkpoint
from engine.checkpoint.folder import Checkpoint
from engine.checkpoint.state import say_what_changed
from engine.compile.choice import CompileChoice, choose_compiling
from engine.compile.compiled import compile_update
from engine.fit.batch_size import settle_batch
from engine.fit.dry_run import try_out
from engine.fit.out_of_memory import before_training, while_training
from engine.machine import no_gpu
from engine.machine.context import Run
from engine.machine.device import pick_device, prepare
from engine.machine.environment import enter
from engine.machine.memory import is_out_of_memory
from engine.machine.stopping import signals
from engine.measure.bottleneck import Judge
from engine.measure.mfu import Peak, Utilisation
from engine.measure.progress import Best, Position, clock, updates_left
from engine.measure.throughput import Pace
from engine.parallel.fsdp import sharding_of
from engine.report.curves import title_of
from engine.report.reporter import METRICS, Reporter
from engine.report.wandb import open_board
from engine.run_evaluation import evaluate_only
from engine.run_folder import folder_of, lock_what_is_there, write_down
from engine.run_lock import FolderLock
from engine.setup import (
    ReadyToTrain,
    build_for_training,
    checkpoint_meta,
    model_in_precision,
    setting_of,
)
from engine.trainer import Trainer
from engine.wrapping import wrap
from utils.config import Config, Loaded, config_hash
from utils.distributed.group import leave
from utils.distributed.world import ALONE, World, on_every_rank, on_rank_0
from utils.errors import EXIT_DONE, TrainingError, UserError
from utils.log import log


def run(loaded: Loaded, world: World, dry: bool) -> int:
    """The exit code, where nothing goes wrong."""
    this = join(loaded, world)
    config, device = this.config, this.device
    try:
        check_precision(config.AMP, device)
        with (
            FolderLock() as lock,
            OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST) as lists,
        ):
            if config.EVAL:
                evaluate_only(this, dry)
                return EXIT_DONE
            return train(this, None if dry else lock, lists)
    except Exception as error:
        signals.patient = True  # the reason is told before anybody ends this process because another went first
        if is_out_of_memory(error):
            raise (UserError if world.size == 1 else TrainingError)(before_training(error, config, device)) from None
        raise
    finally:
        leave(world)


def join(loaded: Loaded, world: World) -> Run:
    """Settle where this process computes, log what is to be said of the settings, and meet the other ranks."""
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
    return Run(config, world, device, threads)


def train(given: Run, lock: FolderLock | None, lists: OpLists) -> int:
    """A training from start to end, and its exit code. `lock` None: a dry run."""
    if lock is not None:
        on_rank_0(given.world, lambda: lock_what_is_there(given.config, lock))
    checkpoint = chosen_checkpoint(given.config, given.world)
    run, found = _settle_batch(given, checkpoint)
    ready = _build(run, checkpoint, found, lists)
    compiling = _choose_compiling(run, ready, checkpoint)
    folder = _announce(run, ready, checkpoint, lock)
    if folder is None:
        wrap(ready.parts, run.config)
        try_out(run.config, ready, run.world, _updates_left(run, ready))
        return EXIT_DONE
    if _finished(run.config, ready.position, ready.best, folder):
        return EXIT_DONE
    peak = _open_folder(run, ready, checkpoint, folder)
    wrap(ready.parts, run.config)
    compile_update(ready.parts, compiling, run.config)
    return _fit(run, ready, folder, peak)


def _settle_batch(run: Run, checkpoint: Checkpoint | None) -> tuple[Run, dict[str, Any]]:
    """The run with numbers for the sizes of its batches, and the choice to remember, if one was made."""
    config, found = settle_batch(run.config, checkpoint, run.world, run.device)
    return replace(run, config=config), found


def _build(run: Run, checkpoint: Checkpoint | None, found: dict[str, Any], lists: OpLists) -> ReadyToTrain:
    """All that a training needs, on every rank or on none."""
    config, world, device = run.config, run.world, run.device
    sharding = sharding_of(config, world, device)
    ready = on_every_rank(world, lambda: build_for_training(config, world, device, checkpoint, sharding))
    ready.choices.update(found)
    ready.parts.batch_found = bool(found)
    if ready.precision.level != "O0":  # without AMP the settings' remarks say that lists have no effect
        ready.parts.op_lists = lists
    return ready


def _choose_compiling(run: Run, ready: ReadyToTrain, checkpoint: Checkpoint | None) -> CompileChoice:
    before = checkpoint.meta.get("choices", {}) if checkpoint else {}
    choice = choose_compiling(run.config, ready.parts, run.world, _updates_left(run, ready), before)
    ready.choices |= choice.as_noted()
    return choice


def _updates_left(run: Run, ready: ReadyToTrain) -> int:
    return updates_left(run.config, ready.position, ready.train_loader.order.updates)


def _announce(run: Run, ready: ReadyToTrain, checkpoint: Checkpoint | None, lock: FolderLock | None) -> Path | None:
    """Log what is about to be trained, into the folder of the run from here on. No folder: a dry run."""
    if warning := ready.precision.choice.warning:
        log.warning(warning)
    advice = hint(ready.model, run.config.DATA.BATCH_SIZE, run.device.type)
    if advice and ready.precision.level != "O0":
        log.info(advice)
    folder = None if lock is None else folder_of(run, "train", lock)
    log.info(banner(run, ready, folder))
    if checkpoint:
        say_what_changed(checkpoint, run.config, ready.parts, ready.position)
    return folder


def _open_folder(run: Run, ready: ReadyToTrain, checkpoint: Checkpoint | None, folder: Path) -> Peak | None:
    """Make the folder that of this run. The peak that MFU is measured against, where it is."""
    if checkpoint:
        ready.best = prepare_folder(folder, checkpoint, ready.best, run.world)
    return write_down(run, ready, folder)


def _fit(run: Run, ready: ReadyToTrain, folder: Path, peak: Peak | None) -> int:
    """Train, close what was opened, and say how it ended."""
    config, world = run.config, run.world
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
