"""The training loop around the update: epochs, reports, validation, checkpoints, and when to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from datasets import Window
from engine.amp.health import Health
from engine.checkpoint.meta import progress_meta, weights_meta
from engine.checkpoint.saver import estimate_seconds
from engine.checkpoint.state import finite_everywhere, saver_of, snapshot_of
from engine.evaluation.evaluate import keep_predictions, on_device, validate
from engine.machine.device import Run, global_batch
from engine.machine.stopping import NOTHING, Deadline, Stopped, Stopping, signals
from engine.measure.meters import MOST_SKIPS, NEVER, Best, Reading, mark_of_best, seconds_of, updates_left
from engine.measure.throughput import Bottleneck, Throughput, find_bottleneck
from engine.report.curves import Curves, title_of
from engine.report.reporter import Reporter
from engine.run_folder import largest_class
from engine.setup import ReadyToTrain, setting_of
from engine.task.base import Metrics
from engine.update import train_update
from utils.distributed.world import all_gather, broadcast, broadcast_buffers
from utils.errors import EXIT_DONE, AllRanksError, TrainingError
from utils.log import log
from utils.record.predictions import PROBE, read_probe
from vitamp.checkpoints import CHECKPOINTS, folder_name
from vitamp.metrics import PLAIN, TOP1, WeightSet, best_set, metric_named

if TYPE_CHECKING:
    from engine.amp.op_lists import OpLists


MIN_SECONDS = 5.0
"""With less time measured, the bottleneck is not reported: another run of a few seconds may find another one."""
UPDATES_AHEAD = 4
"""Updates before a validation at which its first batches begin to load"""


class Trainer:
    """Trains what `ready` holds, and keeps its position and best metric up to date."""

    def __init__(
        self, run: Run, ready: ReadyToTrain, folder: Path, reporter: Reporter, op_lists: OpLists | None
    ) -> None:
        """`op_lists`: the user's lists of operators, of which those that the model never calls are reported."""
        config = run.config
        world = run.world
        self.run = run
        self.ready = ready
        self.folder = folder
        self.reporter = reporter
        self.throughput = Throughput(ready.precision.device, ready.parts.stages)
        self.config = config
        self.world = world
        self.parts = ready.parts
        self.position = ready.position
        self.train_loader = ready.train_loader

        # The best validation
        self.best = ready.best
        self._best_before = self.best
        """The best before that, which counts again if the checkpoint of the best cannot be written"""
        self.best_metrics: Metrics | None = None
        """Metrics of the best validation so far; None if that was before this start of the run"""
        # A resumed run drops the best so far if the validation images have changed. Then the probe's predictions that
        # it has saved are not of these images either, and are not read.
        is_probe_known = world.first and config.MODEL.starts_at_probe and self.best.figure is not None
        self.probe = read_probe(folder, ready.val_set.sample_labels()) if is_probe_known else None
        """On rank 0: the predictions of the linear probe that the run began with, if it did"""

        # Reports
        self.per_epoch = self.train_loader.order.updates
        self.paused = False
        self._setting = setting_of(ready)
        self._bottleneck_reported = False
        self._meta = weights_meta(run, ready)
        self._title = title_of(config, ready.precision.name, ready.precision.level != "O0")
        self.guess = largest_class(ready) if world.first else None
        """Top-1 accuracy in percent of always guessing the most frequent class"""
        self._curves = Curves(folder, config.SAVE_BEST_BY)
        self._health = Health(config.AMP, self.parts, world, reporter)
        self._op_lists = op_lists
        """None once they are reported"""

        # Saving and stopping
        self._saver = saver_of(folder, config, self.parts, world)
        self._saved_at = self.position.update, self.position.validated
        """Update of the last checkpoint, and the last validated update by then"""
        self._last_metrics: dict[WeightSet, Metrics] = {}
        """Metrics of the last validation"""
        limit = seconds_of(config.MAX_TIME) if config.MAX_TIME else None
        self._deadline = Deadline(limit, lambda: self._saver.longest or estimate_seconds(self.parts))
        self._stopping = Stopping(world, self._deadline.passed, config.DIST.group_timeout)

        # Loading. The number of epochs to load counts the current one, of which `position.step` updates are done.
        updates_from_epoch_start = self.position.step + updates_left(config, self.position, self.per_epoch)
        epoch_count = -(-updates_from_epoch_start // self.per_epoch)  # rounded up
        epochs = range(self.position.epoch, self.position.epoch + epoch_count)
        self._windows = self.train_loader.epochs(epochs, self.position.step)
        """Yields the micro-batches of each update, as a `Window`"""
        self._window: Window | None = None
        """The micro-batches of the update that is computed now; None between updates"""
        if not ready.train_set.in_memory:
            from datasets.loading import workers

            workers.on_long_wait = self._stop_waiting
        self.broken = self.train_loader.broken
        if self.broken is not None:
            self.broken.folder = folder
        self.parts.after_pause = self._restart_clocks

    def fit(self) -> int:
        """Train to the end of the plan, or until something ends the run early. Returns the exit code."""
        self.reporter.run("resume" if self.ready.resumed else "start", self.position, self.throughput.total)
        try:
            self._train()
        except Stopped as stopped:
            # Only save. All else that is due after this update is left to the resumed run, also the curves, because
            # there may be no time for it.
            self.paused = True
            log.info("%s: saving after update %d; resume with -resume.", stopped.words, self.position.update)
            self._save()
            self._finish_saving()
            self.reporter.run("paused", self.position, self.throughput.total)
            self._stopping.wait_for_all()
            return stopped.exit_code
        except Exception:
            self._saver.finish_after_failure()
            raise
        self._finish_saving()
        self._draw(force=True)
        self.reporter.run("end", self.position, self.throughput.total, self._bottleneck())
        return EXIT_DONE

    def _train(self) -> None:
        """Train all epochs that are left, then validate and save.

        Before the first update, save a checkpoint of another run here, repeat a validation that was interrupted, or
        validate the linear probe that training begins with.
        """
        position = self.position
        # A run that begins at a checkpoint of another run saves it anew, with its validation's metrics: -resume auto
        # needs one in this folder.
        is_here = (self.folder / CHECKPOINTS / folder_name(position.update)).exists()
        if position.update and not broadcast(is_here, self.world):
            self._save(anew=True, measured=self.ready.measured)
        # The run may have been stopped in a validation within an epoch, which is then repeated.
        if 0 < position.step < self.per_epoch:
            self._validate_and_save()
        # A probe is validated and saved before it is trained, which may only make it worse. If only the end of the run
        # validates, it is not, and the end is the best.
        train = self.config.TRAIN
        validates_by_epoch = max(train.NUM_EPOCHS, 1) >= self.config.VALIDATE_FREQ
        only_end_validates = not validates_by_epoch and self.config.VALIDATE_EVERY_UPDATES is None
        if position.update == 0 and self.config.MODEL.starts_at_probe:
            if only_end_validates:
                log.info("The linear probe is not validated, since VALIDATE_FREQ is more than TRAIN.NUM_EPOCHS.")
            else:
                self._validate_and_save(all_due=True)
        # The profiler wants a call after each update; without it, that call does nothing.
        profiling: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        if self.config.PROFILE and self.world.first:
            from engine.measure.stages import profiled

            profiling = profiled(self.config.PROFILE, self.folder)
        with profiling as self._tell_profiler:
            while position.epoch <= train.NUM_EPOCHS and not self._ends_early():
                self._epoch()
        self._validate_and_save(all_due=True)

    def _bottleneck(self) -> Bottleneck | None:
        """Find what limits the speed of training; None after too few updates or seconds. A collective call."""
        tally = self.throughput.tally
        waited_percents = all_gather([tally.waited_percent], self.world)
        if tally.seconds < MIN_SECONDS:
            return None
        return find_bottleneck(tally, self._setting, waited_percents)

    def _epoch(self) -> None:
        """Train from the current position to the end of the epoch, or to TRAIN.MAX_UPDATES."""
        position = self.position
        freq = self.config.REPORT_FREQ
        began = perf_counter()
        self.parts.enter(position.epoch)
        for window in islice(self._windows, self.per_epoch - position.step):
            self._load_validation_ahead()
            self._window = window  # for `_stop_waiting`, which the loader may call meanwhile
            train_update(self.parts, window, position.update + 1)
            self._window = None
            self.throughput.count(self.train_loader.order.samples_of(position.step))  # steps of an epoch count from 0
            position.step += 1
            position.update += 1
            # From the first update on, there is something to save: signals no longer end the process at once, but wait
            # until `_stopping` looks at them.
            signals.deferred = True

            # Reports
            if self.reporter.live:
                self.reporter.live.stepped(position)
            self._tell_profiler()
            if self._op_lists is not None:  # the first update has computed the model
                self._op_lists.warn_uncalled()
                self._op_lists = None
            self._health.report(position, together=False)
            # Fleet counts from 0, and reports its batch 0.
            number = position.step - 1 if self.config.LOG_STYLE == "fleet" else position.step
            if number % freq == 0 or position.step == self.per_epoch or position.update == 1:
                self._report()
            elif self.parts.precision.scaler.is_enabled() and position.update % MOST_SKIPS == 0:
                # Reports look for skipped updates, too, but may be far apart.
                self._stop_on_skips(self._read())

            self._stopping.check()
            if position.step < self.per_epoch:  # what is due at the end of the epoch follows in `_end_epoch`
                self._validate_and_save()
            if self._update_limit_reached():
                break
        seconds = perf_counter() - began
        reading = self._read()
        if position.step == self.per_epoch:
            self._end_epoch(reading, seconds)
        else:
            self.reporter.summary("Train", position, reading.epoch, seconds)

    def _report(self) -> None:
        """Report the metrics of this update, and stop on NaN or on too many skipped updates."""
        reading = self._read()
        seconds_waited = self.train_loader.take_wait()  # for batches, since the last report
        perf = self.throughput.read(seconds_waited)
        self._health.report(self.position, together=True)  # on all ranks
        self.reporter.train(self.position, reading, perf, self.parts.figures())
        self._stop_on_nan(reading)
        self._stop_on_skips(reading)
        self._saver.report()

    def _end_epoch(self, reading: Reading, seconds: float) -> None:
        """Report an epoch that has ended, and do what is due after it: validate, save, draw the curves.

        `reading`: metrics of the epoch, which took `seconds`.
        """
        position = self.position
        self._stop_on_nan(reading)
        self._health.report(position, together=True)  # on all ranks
        # The bottleneck is reported once, after the first epoch of this start.
        bottleneck = None if self._bottleneck_reported else self._bottleneck()
        self._bottleneck_reported = True
        self.reporter.epoch(position, reading.epoch, seconds, bottleneck)
        is_last_epoch = position.epoch == self.config.TRAIN.NUM_EPOCHS
        self._validate_and_save(finished_epoch=position.epoch, all_due=is_last_epoch)
        if self.broken is not None:
            self.broken.share(self.world)  # the unreadable images of all ranks
        self._draw()
        self._restart_clocks()

    def _stop_waiting(self) -> None:
        """End a long wait for a batch if it is time to stop. The loader calls this while it waits.

        Not with several ranks: the others would wait for this one.
        """
        if self.world.size > 1:
            return
        was_asked = signals.request != NOTHING
        is_within_update = self._window is not None and self._window.begun
        if is_within_update:
            if was_asked:
                signals.leave()  # exits at once: half an update cannot be saved
        elif was_asked or self.position.update > 0:
            # Raises `Stopped`, for a signal or because -max_time is over. The time limit alone does not end a run
            # before its first update, when there is nothing to save.
            self._stopping.check()

    def _validate_and_save(self, finished_epoch: int | None = None, all_due: bool = False) -> None:
        """Validate and save, if that is due after this update.

        `finished_epoch`: the epoch that this update ends, if it does. `all_due`: both are due, as at the end of a run.
        """
        position = self.position
        config = self.config

        def is_due(epochs: int | None, updates: int | None = None) -> bool:
            """Whether something is due that is done every so many epochs, or updates."""
            if all_due or (updates and position.update % updates == 0):
                return True
            return finished_epoch is not None and bool(epochs) and finished_epoch % epochs == 0

        is_new_best = False
        if is_due(config.VALIDATE_FREQ, config.VALIDATE_EVERY_UPDATES):
            is_new_best = self._validate()
        # After the validation, which is of this epoch, and before saving: a checkpoint says where training goes on.
        if finished_epoch is not None:
            position.epoch = finished_epoch + 1
            position.step = 0
            self.parts.meters.start_epoch()
        # A new best is always saved, and again if this update is saved already: its checkpoint then names the best.
        if is_new_best or is_due(config.SAVE_FREQ, config.SAVE_EVERY_UPDATES) or is_due(config.KEEP_EVERY):
            self._save(anew=is_new_best or finished_epoch is not None)
            self._restart_clocks()

    def _load_validation_ahead(self) -> None:
        """If a validation is near, begin to load its first batches."""
        position = self.position
        config = self.config
        updates_until_next = [updates_left(config, position, self.per_epoch)]
        every = config.VALIDATE_EVERY_UPDATES
        if every:
            updates_until_next.append(every - position.update % every)
        if position.epoch % config.VALIDATE_FREQ == 0:
            updates_until_next.append(self.per_epoch - position.step)
        if min(updates_until_next) <= UPDATES_AHEAD:
            passes = len(self.parts.weights)  # each set of weights, such as the EMA, is validated in its own pass
            with suppress(TrainingError):  # the validation itself will raise it, after the training so far is saved
                self.ready.val_loader.load_ahead(passes)

    def _restart_clocks(self) -> None:
        """Begin to measure anew, so that validation and saving do not count as training, or as waiting for data."""
        self._deadline.restart()
        self.train_loader.take_wait()
        self.throughput.restart()

    def _update_limit_reached(self) -> bool:
        limit = self.config.TRAIN.MAX_UPDATES
        return limit is not None and self.position.update >= limit

    def _ends_early(self) -> bool:
        """Whether the run ends before its last epoch; if so, log why."""
        position = self.position
        # A run may be resumed at the last update of an epoch, which `_epoch` has to close first.
        is_epoch_complete = position.step == self.per_epoch
        if self._update_limit_reached() and not is_epoch_complete:
            log.info("The run ends here, after update %d, as set by TRAIN.MAX_UPDATES.", position.update)
            return True
        # TRAIN.PATIENCE ends a run only between epochs: the rest of an epoch may bring a better metric. A run that is
        # resumed within an epoch comes here, too.
        is_within_epoch = position.step > 0
        if is_within_epoch or not self.best.is_given_up(self.config.TRAIN.PATIENCE):
            return False
        metric = metric_named(self.best.by).words
        log.info("The run ends here: no better %s in %d validations (TRAIN.PATIENCE).", metric, self.best.stale)
        return True

    def _stop_on_skips(self, reading: Reading) -> None:
        """Save and raise an error if too many updates in a row were skipped, since the gradients overflowed."""
        if reading.skipped_in_a_row >= MOST_SKIPS:
            # With AMP.AUTO_FP32, the report may move the module that overflows to fp32, which starts the count anew.
            self._health.report(self.position, together=True)
            reading = self._read()
        error = self._health.too_many_skips(reading, self.position.update)
        if error:
            self._save()
            self._finish_saving()
            raise error

    def _read(self) -> Reading:
        """Read the metrics of the last update and of the epoch so far. Waits for the device. A collective call."""
        parts = self.parts
        return parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())

    def _stop_on_nan(self, reading: Reading) -> None:
        """Raise an error if a loss or a gradient was NaN or infinite."""
        if reading.first_bad != NEVER:
            self._saver.finish_after_failure()  # the error names the last checkpoint, which may not be written yet
            self._health.stop_on_nan(reading, self.position, self.folder)

    def _validate(self) -> bool:
        """Validate all sets of weights that the run keeps, and report it. Returns whether one is now the best so far.

        Does nothing, and returns False, if this update is validated already.
        """
        position = self.position
        # `validated` is 0 before the first validation, as `update` is before the first update. So only a best so far
        # shows that the start was validated.
        may_be_validated = position.update > 0 or self.best.figure is not None
        if may_be_validated and position.validated == position.update:
            return False
        self._stop_on_nan(self._read())  # the metrics of weights that are NaN would mean nothing

        # Measure
        began = perf_counter()
        self._health.report(position, together=True)  # report skips before a validation that may be interrupted
        if self.reporter.live:
            self.reporter.live.validating(position)
        metrics = self._measure()
        seconds = perf_counter() - began
        self._wait_for_writer()
        self._last_metrics = metrics
        position.validated = position.update
        # At step 0, the validation is of the epoch before, which has just ended.
        validated_at = position if position.step > 0 else replace(position, epoch=position.epoch - 1)
        self._add_probe(metrics)

        # Compare the better set of weights with the best validation so far
        metric = metric_named(self.config.SAVE_BEST_BY)
        fields_of_sets = {weight_set: metrics_of_set.fields() for weight_set, metrics_of_set in metrics.items()}
        better_set = best_set(fields_of_sets, metric) or PLAIN
        figure = metrics[better_set].value(metric.name)
        loss = metrics[better_set].loss
        is_new_best = self.best.is_beaten_by(figure, loss)
        mark = ""
        if is_new_best:
            mark = mark_of_best(self.guess, figure if metric.name == TOP1.name else None)

        # Report
        if self.world.first:
            keep_predictions(self.folder, self.ready.val_set, self.config.DATA, metrics, validated_at.update)
        self.reporter.validation(validated_at, metrics, seconds, mark)
        self._restart_clocks()
        if is_new_best:
            self._best_before = self.best
            kind = f"{better_set.prefix}{metric.name}"
            is_tie = figure == self.best.figure  # only the loss is lower, which is no progress for TRAIN.PATIENCE
            self.best = Best(
                figure=figure,
                loss=loss,
                kind=kind,
                update=validated_at.update,
                epoch=validated_at.epoch,
                stale=self.best.stale + 1 if is_tie else 0,
            )
            self.best_metrics = metrics[better_set]
        else:
            is_first_after_probe = self.best.update == 0 and self.best.stale == 0
            if self.config.MODEL.starts_at_probe and is_first_after_probe:
                words = "Not better than the linear probe that training began with (%s): often so in the first epochs."
                log.info(words, metric.words)
            self.best.stale += 1  # validations since the metric has improved
        return is_new_best

    def _add_probe(self, metrics: dict[WeightSet, Metrics]) -> None:
        """Add the predictions of the linear probe that the run began with to those of this validation.

        The report and a resumed run read them there. They are the predictions of the validation before the first
        update, and are kept from then on. Nothing is added if the run began without a probe.
        """
        if self.config.MODEL.starts_at_probe and self.position.update == 0:
            self.probe = metrics[PLAIN].predictions.get("guess")
        if self.probe is not None:
            metrics[PLAIN] = replace(metrics[PLAIN], predictions={**metrics[PLAIN].predictions, PROBE: self.probe})

    def _measure(self) -> dict[WeightSet, Metrics]:
        """Measure the metrics of all sets of weights that the run keeps. If that fails, save the training so far."""
        metrics = {}
        check = partial(self._stopping.check, step_kind="batches")
        try:
            for which, weights in self.parts.weights.items():
                model = on_device(weights, self.ready.precision.device)
                broadcast_buffers(model, self.world)
                metrics[which] = validate(self.ready, model, self.world, check)
        except Exception as error:
            # Saving needs all ranks, and only an AllRanksError is raised by all of them. `Stopped` is no failure: then
            # `fit` saves.
            all_ranks_failed = self.world.size == 1 or isinstance(error, AllRanksError)
            if self.position.update > 0 and all_ranks_failed and not isinstance(error, Stopped):
                self._save()
                self._finish_saving()
                log.warning("The training so far is saved; -resume repeats this validation.")
            raise
        return metrics

    def _save(self, anew: bool = False, measured: dict[str, Any] | None = None) -> None:
        """Save a checkpoint of this update, unless there is one that has its validation, too.

        `anew`: save in any case, as after an improvement, and at the end of an epoch. `measured`: entries of meta.json
        about a validation of an earlier start. A collective call.
        """
        parts = self.parts
        position = self.position
        is_saved = self._saved_at == (position.update, position.validated)
        if is_saved and not anew:
            return
        self._stop_on_nan(self._read())
        self._health.report(position, together=True)  # report skips now: a resumed run would not know of them
        began = perf_counter()
        meters = parts.meters.state()
        self._wait_for_writer()
        # Besides the gradients, which `_stop_on_nan` has checked: a finite gradient may give an infinite weight.
        if not finite_everywhere(parts):
            raise AllRanksError(f"update {position.update}: the weights contain NaN or infinity; they are not saved.")
        self._saved_at = position.update, position.validated
        self.reporter.flush()
        metrics = self._last_metrics if position.validated == position.update else {}
        meta = progress_meta(position, metrics, self.best) | (measured or {}) | self._meta
        snapshot = snapshot_of(parts, position, self.best, global_batch(self.config, self.world), meters, meta)
        self._saver.save(replace(snapshot, paused_at=began))

    def _wait_for_writer(self) -> None:
        """Wait until the previous checkpoint is written. If it was the best and could not be, restore the best before.

        A collective call.
        """
        self._saver.wait_for_writer()
        if self.best.figure is None:
            return
        is_best_lost = broadcast(self.best.update in self._saver.failing, self.world)  # only rank 0 knows
        if is_best_lost:
            lost_best = self.best
            self.best = self._best_before
            log.warning("Best so far: %s. Lost with its checkpoint: %s.", self.best.words(), lost_best.words())

    def _finish_saving(self) -> None:
        """Wait until the last checkpoint is written on all ranks, and share the list of images that were unreadable."""
        self._saver.finish()
        if self.parts.sharding is not None:  # rank 0 may still ask a rank for its rows
            self._stopping.wait_for_all()
        if self.broken is not None:  # a paused run names the list too
            self.broken.share(self.world)

    def _draw(self, force: bool = False) -> None:
        """Draw the run's curves on rank 0. `force`: also if they were drawn a short time ago."""
        if self.world.first:
            self._curves.draw(self._title + self.best.words_after(", best "), force)
