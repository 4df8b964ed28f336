"""What a training shows while it runs: a bar below log lines, or on a terminal a table of epochs with a bar below it.

Both use only numbers that the host already has: they never wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter

from tqdm import tqdm

from engine.measure.bottleneck import shown_rate
from engine.measure.meters import Reading
from engine.measure.progress import Position, clock, updates_left
from engine.measure.throughput import Perf
from engine.report.bar import Bar, Piece
from engine.report.epoch_table import Column, EpochTable, Row
from engine.task.base import Metrics
from utils.config import Config
from utils.log import brief_terminal, print_on_terminal
from utils.record.weight_sets import WeightSet
from utils.terminal import Brief, terminal_width

LINES_PER_HEADER = 20


class Live:
    """Follows a training and shows nothing. Its methods are called in the order of the events."""

    def moved(self, position: Position) -> None:
        """An update was done."""

    def reported(self, position: Position, reading: Reading, perf: Perf) -> None:
        """The metrics of an update were read."""

    def epoch_ended(self, position: Position, means: Metrics, seconds: float) -> None:
        """`means`, `seconds`: of its training. A validation may follow."""

    def validating(self, position: Position) -> None:
        """A validation begins."""

    def validated(
        self, position: Position, metrics: Mapping[WeightSet, Metrics], seconds: float, marks: tuple[str, ...]
    ) -> None:
        """`marks`: words for the best validation so far, the longest first; none for another."""

    def close(self) -> None:
        """The training ended or failed."""


def live_of(config: Config, per_epoch: int, start: Position, prints: bool) -> Live:
    """`prints`: whether this process draws on the terminal."""
    if not prints or config.EVAL:
        return Live()
    if (brief := brief_terminal()) is not None:
        return LiveTable(config, per_epoch, start, brief)
    return BarBelowLines(config, per_epoch, start) if sys.stderr.isatty() else Live()


class BarBelowLines(Live):
    """A bar of the whole run, on standard error, below log lines."""

    def __init__(self, config: Config, per_epoch: int, start: Position) -> None:
        self._epochs = config.TRAIN.NUM_EPOCHS
        total = start.update + updates_left(config, start, per_epoch)
        self._bar = tqdm(total=total, initial=start.update, unit="update", dynamic_ncols=True, leave=False)

    def moved(self, position: Position) -> None:
        self._bar.update(1)
        self._bar.set_description(f"epoch {position.epoch}/{self._epochs}", refresh=False)

    def reported(self, position: Position, reading: Reading, perf: Perf) -> None:
        text = f"loss {reading.update.loss:.4f}, {perf.images_per_second:,.0f} img/s"
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        self._bar.close()


class LiveTable(Live):
    """One row per epoch, and one bar of the current epoch. Log lines are printed between the rows."""

    def __init__(self, config: Config, per_epoch: int, start: Position, brief: Brief) -> None:
        self._config, self._per_epoch, self._brief = config, per_epoch, brief
        self._table, self._bar = EpochTable(config, brief.looks), Bar(brief.looks)
        self._pace = _Pace(start)
        self._row: Row | None = None
        """Of an epoch that may still be validated"""
        self._reading: Reading | None = None
        self._skipped = 0
        """Updates up to the last row"""
        self._columns: tuple[Column, ...] = ()
        """Of the last header"""
        self._header_line = 0
        brief.training = True
        if brief.left_out:
            print_on_terminal(f"  {brief.left_out} more in log.txt")
        print_on_terminal("")
        self._print_header(terminal_width())

    def moved(self, position: Position) -> None:
        self._print_row()
        now = perf_counter()
        self._pace.moved(position, now)
        if self._bar.is_due(now):
            self._bar.draw(self._pieces(position, now), position.step / self._per_epoch, now)

    def reported(self, position: Position, reading: Reading, perf: Perf) -> None:
        self._reading = reading
        self._pace.reported(position.update, perf.images_per_second)

    def epoch_ended(self, position: Position, means: Metrics, seconds: float) -> None:
        self._row = self._new_row(f"{position.epoch}", seconds)
        self._row.train_loss = means.loss

    def validating(self, position: Position) -> None:
        self._bar.draw([Piece(self._place(position), 0), Piece("validating", 1)], None, perf_counter())

    def validated(
        self, position: Position, metrics: Mapping[WeightSet, Metrics], seconds: float, marks: tuple[str, ...]
    ) -> None:
        if self._row is None:
            self._row = self._new_row(f"{position.epoch - 1 + position.step / self._per_epoch:.2f}", 0.0)
        self._row.seconds += seconds
        self._row.metrics, self._row.marks = metrics, marks
        self._print_row()

    def close(self) -> None:
        self._bar.close()
        self._print_row()

    def _new_row(self, place: str, seconds: float) -> Row:
        reading, row = self._reading, Row(f"{place}/{self._config.TRAIN.NUM_EPOCHS}", seconds)
        if reading is not None:
            row.lr, row.skipped = reading.lr, reading.skipped - self._skipped
            row.images_per_second = self._pace.take()
            self._skipped = reading.skipped
        return row

    def _print_row(self) -> None:
        if self._row is None:
            return
        row, self._row, width = self._row, None, terminal_width()
        if self._table.columns(width) != self._columns or self._brief.lines - self._header_line >= LINES_PER_HEADER:
            self._print_header(width)
        print_on_terminal(self._table.row(row, self._columns, width))

    def _print_header(self, width: int) -> None:
        self._columns = self._table.columns(width)
        print_on_terminal(self._table.header(self._columns))
        self._header_line = self._brief.lines

    def _place(self, position: Position) -> str:
        return f"epoch {position.epoch}/{self._config.TRAIN.NUM_EPOCHS}"

    def _pieces(self, position: Position, now: float) -> list[Piece]:
        pieces = [Piece(self._place(position), 0), Piece(_of(position.step, self._per_epoch), 2)]
        if self._reading is not None:
            pieces.append(Piece(f"loss {self._reading.update.loss:.4f}", 3))
        if self._pace.last is not None:
            pieces.append(Piece(f"{shown_rate(self._pace.last)} images/s", 4))
        if (left := self._pace.of_epoch(position.step, self._per_epoch - position.step, now)) is not None:
            pieces.append(Piece(f"epoch {clock(left)} left", 5))
        left = self._pace.of_run(position.update, updates_left(self._config, position, self._per_epoch), now)
        return [*pieces, Piece(f"run {clock(left)} left", 1)]


def _of(done: int, total: int) -> str:
    """'  20/1,251': as wide for every number, so that the bar keeps its length."""
    return f"{done:,}".rjust(len(f"{total:,}")) + f"/{total:,}"


class _Pace:
    """Speed and time left, by the clock and by what was reported."""

    def __init__(self, start: Position) -> None:
        self._began, self._first_update = perf_counter(), start.update
        self._epoch, self._first_step, self._epoch_began = 0, 0, 0.0
        """First step of the epoch here, and when it ended"""
        self.last: float | None = None
        """Images per second of the last report"""
        self._reported = start.update
        self._updates = self._time = 0.0
        """Updates since the last row, and time in units of the seconds that an image's update takes"""

    def moved(self, position: Position, now: float) -> None:
        if position.epoch != self._epoch:
            self._epoch, self._first_step, self._epoch_began = position.epoch, position.step, now

    def reported(self, update: int, images_per_second: float) -> None:
        self.last = images_per_second
        updates, self._reported = update - self._reported, update
        if images_per_second > 0:
            self._updates += updates
            self._time += updates / images_per_second

    def take(self) -> float | None:
        """Mean images per second since the last call, without validation and saving."""
        mean = self._updates / self._time if self._time else None
        self._updates = self._time = 0.0
        return mean

    def of_epoch(self, step: int, left: int, now: float) -> float | None:
        """Seconds left of the epoch, by its own updates."""
        done = step - self._first_step
        return (now - self._epoch_began) * left / done if done > 0 else None

    def of_run(self, update: int, left: int, now: float) -> float:
        """Seconds left of the run at the mean speed of this start, validation and saving included."""
        return (now - self._began) * left / max(update - self._first_update, 1)
