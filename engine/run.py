"""Training in one process, from joining the other ranks to the last log line."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import data_identity
from engine.checkpoint.run_folder import (
    FolderLock,
    largest_class,
    lock_existing_folder,
    make_run_folder,
    write_run_files,
)
from engine.machine.device import Run, no_gpu_notice, pick_device, set_up_device
from engine.machine.memory import is_out_of_memory
from engine.machine.stopping import signals
from engine.measure.meters import clock, updates_left
from engine.report.banner import banner
from engine.report.outcome import FOLDS, flatters, in_context, next_commands, strange
from engine.report.reporter import Reporter
from engine.setup import ReadyToTrain, build_for_training
from engine.trainer import Trainer
from utils.config import Loaded
from utils.config.keys import value_of
from utils.config.kinds import AUTO
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import EXIT_DONE, TrainingError, UserError
from utils.log import CONTROL, DETAIL, IN_LINE, brief_terminal, log, print_on_terminal
from utils.program import FOLDER_FILE
from utils.record.history import History, is_end, last_line
from utils.record.predictions import read_predictions
from utils.record.resumed_run import resumed_run
from utils.record.run_folder import copies_in_words, missing_from
from utils.text import counted, some_of
from vitamp.checkpoints import folder_name
from vitamp.metrics import AVERAGE, metric_named

if TYPE_CHECKING:
    from engine.amp.op_lists import OpLists


def run(loaded: Loaded, world: World, dry: bool) -> int:
    """Choose the device and threads, join the other ranks, train or evaluate, and return the exit code."""
    config = loaded.config
    try:
        device = pick_device(config.DEVICE, world)
        threads = set_up_device(config, device, world)
        for note in loaded.notes:
            log.info(note.translate(IN_LINE))
        for warning in loaded.warnings:
            log.warning(warning.translate(IN_LINE))
        if world.first and (advice := no_gpu_notice(config, device)):
            log.info(advice)
        if world.size > 1:
            from engine.machine.environment import join_run

            join_run(config, world, device, threads)
        dist = config.DIST
        if world.size == 1 and dist.STRATEGY == "fsdp":
            log.info("DIST.STRATEGY fsdp has no effect with one process.")
            config = config.model_copy(update={"DIST": dist.model_copy(update={"STRATEGY": "ddp", "HSDP": False})})
        this = Run(config, world, device, threads, asked={"DIST.STRATEGY": dist.STRATEGY, "DIST.HSDP": dist.HSDP})
        try:
            with ExitStack() as until_the_end:
                lock, lists = until_the_end.enter_context(FolderLock()), None
                if config.AMP.CUSTOM_WHITE_LIST or config.AMP.CUSTOM_BLACK_LIST:
                    from engine.amp.op_lists import OpLists

                    lists = OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST)
                    until_the_end.enter_context(lists)
                if config.EVAL:
                    from engine.evaluation.evaluate_only import evaluate_only

                    evaluate_only(this, dry)
                    return EXIT_DONE
                return train(this, None if dry else lock, lists)
        except Exception as error:
            signals.deferred = True  # report the error before a signal ends this rank because another rank exited first
            if is_out_of_memory(error):
                from engine.memory.out_of_memory import describe

                raise (UserError if world.size == 1 else TrainingError)(describe(error, this)) from None
            raise
    finally:
        if world.size > 1:
            from utils.distributed.group import leave

            leave()


def train(given: Run, lock: FolderLock | None, lists: OpLists | None) -> int:
    """Train from start to end, and return the exit code. `lock` None: a dry run."""
    world = given.world
    if lock is not None:
        on_rank_0(world, lambda: lock_existing_folder(given.config, lock))
    checkpoint = None
    if given.config.MODEL.RESUME is not None:
        from engine.checkpoint.find import chosen_checkpoint

        checkpoint = chosen_checkpoint(given.config, world)
    signals.saved = checkpoint is not None if world.first else None
    run, config = given, given.config
    if checkpoint is not None or config.DATA.BATCH_SIZE == AUTO or config.TRAIN.GLOBAL_BATCH is not None:
        from engine.memory.batch_size import settle_batch

        run = settle_batch(given, checkpoint)
        config = run.config
    if config.TRAIN.NUM_EPOCHS == AUTO:
        from engine.memory.dry_run import settle_epochs

        run = settle_epochs(run)
        config = run.config
    if lock is None:
        from engine.memory.batch_size import check_batch

        on_every_rank(world, lambda: check_batch(run))
    ready = on_every_rank(world, lambda: build_for_training(run, checkpoint, dry=lock is None))
    if world.size > 1:
        from engine.machine.environment import check_images

        check_images(ready, world)
    if warning := ready.precision.choice.warning:
        log.warning(warning)
    if ready.precision.level != "O0" and run.device.type == "cuda":
        from engine.amp.low_precision import tile_size_hint

        if advice := tile_size_hint(ready.model, config.DATA.BATCH_SIZE):
            log.info(advice)
    folder = None if lock is None else make_run_folder(run, "train", lock)
    text = banner(run, ready, folder)
    log.info(text, extra=DETAIL)
    if (brief := brief_terminal()) and folder is not None:
        print_on_terminal(brief.banner(text.translate(CONTROL)))
    for warning in ready.train_loader.order.warnings():
        log.warning(warning)
    if checkpoint:
        from engine.checkpoint.restore import log_resumption

        log_resumption(checkpoint, config, ready.parts, ready.position)
    if world.first and config.DATA.CHECK != "off" and ready.train_set.single_images() is not None:
        from datasets.examine import check_data

        check_data(config, ready.train_set, ready.val_set, folder)
    if folder is None:
        from engine.memory.dry_run import try_out

        try_out(run, ready, updates_left(config, ready.position, ready.train_loader.order.updates))
        return EXIT_DONE
    if checkpoint:
        position, limit, patience = ready.position, config.TRAIN.MAX_UPDATES or sys.maxsize, config.TRAIN.PATIENCE
        open_end = position.update == limit and position.validated < limit  # stopped within the last validation
        reached = position.epoch > config.TRAIN.NUM_EPOCHS or (position.update >= limit and not open_end)
        # A run that was killed between its last checkpoint and its last line goes through its end below.
        last = last_line(folder)
        over = broadcast(not last or is_end(last), world)
        if not (reached and over):  # TRAIN.PATIENCE counts validations since the best only if that is still to beat
            from engine.checkpoint.restore import best_to_beat

            ready.best = best_to_beat(ready.best, data_identity(ready.val_set), folder, checkpoint, config, world)
            reached = patience is not None and position.step == 0 and ready.best.stale >= patience
        if reached and over:
            place = resumed_run(config) or folder
            if world.first:
                log.info(next_commands(run, position, ready.best, place))
            validated = f", best {ready.best.words()}" if ready.best.figure is not None else ""
            updates = counted(position.update, "update")
            log.info("This run had already finished: %s%s; its folder is %s", updates, validated, place)
            return EXIT_DONE
    if config.MODEL.LORA.RANK is not None:
        from engine.checkpoint.state import keep_base

        ready.adapters = on_rank_0(world, lambda: keep_base(folder, ready.model, config.MODEL, checkpoint))
    write_run_files(run, ready, folder)
    ready.parts.assemble()
    return _fit(run, ready, folder, lists)


def _fit(run: Run, ready: ReadyToTrain, folder: Path, lists: OpLists | None) -> int:
    """Train, close what was opened, and log how it ended."""
    config, world = run.config, run.world
    tracked = []
    for key in ("WANDB", "MLFLOW"):
        if world.first and value_of(config, key) is not None:
            from engine.report.trackers import TrackedRun

            tracked.append(TrackedRun(key, config, folder, ready.precision.name))
    own = folder if world.first else None
    reporter = Reporter(config, ready.train_loader.order.updates, own, ready.position, tracked)
    # Without AMP the notes on the settings say already that the lists have no effect.
    trainer = Trainer(run, ready, folder, reporter, lists if ready.precision.level != "O0" else None)
    try:
        code = trainer.fit()
        reporter.ended(trainer.best)
    except Exception as error:
        if is_out_of_memory(error):
            from engine.memory.out_of_memory import while_training

            raise while_training(error, trainer) from None
        raise
    finally:
        reporter.close()
    if trainer.broken is not None and (lost := trainer.broken.summary()):
        log.warning(lost)
    untrained = trainer.best.figure is not None and trainer.best.update == 0 < trainer.position.update
    if config.MODEL.starts_at_probe and untrained:
        log.info("Training did not improve on the linear probe that it began with: that is the best checkpoint.")
    if world.first:
        by, figure = metric_named(trainer.best.by), trainer.best.figure
        context = in_context(by, figure, len(ready.val_set), largest_class(ready))
        validations = History.of_run(folder).of("val")
        if context and figure is not None:
            context = f"{context} {flatters(len(validations), folder, config.DATA)}".rstrip()
        commands = next_commands(run, trainer.position, trainer.best, folder, trainer.paused)
        for line in filter(None, (context, *_strange(ready, folder), copies_in_words(folder), commands)):
            log.info(line)
    place = f"; {_whereabouts(run, ready, folder, trainer)}" if world.first else ""
    words = "Paused, to be resumed with -resume" if trainer.paused else "Done"
    best, total = trainer.best_words(": best "), clock(trainer.throughput.total)
    log.info("%s%s; total time %s%s", words, best, total, place)
    if world.first and (file := os.environ.get(FOLDER_FILE)):
        Path(file).write_text(f"{folder}\n", encoding="utf-8")
    return code


def _strange(ready: ReadyToTrain, folder: Path) -> list[str]:
    """What looks wrong with the validation images, by the last validation's predictions."""
    table = read_predictions(folder, ready.position.update) or {}
    guesses = table.get("guess", table.get(f"{AVERAGE.prefix}guess"))
    if guesses is None:
        return []
    columns = table["labels"].astype(int), guesses.astype(int)
    return strange(*columns, ready.val_set.classes or [], ready.choices.get(FOLDS))


def _whereabouts(run: Run, ready: ReadyToTrain, folder: Path, trainer: Trainer) -> str:
    """Where the run's files are. Those that were removed while it trained are written again, or else named."""
    best = None if trainer.best.figure is None else folder_name(trainer.best.update)
    if missing_from(folder, best):
        with suppress(UserError):
            write_run_files(run, ready, folder)
    gone = missing_from(folder, best) + trainer.reporter.lost
    what = f"{folder} lacks {some_of(gone)}, removed or not written while the run trained"
    return what if gone else f"everything is in {folder}"
