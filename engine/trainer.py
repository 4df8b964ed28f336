"""The loop around the update: epochs, reports, validation, checkpoints, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from datasets import TrainLoader, ValLoader
from engine.checkpoint.saver import progress
from engine.checkpoint.sharded_saver import all_of_it, guessed_seconds, saver_of
from engine.checkpoint.state import finite_everywhere, state_of
from engine.evaluate import evaluate
from engine.machine.stopping import TIME_IS_UP, Deadline, Stopped, Stopping, signals
from engine.measure.bottleneck import Judge
from engine.measure.meters import Means, Reading
from engine.measure.profile import UpdateProfiler
from engine.measure.progress import Best, Position, best_by, seconds_of, start_of_best
from engine.measure.throughput import Pace
from engine.optim.ema import on_its_device
from engine.report.curves import Curves
from engine.report.reporter import Reporter
from engine.report.skips import Health
from engine.update import Parts, train_update
from utils.config import Config
from utils.distributed.world import World, broadcast, broadcast_buffers
from utils.errors import EXIT_DONE, AllRanksError
from utils.log import log


@dataclass
class Trainer:
    config: Config
    world: World
    parts: Parts
    train_loader: TrainLoader
    val_loader: ValLoader
    validation_samples: int
    reporter: Reporter
    pace: Pace
    judge: Judge
    folder: Path
    position: Position
    best: Best
    meta: dict[str, Any]
    title: str

    def __post_init__(self) -> None:
        self.per_epoch = self.train_loader.order.updates
        self.global_batch = self.config.DATA.BATCH_SIZE * self.config.TRAIN.ACCUM_ITER * self.world.size
        self._saved_at = self.position.update
        self._curves = Curves(self.folder)
        self.health = Health(self.config.AMP, self.parts, self.world, self.reporter)
        self._last_figures: dict[str, Means] = {}
        self.train_loader.broken.write_into(self.folder)
        self.saver, self._saves = saver_of(self.folder, self.config, self.parts, self.world)
        self._saved_when = perf_counter()
        self.best = start_of_best(self.best, self.config.SAVE_BEST_BY)
        limit = self.config.MAX_TIME
        deadline = Deadline(
            seconds_of(limit) if limit else None, lambda: self.saver.longest or guessed_seconds(self.parts)
        )
        if self.parts.compiled is not None:
            self.parts.compiled.when_done = self._leave_out_pause
        self.paused = False
        self._stopping = Stopping(self.world, deadline.passed)

    def fit(self) -> int:
        """Train to the end of the plan, or until something ends it early. The exit code."""
        self.reporter.run("resume" if self.position.update else "start", self.position, self.pace.total)
        try:
            self._train()
            self.train_loader.broken.share(self.world)
        except Stopped as stopped:
            self._pause(stopped)
            return stopped.exit_code
        except Exception:
            self.saver.let_end()
            raise
        self._finish_saving()
        self._draw(force=True)
        self.reporter.run("end", self.position, self.pace.total, self.judge.now(self.pace.tally))
        return EXIT_DONE

    def _train(self) -> None:
        position, ended = self.position, "stale" if self._out_of_patience() else "done"
        if position.step:
            self._between_epochs_work(reported=False)  # where a run was stopped in a validation, it is made now
        with UpdateProfiler(self.config.PROFILE, self.folder, self.world) as self._profiler:
            while position.epoch <= self.config.TRAIN.NUM_EPOCHS and ended == "done" and not self._enough_updates():
                ended = self._epoch()
        improved = position.validated != position.update and self._validate()
        if improved or self._saved_at != position.update:
            self._save()

    def _pause(self, stopped: Stopped) -> None:
        """Save where the run stands, so that going on from there tells and does all that was not yet told and done."""
        self.paused = True
        log.info("%s: saving after update %d, to be resumed.", stopped.words, self.position.update)
        if self._saved_at != self.position.update:
            self._save()
        self._finish_saving()
        if stopped.wish == TIME_IS_UP:  # a signal leaves no time for it
            self._draw(force=True)
        self.reporter.run("paused", self.position, self.pace.total)
        self._stopping.wait_for_all()

    def _epoch(self) -> str:
        """From the present position to the end of its epoch, unless something ends it before."""
        position, began = self.position, perf_counter()
        self.parts.start_epoch(position.epoch)
        for window in self.train_loader.epoch(position.epoch, start=position.step):
            train_update(self.parts, window, position.update + 1)
            position.step += 1
            position.update += 1
            signals.patient = True
            self.pace.count(self.world.size * sum(len(share.indices) for share in window.shares if share.weight))
            self.reporter.moved(position)
            self._profiler.step()
            self.health.look(position, together=False)
            reported = self._report_due()
            if reported:
                self._report()
            elif self.health.look_is_due(position):
                self._stop_on_skips(self._read())
            self._stopping.check()
            self._between_epochs_work(reported)
            if self._enough_updates():
                break
        if position.step < self.per_epoch:  # ended by MAX_UPDATES
            return "done"
        self._end_epoch(perf_counter() - began)
        return "stale" if self._out_of_patience() else "done"

    def _end_epoch(self, seconds: float) -> None:
        """Sum up, step into the next epoch, validate, save."""
        position, config = self.position, self.config
        reading = self._read()
        self._stop_on_nan(reading)
        self.health.look(position, together=True)
        self.reporter.epoch(position, reading.epoch, seconds, self.judge.first_epoch(self.pace.tally))
        finished, improved = position.epoch, False
        last = finished == config.TRAIN.NUM_EPOCHS
        due = finished % config.VALIDATE_FREQ == 0 or last or self._comes_round(config.VALIDATE_EVERY_UPDATES)
        if due and position.validated != position.update:
            improved = self._validate()
        position.epoch, position.step = finished + 1, 0
        self.parts.meters.start_epoch()
        kept = bool(config.KEEP_EVERY) and finished % (config.KEEP_EVERY or 1) == 0
        due = finished % config.SAVE_FREQ == 0 or self._comes_round(config.SAVE_EVERY_UPDATES)
        if self._minutes_are_up() or due or kept or last or improved:
            self._save(finished)
        self.train_loader.broken.share(self.world)
        self._draw()
        self._leave_out_pause()

    def _between_epochs_work(self, reported: bool) -> None:
        """What VALIDATE_EVERY_UPDATES and SAVE_EVERY_... ask for, besides the ends of epochs."""
        position, config = self.position, self.config
        if position.step == self.per_epoch:
            return
        due = self._comes_round(config.VALIDATE_EVERY_UPDATES)
        improved = due and position.validated != position.update and self._validate()
        due = self._comes_round(config.SAVE_EVERY_UPDATES)
        if improved or (due and self._saved_at != position.update) or (reported and self._minutes_are_up()):
            self._save()
            self._leave_out_pause()

    def _comes_round(self, every: int | None) -> bool:
        return every is not None and self.position.update % every == 0

    def _minutes_are_up(self) -> bool:
        """Whether SAVE_EVERY_MINUTES have passed since the last save, by the clock of rank 0."""
        minutes = self.config.SAVE_EVERY_MINUTES
        return minutes is not None and broadcast(perf_counter() - self._saved_when >= 60 * minutes, self.world)

    def _leave_out_pause(self) -> None:
        """Validation and saving are not training: neither their time nor their waiting for data counts."""
        self.train_loader.take_wait()
        self.pace.restart()

    def _enough_updates(self) -> bool:
        limit = self.config.TRAIN.MAX_UPDATES
        return limit is not None and self.position.update >= limit

    def _out_of_patience(self) -> bool:
        patience = self.config.TRAIN.PATIENCE
        if patience is None or self.best.stale < patience:
            return False
        log.info("No better figure for %d validations (TRAIN.PATIENCE): the run ends here.", self.best.stale)
        return True

    def _report_due(self) -> bool:
        step, freq = self.position.step, self.config.REPORT_FREQ
        if self.config.LOG_STYLE == "fleet":  # counts from 0, and reports its batch 0
            return (step - 1) % freq == 0
        return step % freq == 0 or step == self.per_epoch

    def _report(self) -> None:
        """Read the device, and tell."""
        reading = self._read()
        perf = self.pace.read(self.train_loader.take_wait())
        self.health.look(self.position, together=True)
        self.reporter.train(self.position, reading, perf)
        self._stop_on_nan(reading)
        self._stop_on_skips(reading)
        self.saver.look()
        if self._saves and not self.saver.prepared:
            self.saver.prepare(*self._all_that_is_saved({}))

    def _stop_on_skips(self, reading: Reading) -> None:
        if self.health.too_many(reading):
            self._save()
            self._finish_saving()
            raise self.health.diagnosis(reading, self.position.update)

    def _read(self) -> Reading:
        parts = self.parts
        return parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())

    def _stop_on_nan(self, reading: Reading) -> None:
        self.health.stop_on_nan(reading, self.position, self.folder)

    def _validate(self) -> bool:
        """Validate the model and, where there is one, its average. True if the best figure so far came of it."""
        parts, began = self.parts, perf_counter()
        self.health.look(self.position, together=True)  # skips are told before it, wherever the run is stopped
        models: dict[str, nn.Module] = {"": parts.model}
        if parts.ema is not None:
            models["ema_"] = parts.ema.module
        try:
            figures = {prefix: self._evaluate(model) for prefix, model in models.items()}
        except AllRanksError as error:  # raised by all ranks alike; what was trained is not to be lost by it
            if self._saved_at != self.position.update:
                self._save()
            self._finish_saving()
            raise AllRanksError(
                f"{error} All that was trained is saved; -resume goes on with this validation."
            ) from None
        self._last_figures = figures
        self.position.validated = self.position.update
        self.reporter.validation(self.position, figures, perf_counter() - began)
        self._leave_out_pause()
        found = best_by(figures, self.config.SAVE_BEST_BY, self.position)
        if found.figure is not None and self.best.is_beaten_by(found.figure):
            self.best = found
            return True
        self.best.stale += 1
        return False

    def _evaluate(self, model: nn.Module) -> Means:
        parts, samples, check = self.parts, self.validation_samples, partial(self._stopping.check, of="batches")
        model = on_its_device(model, parts.precision.device)
        broadcast_buffers(model, self.world)
        return evaluate(model, self.val_loader, samples, parts.inputs, parts.precision, self.world, between=check)

    def _save(self, finished_epoch: int | None = None) -> None:
        """Save everything. `finished_epoch` where an epoch has just ended."""
        self._stop_on_nan(self._read())
        parts, position = self.parts, self.position
        self.health.look(position, together=True)  # what was found so far is told now: it is not saved
        began = self._saved_when = perf_counter()
        meters = parts.meters.state()
        self.saver.wait_for_writer()
        if not finite_everywhere(parts):
            raise AllRanksError(f"update {position.update}: the weights hold NaN or infinity; this is not saved.")
        self._saved_at = position.update
        if not self._saves:
            return
        self.reporter.flush()
        figures = self._last_figures if position.validated == position.update else {}
        meta = {**progress(position, finished_epoch, figures, self.best), **self.meta}
        self.saver.save(*self._all_that_is_saved(meters), meta, self.best, began)

    def _all_that_is_saved(self, meters: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        parts = self.parts
        return all_of_it(parts, state_of(parts, self.position, self.best, self.global_batch, meters))

    def _finish_saving(self) -> None:
        self.saver.finish()
        if self.parts.sharding is not None:  # a rank whose rows rank 0 may still ask for is not to leave
            self._stopping.wait_for_all()

    def _draw(self, force: bool = False) -> None:
        if self.world.first:
            self._curves.draw(self.title + self.best_words(", best "), force)

    def best_words(self, before: str = "") -> str:
        return before + self.best.words() if self.best.figure is not None else ""
