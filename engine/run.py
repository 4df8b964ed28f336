"""Carries out a command in one process: from joining the other ranks to the last log line."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import data_identity
from engine.checkpoint.state import check_room, keep_base
from engine.machine import stopping
from engine.machine.device import Run, no_gpu_notice, pick_device, set_up_device
from engine.machine.memory import is_out_of_memory
from engine.machine.stopping import signals
from engine.measure.meters import is_complete, updates_left
from engine.memory.global_batch import settle_batch
from engine.report.banner import banner
from engine.report.outcome import at_end, next_commands
from engine.report.reporter import Reporter
from engine.report.trust import Splits, splits_of
from engine.run_folder import lock_existing_folder, make_run_folder, write_run_files
from engine.setup import ReadyToTrain, build_for_training
from engine.trainer import Trainer
from utils.config import Loaded
from utils.config.kinds import AUTO
from utils.config.resumed import resumed_run
from utils.distributed.world import World, broadcast, on_every_rank, on_rank_0
from utils.errors import EXIT_DONE, AllRanksError, AllRanksUserError, TrainingError, UserError
from utils.log import (
    CONTROL,
    DETAIL,
    IN_LINE,
    brief_terminal,
    log,
    log_lines,
    print_on_terminal,
    stop_holding_warnings,
)
from utils.program import FOLDER_FILE
from utils.record.folder_lock import FolderLock
from utils.record.history import History, is_end, last_line
from utils.record.run_folder import missing_from
from utils.text import clock, counted, some_of
from vitamp.checkpoints import CHECKPOINTS, Checkpoint, folder_name

if TYPE_CHECKING:
    from engine.amp.op_lists import OpLists


def run(loaded: Loaded, world: World, dry: bool) -> int:
    """Choose the device and threads, join the other ranks, train or evaluate, and return the exit code."""
    config = loaded.config
    try:
        device = pick_device(config.DEVICE, world)
        threads = set_up_device(config, device, world)
        for note in loaded.notes:
            log.info("%s", note.translate(IN_LINE), extra=None if note in loaded.remarks else DETAIL)
        for warning in loaded.warnings:
            log.warning(warning.translate(IN_LINE))
        advice = no_gpu_notice(config, device, dry) if world.first else None
        if advice:
            log.info(advice, extra=DETAIL)
        if world.size > 1:
            from engine.machine.environment import join_run

            join_run(config, world, device, threads)
        # One process cannot shard. config.yaml keeps the settings as given, for a resume with several processes.
        as_given = {"DIST.STRATEGY": config.DIST.STRATEGY, "DIST.HSDP": config.DIST.HSDP}
        if world.size == 1 and config.DIST.STRATEGY == "fsdp":
            log.info("DIST.STRATEGY fsdp has no effect with one process.")
            config = config.changed(DIST={"STRATEGY": "ddp", "HSDP": False})
        this_run = Run(config, world, device, threads, asked=as_given)
        try:
            return _carry_out(this_run, dry)
        except Exception as error:
            # If another rank exits first, the launcher ends this one by a signal. It waits until the error is reported.
            signals.deferred = True
            if is_out_of_memory(error):
                from engine.memory.out_of_memory import describe

                error_type = UserError if world.size == 1 else TrainingError
                raise error_type(describe(error, this_run)) from None
            raise
    finally:
        if world.size > 1:
            from utils.distributed.group import leave

            leave()


def _carry_out(run: Run, dry: bool) -> int:
    """Evaluate, try out or train, and return the exit code.

    Meanwhile, a training holds the lock of its folder, and the user's lists of operators apply.
    """
    amp = run.config.AMP
    with ExitStack() as until_the_end:
        lock = until_the_end.enter_context(FolderLock())
        op_lists = None
        if amp.CUSTOM_WHITE_LIST or amp.CUSTOM_BLACK_LIST:
            from engine.amp.op_lists import OpLists

            op_lists = OpLists(run.device.type, amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST)
            until_the_end.enter_context(op_lists)
        if run.config.EVAL:
            from engine.evaluation.evaluate_only import evaluate_only

            evaluate_only(run, dry)
            return EXIT_DONE
        if dry:
            return dry_run(run)
        return train(run, lock, op_lists)  # which reports operators on the lists that the model never calls


def train(given: Run, lock: FolderLock, op_lists: OpLists | None) -> int:
    """Train from start to end, and return the exit code.

    `given`: the run with the settings as given, such as a batch size `auto`. `lock`: takes the run's folder.
    `op_lists`: the user's lists of operators, which already apply.
    """
    world = given.world
    on_rank_0(world, lambda: lock_existing_folder(given.config, lock))
    run, checkpoint = _settle(given)
    ready = _build(run, checkpoint)
    folder = make_run_folder(run, "train", lock)
    _introduce(run, ready, checkpoint, folder)
    if checkpoint and _has_finished(run, ready, checkpoint, folder):
        return EXIT_DONE

    ready.adapters = keep_base(run, folder, ready.model, checkpoint)  # the frozen weights, once for all checkpoints
    on_rank_0(world, lambda: check_room(folder / CHECKPOINTS, ready.parts))
    write_run_files(run, ready, folder)
    ready.parts.assemble()  # attaches the callbacks to the model: DDP, compiling, the EMA, ...
    first_update = ready.position.update
    try:
        return _fit(run, ready, folder, op_lists)
    except UserError as error:
        if ready.position.update == first_update:
            raise
        # A UserError has exit code 2, which is only for problems found before the first update.
        error_type = AllRanksError if isinstance(error, AllRanksUserError) else TrainingError
        raise error_type(str(error)) from None


def dry_run(given: Run) -> int:
    """Build what a training needs, try a few updates, log what it would cost, and return the exit code.

    `given`: the run with the settings as given, such as a batch size `auto`.
    """
    from engine.memory.batch_size import check_batch
    from engine.memory.dry_run import try_out

    run, checkpoint = _settle(given)
    on_every_rank(run.world, lambda: check_batch(run))
    ready = _build(run, checkpoint, dry=True)
    _introduce(run, ready, checkpoint, None)
    try_out(run, ready, updates_left(run.config, ready.position, ready.train_loader.order.updates))
    return EXIT_DONE


def _settle(run: Run) -> tuple[Run, Checkpoint | None]:
    """Find the checkpoint to resume from, and settle what is `auto`: learning rates, batch size, number of epochs.

    Returns `run` with these settings, and the checkpoint; None for a new run. A collective call.
    """
    checkpoint = None
    if run.config.MODEL.RESUME is not None:
        from engine.checkpoint.find import chosen_checkpoint

        checkpoint = chosen_checkpoint(run.config, run.world)
    if run.world.first:
        signals.saved = checkpoint is not None
    else:
        signals.saved = None  # only rank 0 saves, and says so when a signal ends it
    if AUTO in (run.config.TRAIN.BASE_LR, run.config.TRAIN.LAYER_DECAY):
        from engine.measured_rate import settle_rate

        run = settle_rate(run, checkpoint)
    run = settle_batch(run, checkpoint)
    if run.config.TRAIN.NUM_EPOCHS == AUTO:
        from engine.memory.dry_run import settle_epochs

        run = settle_epochs(run)
    return run, checkpoint


def _build(run: Run, checkpoint: Checkpoint | None, dry: bool = False) -> ReadyToTrain:
    """Build the training on all ranks, check that all have the same images, and log advice on its precision."""
    ready = on_every_rank(run.world, lambda: build_for_training(run, checkpoint, dry))
    if run.world.size > 1:
        from engine.machine.environment import check_images

        check_images(ready, run.world)
    if ready.precision.choice.warning:
        log.warning(ready.precision.choice.warning)
    if ready.precision.level != "O0" and run.device.type == "cuda":
        from engine.amp.low_precision import tile_size_hint

        advice = tile_size_hint(ready.model, run.config.DATA.BATCH_SIZE)
        if advice:
            log.info(advice)
    return ready


def _introduce(run: Run, ready: ReadyToTrain, checkpoint: Checkpoint | None, folder: Path | None) -> None:
    """Log the checkpoint that is resumed, warnings, the banner, and what the images show. `folder` None: a dry run."""
    if checkpoint:
        from engine.checkpoint.restore import log_resumption

        log_resumption(checkpoint, run.config, ready.parts, ready.position)
    for warning in (*ready.train_loader.order.warnings(), *ready.warnings):
        log.warning(warning)
    notes: list[str] = []
    if run.world.first and run.config.DATA.CHECK != "off" and ready.train_set.single_images() is not None:
        from datasets.examine.training import check_data

        notes = check_data(run.config, ready.train_set, ready.val_set, folder, ready.choices)
    if folder is not None:
        stop_holding_warnings()
    text = banner(run, ready, folder)
    log.info(text, extra=DETAIL)
    brief = brief_terminal()
    if brief and folder is not None:
        print_on_terminal(brief.banner(text.translate(CONTROL)))
    log_lines(f"{note}." for note in notes)


def _has_finished(run: Run, ready: ReadyToTrain, checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether a resumed run has nothing left to do; if so, log it.

    Otherwise, sets `ready.best` to the best metric that the run has to beat, and `ready.measured`. A collective call.
    """
    config = run.config
    world = run.world
    position = ready.position
    # A run may have been killed between its last checkpoint and the last line of its history: then its end is repeated.
    # A new folder, into which the checkpoint of another run is resumed, has no line, so there the checkpoint decides.
    last = last_line(folder)
    may_have_finished = broadcast(not last or is_end(last), world)
    finished = may_have_finished and is_complete(config, position)
    if not finished:
        from engine.checkpoint.meta import MEASURED
        from engine.checkpoint.restore import best_to_beat

        val_data = data_identity(ready.val_set)
        ready.best = best_to_beat(ready.best, val_data, folder, checkpoint, config, world)
        if position.validated == position.update and checkpoint.meta.get("val_data") == val_data:
            ready.measured = {key: checkpoint.meta[key] for key in MEASURED if key in checkpoint.meta}
        # Complete by TRAIN.PATIENCE, which counts validations since the best one, if that still is the one to beat.
        is_given_up = position.step == 0 and ready.best.is_given_up(config.TRAIN.PATIENCE)
        finished = may_have_finished and is_given_up
    if finished:
        finished_folder = resumed_run(config) or folder
        if world.first:
            log.info(next_commands(run, position, ready.best, finished_folder))
            _tell_folder(finished_folder)
        done = counted(position.update, "update") + ready.best.words_after(", best ")
        log.info("This run had already finished: %s; its folder is %s", done, finished_folder)
    return finished


def _fit(run: Run, ready: ReadyToTrain, folder: Path, op_lists: OpLists | None) -> int:
    """Train with a reporter, close the reporter, log how the training ended, and return the exit code.

    `op_lists`: the user's lists of operators, of which the trainer reports those that the model never calls.
    """
    config = run.config
    world = run.world
    splits = splits_of(config.DATA)
    tracked = []
    if world.first and config.trackers:
        from engine.report.trackers import TrackedRun

        tracked = [TrackedRun(key, config, folder, ready.precision.name) for key in config.trackers]
    report_folder = folder if world.first else None  # only rank 0 writes
    reporter = Reporter(config, ready.train_loader.order.updates, report_folder, ready.position, tracked)
    if ready.precision.level == "O0":
        op_lists = None  # without AMP, the lists have no effect, which notes on the settings have said already
    trainer = Trainer(run, ready, folder, reporter, op_lists)
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
    _conclude(run, ready, trainer, splits)
    return code


def _conclude(run: Run, ready: ReadyToTrain, trainer: Trainer, splits: Splits) -> None:
    """Log how the training ended, and what comes next.

    No images are read, since their files may be gone by now. A tool that started the run gets the folder's path in the
    file that the environment variable FOLDER_FILE names.
    """
    folder = trainer.folder
    broken_images = trainer.broken.summary() if trainer.broken is not None else ""
    if broken_images:
        log.warning(broken_images)
    files = ""
    time_label = "total time"
    if run.world.first:
        history = History.of_run(folder)
        if any(line.get("what") == "resume" for line in history.of("run")):
            time_label = "time since the resume"
        log_lines(at_end(trainer, splits, history))
        files = f"; {_mend_files(run, ready, folder, trainer)}"
    outcome = "Paused, to be resumed with -resume" if trainer.paused else "Done"
    best = trainer.best.words_after(": best ")
    total = clock(time.monotonic() - stopping.BEGAN)  # since the program began
    log.info("%s%s; %s %s%s", outcome, best, time_label, total, files)
    if run.world.first:
        _tell_folder(folder)


def _tell_folder(folder: Path) -> None:
    """Write the path of the run's folder into the file that the environment variable FOLDER_FILE names, if any."""
    folder_file = os.environ.get(FOLDER_FILE)
    if folder_file:
        Path(folder_file).write_bytes(os.fsencode(f"{folder}\n"))


def _mend_files(run: Run, ready: ReadyToTrain, folder: Path, trainer: Trainer) -> str:
    """Write config.yaml and run.json again if anything was removed while the run trained.

    Returns words that say where the run's files are, and which are missing.
    """
    has_best = trainer.best.figure is not None
    best_checkpoint = folder_name(trainer.best.update) if has_best else None
    if missing_from(folder, best_checkpoint):
        with suppress(UserError):
            write_run_files(run, ready, folder)
    missing = missing_from(folder, best_checkpoint) + trainer.reporter.lost
    if missing:
        return f"{folder} lacks {some_of(missing)}, removed or not written while the run trained"
    return f"everything is in {folder}"
