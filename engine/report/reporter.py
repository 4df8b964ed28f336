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
from utils.log import DETAIL, log
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
        """`folder` None: write no files, and show no progress on the terminal. `start`: position of this start.

        `tracked`: the run at services such as Weights & Biases, which get the same metrics.
        """
        self.config = config
        self.per_epoch = per_epoch
        self.folder = folder
        self._fleet = config.LOG_STYLE == "fleet"
        if self._fleet:
            log.info(
                "LOG_STYLE fleet: epoch and batch lines count from 0, all other output (best, metrics.jsonl) from 1."
            )
        self._metrics: MetricsFile | None = None
        self._board: Board | None = None
        self._tracked = tracked
        self._last_verdict: Bottleneck | None = None
        self._first_update = start.update
        self._epochs_before = start.epoch - 1 + start.step / max(per_epoch, 1)
        # Seconds and epochs at the first report, from which the time left is estimated.
        self._pace_start: tuple[float, float] | None = None
        if folder:
            with os_errors_as_user_errors(folder):
                self._metrics = MetricsFile(folder, partial(_is_repeated, start))
            # Points up to the checkpoint stay: they were flushed before it was saved.
            self._board = Board(folder / "tensorboard", start.update + 1)
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
            same_bound = self._last_verdict is not None and verdict.bound == self._last_verdict.bound
            # As a detail, if it is not new, or if training waits for computing alone, as it should.
            extra = DETAIL if same_bound or verdict.bound == COMPUTE else None
            log.info("Where the time went: %s", verdict.text, extra=extra)
            self._last_verdict = verdict

    def train(
        self, position: Position, reading: Reading, perf: Perf, figures: Mapping[str, Figure] | None = None
    ) -> None:
        """Report the metrics of an update, the speed, and the time left. `figures`: those of the run's callbacks."""
        metrics_now = reading.update
        figures = figures or {}

        # The time left, at the mean pace since the first report, validation and saving included. The first report says
        # nothing of the pace: workers were started until then, and kernels chosen or compiled.
        epochs = self._epochs_before + (position.update - self._first_update) / self.per_epoch
        epochs_at_end = epochs + updates_left(self.config, position, self.per_epoch) / self.per_epoch
        self._pace_start = self._pace_start or (perf.seconds, epochs)
        seconds_at_start, epochs_at_start = self._pace_start
        before, done, all_work = work_until(self.config, (epochs_at_start, epochs, epochs_at_end))
        left = None
        if done > before:
            left = (perf.seconds - seconds_at_start) * (all_work - done) / (done - before)

        time_left = "" if left is None else f", Left: {clock(left)}"
        has_scaling = reading.scale != 1.0 or reading.skipped > 0
        scaling = f"Scale: {reading.scale:g}, Skipped: {reading.skipped}, " if has_scaling else ""
        health = (
            f"Img/s: {perf.images_per_second:.1f}, Data: {perf.data_wait_percent:.0f}%, Grad: {reading.grad_norm:.4f}, "
            f"{scaling}Mem: {perf.peak_memory_gb:.2f}GB, "
            f"Time: {clock(perf.seconds)}{time_left}{perf.words()}"
        )
        health += "".join(f", {figure.words}" for figure in figures.values())
        if self._fleet:
            log.info(f"[Epoch {position.epoch - 1}, batch {position.step - 1}] {metrics_now.fleet()}")
            log.info("Lr: %.6e, %s", reading.lr, health)
        else:
            log.info(
                f"Epoch[{position.epoch:03d}/{self.config.TRAIN.NUM_EPOCHS:03d}], "
                f"Step[{position.step:04d}/{self.per_epoch:04d}], Lr: {reading.lr:.6e}, "
                f"Loss: {metrics_now.loss:.4f} ({reading.epoch.loss:.4f}), {reading.epoch.average()}, {health}",
                extra=DETAIL,
            )
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
        """Report the metrics of a validation, by set of weights. `mark`: word for the best so far; '' for another."""
        fields: dict[str, float | None] = {}
        for which, means in metrics.items():
            fields |= {f"{which.prefix}{name}": value for name, value in means.fields().items()}
            self.summary("Validation", position, means, seconds, f" ({which.mark})" if which.mark else "")
        self.event("val", position, {"seconds": round(seconds, 3)}, update=position.update, **fields)
        self._plot("val", fields, position.update)
        if self.live:
            self.live.validated(position, metrics, seconds, mark)

    def summary(self, phase: str, position: Position, means: Metrics, seconds: float, weights: str = "") -> None:
        """Log the metrics of an epoch, of its part up to the end of the run, or of a validation.

        `phase`: Train or Validation. `weights`: mark of the set of weights; '' for the trained ones.
        """
        epoch = f"Epoch[{position.epoch:03d}/{self.config.TRAIN.NUM_EPOCHS:0>3}], "  # with -eval perhaps auto
        if self.config.EVAL and not position.update:  # the evaluated weights are not of a run
            epoch = ""
        elif self._fleet:
            epoch = f"Epoch {position.epoch - 1}, "
        more = "".join(f", {metric_named(name).words}: {value:.4f}" for name, value in means.more.items())
        resumed_within = phase == "Train" and position.update - position.step < self._first_update
        since = " since the resume" if resumed_within else ""
        line = f"----- {epoch}{means.summary(phase)}, time: {seconds:.2f}{since}{means.after_time()}{more}{weights}"
        log.info(line, extra=DETAIL)

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
        previous_hook = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            """Ignore disk errors of TensorBoard's own thread, where nobody can catch them."""
            if not (type(args.thread).__name__ == "_AsyncWriterThread" and issubclass(args.exc_type, OSError)):
                previous_hook(args)

        threading.excepthook = hook

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
    """Whether a run that is resumed at `start` will write a line of metrics.jsonl again, which is then removed.

    A damaged line is removed too.
    """
    try:
        event = line["event"]
        update = line["update"]
        if update != start.update:
            return update > start.update
        if event == "val":
            return start.validated != update
        # A run that is resumed at update 0 starts over.
        return line["epoch"] >= start.epoch if event == "epoch" else update == 0
    except (KeyError, TypeError):
        return True
