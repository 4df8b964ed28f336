"""Reports what a run does: log lines, metrics.jsonl, TensorBoard, trackers, the progress bar."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.callback import Figure
from engine.measure.meters import Best, Position, Reading, updates_left, work_until
from engine.measure.throughput import COMPUTE, Bottleneck, Perf
from engine.task.base import Metrics
from utils.config.schema import Config
from utils.log import DETAIL, TABLED, end_introduction, log
from utils.record.history import Line, MetricsFile, plain
from utils.record.run_folder import os_errors_as_user_errors
from utils.text import clock, redacted
from vitamp.metrics import WeightSet, metric_named

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

    from engine.report.live import Live
    from engine.report.trackers import TrackedRun


class Reporter:
    """Reports to all of these on rank 0. On other ranks, it only logs lines, which go to their own log files."""

    def __init__(
        self, config: Config, per_epoch: int, folder: Path | None, start: Position, tracked: Sequence[TrackedRun] = ()
    ) -> None:
        """`per_epoch`: updates per epoch. `start`: the position at which this start of the run begins.

        `folder`: the run's; None to write no files, and show no progress on the terminal.
        `tracked`: the run at services such as Weights & Biases, which get the same metrics.
        """
        self.config = config
        self.per_epoch = per_epoch
        self.folder = folder
        self._counts_from_0 = config.LOG_STYLE == "fleet"
        """Whether log lines count epochs and batches from 0, as those of Paddle's Fleet do"""
        if self._counts_from_0:
            log.info(
                "LOG_STYLE fleet: epoch and batch lines count from 0, all other output (best, metrics.jsonl) from 1."
            )
        self._metrics: MetricsFile | None = None
        self._board: Board | None = None
        self._tracked = tracked
        self._last_verdict: Bottleneck | None = None
        self._first_update = start.update
        self._epochs_before = start.epoch - 1 + start.step / max(per_epoch, 1)
        """Epochs that earlier starts of the run have trained, with the fraction of the last one"""
        # Seconds and epochs at the first report, from which the time left is estimated.
        self._pace_start: tuple[float, float] | None = None
        if folder:
            with os_errors_as_user_errors(folder):
                self._metrics = MetricsFile(folder, repeats=partial(_is_repeated, start))
            # Points up to the checkpoint stay: they were flushed before it was saved.
            self._board = Board(folder / "tensorboard", start.update + 1)
        end_introduction()
        self.live: Live | None = None
        shows_progress = config.LOG_STYLE == "table" or sys.stdout.isatty() or sys.stderr.isatty()
        if folder and not config.EVAL and shows_progress:
            from engine.report.live import Live

            self.live = Live(config, per_epoch, start)

    def event(self, kind: str, position: Position, perf: dict[str, Any] | None = None, **fields: Any) -> None:
        """Write a line of metrics.jsonl. All that depends on time or machine goes under `perf`."""
        line = {"event": kind, "epoch": position.epoch, **fields, "perf": perf or {}}
        if self._metrics:
            self._metrics.add(redacted(json.dumps(plain(line))))

    def run(self, what: str, position: Position, seconds: float, verdict: Bottleneck | None = None) -> None:
        """Report that the run starts, resumes, is paused or ends (`what`), and its bottleneck, if given."""
        self.event("run", position, _perf(seconds, verdict), what=what, update=position.update)
        self._log_verdict(verdict)

    def _log_verdict(self, verdict: Bottleneck | None) -> None:
        """Log the bottleneck of the training's speed, unless it is None or logged already."""
        if verdict is not None and verdict != self._last_verdict:
            # Only as a detail of the log, if the same stage limits the speed as before, or if it is the computation, as
            # it should be.
            same_stage = self._last_verdict is not None and verdict.bound == self._last_verdict.bound
            extra = DETAIL if same_stage or verdict.bound == COMPUTE else None
            log.info("Where the time went: %s", verdict.text, extra=extra)
            self._last_verdict = verdict

    def train(
        self, position: Position, reading: Reading, perf: Perf, figures: Mapping[str, Figure] | None = None
    ) -> None:
        """Report the metrics of an update, the speed, and the time left. `figures`: those of the run's callbacks."""
        metrics_now = reading.update
        figures = figures or {}
        left = self._seconds_left(position, perf.seconds)

        # The log.
        time_left = "" if left is None else f", Left: {clock(left)}"
        has_scaling = reading.scale != 1.0 or reading.skipped > 0
        scaling = f"Scale: {reading.scale:g}, Skipped: {reading.skipped}, " if has_scaling else ""
        health = (
            f"Img/s: {perf.images_per_second:.1f}, Data: {perf.data_wait_percent:.0f}%, Grad: {reading.grad_norm:.4f}, "
            f"{scaling}Mem: {perf.peak_memory_gb:.2f}GB, "
            f"Time: {clock(perf.seconds)}{time_left}{perf.words()}"
        )
        health += "".join(f", {figure.words}" for figure in figures.values())
        if self._counts_from_0:
            log.info(f"[Epoch {position.epoch - 1}, batch {position.step - 1}] {metrics_now.fleet()}")
            log.info("Lr: %.6e, %s", reading.lr, health)
        else:
            log.info(
                f"Epoch[{position.epoch:03d}/{self.config.TRAIN.NUM_EPOCHS:03d}], "
                f"Step[{position.step:04d}/{self.per_epoch:04d}], Lr: {reading.lr:.6e}, "
                f"Loss: {metrics_now.loss:.4f} ({reading.epoch.loss:.4f}), {reading.epoch.average()}, {health}",
                extra=TABLED,
            )

        # The terminal, metrics.jsonl, TensorBoard and trackers.
        if self.live:
            self.live.reported(reading, perf, left)
        metrics = {
            **metrics_now.fields(),
            "lr": reading.lr,
            "grad_norm": reading.grad_norm,
            "scale": reading.scale,
            "skipped": reading.skipped,
            **{name: figure.value for name, figure in figures.items()},
        }
        self.event("train", position, perf.as_dict(), step=position.step, update=position.update, **metrics)
        self._plot("train", {**metrics, "images_per_second": perf.images_per_second, **perf.extra()}, position.update)

    def _seconds_left(self, position: Position, seconds: float) -> float | None:
        """Estimate the seconds until the run ends; None if no pace is known yet. `seconds`: since the run began.

        The pace is the mean since the first report, with validation and saving. The time before that says nothing of
        the pace: workers were started then, and kernels chosen or compiled.
        """
        epochs = self._epochs_before + (position.update - self._first_update) / self.per_epoch
        epochs_at_end = epochs + updates_left(self.config, position, self.per_epoch) / self.per_epoch
        self._pace_start = self._pace_start or (seconds, epochs)  # at the first report
        first_seconds, first_epochs = self._pace_start
        # Work in epochs on full images: epochs on smaller ones are less work.
        first_work, work, work_at_end = work_until(self.config, (first_epochs, epochs, epochs_at_end))
        if work <= first_work:
            return None
        return (seconds - first_seconds) * (work_at_end - work) / (work - first_work)

    def epoch(self, position: Position, means: Metrics, seconds: float, verdict: Bottleneck | None = None) -> None:
        """Report the mean metrics of an epoch that has ended, its duration, and the bottleneck, if given."""
        self.summary("Train", position, means, seconds)
        self.event("epoch", position, _perf(seconds, verdict), update=position.update, **means.fields())
        if self.live:
            self.live.epoch_ended(position, means, seconds)
        self._log_verdict(verdict)

    def validation(
        self, position: Position, metrics: Mapping[WeightSet, Metrics], seconds: float, mark: str = ""
    ) -> None:
        """Report the metrics of a validation, by set of weights.

        `mark`: word for the best validation so far; '' if this is not the best.
        """
        fields: dict[str, float | None] = {}
        for weight_set, means in metrics.items():
            fields |= {f"{weight_set.prefix}{name}": value for name, value in means.fields().items()}
            label = f" ({weight_set.mark})" if weight_set.mark else ""  # " (EMA)", or '' for the trained weights
            self.summary("Validation", position, means, seconds, label)
        self.event("val", position, {"seconds": round(seconds, 3)}, update=position.update, **fields)
        self._plot("val", fields, position.update)
        if self.live:
            self.live.validated(position, metrics, seconds, mark)

    def summary(self, phase: str, position: Position, means: Metrics, seconds: float, weights: str = "") -> None:
        """Log the metrics of an epoch, of its part up to the end of the run, or of a validation.

        `phase`: Train or Validation. `weights`: label of the set of weights, such as " (EMA)"; '' for the trained ones.
        """
        if self.config.EVAL and not position.update:  # the evaluated weights are not those of a run
            epoch = ""
        elif self._counts_from_0:
            epoch = f"Epoch {position.epoch - 1}, "
        else:
            # The number of epochs is padded as a text, since with -eval it may be "auto".
            epoch = f"Epoch[{position.epoch:03d}/{self.config.TRAIN.NUM_EPOCHS:0>3}], "
        more = "".join(f", {metric_named(name).words}: {value:.4f}" for name, value in means.more.items())
        update_before_epoch = position.update - position.step
        resumed_within = phase == "Train" and update_before_epoch < self._first_update
        since = " since the resume" if resumed_within else ""
        metrics_after_time = means.after_time()
        line = f"----- {epoch}{means.summary(phase)}, time: {seconds:.2f}{since}{metrics_after_time}{more}{weights}"
        log.info(line, extra=TABLED)

    def flush(self) -> None:
        """Sync metrics.jsonl and TensorBoard to the disk, so that no checkpoint is ahead of them."""
        if self._metrics:
            self._metrics.sync()
        if self._board:
            self._board.flush()

    def _plot(self, group: str, metrics: Mapping[str, float | None], update: int) -> None:
        """Send metrics to TensorBoard and the trackers. `group`: train or val."""
        values = {name: value for name, value in metrics.items() if value is not None}  # a task may lack some
        if self._board:
            for name, value in values.items():
                self._board.add(f"{group}/{name}", value, update)
        for service in self._tracked:
            service.add(group, values, update)

    def ended(self, best: Best) -> None:
        """Report success to the services, at the end of training or when it is paused."""
        for service in self._tracked:
            service.ended(best)

    @property
    def lost(self) -> list[str]:
        """Names of what could not be written into the run's folder."""
        return ["later points in tensorboard"] if self._board and self._board.ended else []

    def close(self) -> None:
        """Close all that it reports to."""
        for target in (self.live, self._metrics, self._board, *self._tracked):
            if target:
                target.close()


class Board:
    """TensorBoard's file. If the disk does not take a point, later ones are left out."""

    def __init__(self, folder: Path, start: int) -> None:
        """`start`: points that an earlier process wrote from this update on are hidden."""
        self._folder = folder
        self._start = start
        self._writer: SummaryWriter | None = None
        self.ended = False
        """Whether a point could not be written; later ones are left out."""

        # Disk errors of TensorBoard's own thread are ignored, since nobody can catch them there. This stays so for the
        # rest of the process: the thread may fail at any time.
        previous_hook = threading.excepthook

        def ignore_disk_errors(args: threading.ExceptHookArgs) -> None:
            is_of_tensorboard = type(args.thread).__name__ == "_AsyncWriterThread"
            if not (is_of_tensorboard and issubclass(args.exc_type, OSError)):
                previous_hook(args)

        threading.excepthook = ignore_disk_errors

    def add(self, name: str, value: float, update: int) -> None:
        self._attempt(self._add, name, value, update)

    def _add(self, name: str, value: float, update: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter  # slow, so only once there is a point

            self._writer = SummaryWriter(str(self._folder), purge_step=self._start)
        self._writer.add_scalar(name, value, update)

    def flush(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.flush)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _attempt(self, call: Callable[..., object], *args: object) -> None:
        """Call, unless a call has failed before. If it fails, warn, and leave out all later points."""
        if self.ended:
            return
        try:
            call(*args)
        except (OSError, UnicodeError) as error:  # the package takes no folder whose name is not UTF-8
            self.ended = True
            log.warning(
                "%s cannot be written (%s): TensorBoard shows no later points. Training continues, and metrics.jsonl "
                "has them all.",
                self._folder,
                getattr(error, "strerror", error),
            )


def _perf(seconds: float, verdict: Bottleneck | None) -> dict[str, Any]:
    """Return the field `perf` of a line of metrics.jsonl: duration, and the bottleneck if there is one."""
    return {"seconds": round(seconds, 3)} | ({} if verdict is None else {"verdict": verdict.as_dict()})


def _is_repeated(start: Position, line: Line) -> bool:
    """Whether a run that is resumed at `start` will write this line of metrics.jsonl again.

    Such a line is removed before the run resumes. True for a damaged line, so that it is removed, too.
    """
    try:
        event = line["event"]
        update = line["update"]
        # Lines after the checkpoint are written again, those before it are not.
        if update != start.update:
            return update > start.update
        # At the update of the checkpoint: a validation is repeated unless it was complete, and the line of an epoch
        # unless the position is in the next epoch already. Others are repeated only by a run that starts over.
        if event == "val":
            is_complete = start.validated == update
            return not is_complete
        if event == "epoch":
            return line["epoch"] >= start.epoch
        return update == 0
    except (KeyError, TypeError):
        return True
