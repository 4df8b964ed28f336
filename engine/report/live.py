"""Shows a training on a terminal: one row per epoch, and tqdm's bar of the current epoch below it.

Everything is shown from numbers that the host already has: nothing here waits for the device.
"""

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from engine.measure.meters import Position, Reading
from engine.measure.throughput import Perf, shown_rate
from engine.task.base import Metrics
from utils.config import Config
from utils.log import brief_terminal, print_on_terminal
from utils.standard_output import OutputError
from utils.terminal import Brief, terminal_width
from utils.text import clock
from vitamp.metrics import AVERAGE, KNN, LOSS, MACRO_F1, PLAIN, TOP5, Metric, WeightSet, metric_named

LINES_PER_HEADER = 20
GAP = "  "
BOLD = "1"
GREEN = "1;32"
NOTHING = "-"
BAR = "{desc} {bar} {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
BESIDE_WORDS = 42
"""Columns of the bar's line for all but its last words, which tqdm would cut anywhere if they did not fit"""


class _Bar(tqdm):
    """A bar whose terminal may hang up."""

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        with contextlib.suppress(OutputError):  # the terminal has hung up, and the run is about to save
            return super().display(msg, pos)


class Live:
    """Shows the progress of a training. Its methods are called in the order of the events.

    On a terminal with LOG_STYLE auto, and everywhere with table, a table of epochs takes the place of the log's
    details. With the other styles, only the bar is shown, on standard error below the log lines. Without a terminal,
    there is no bar.
    """

    def __init__(self, config: Config, per_epoch: int, start: Position) -> None:
        """`per_epoch`: updates per epoch. `start`: the position at which this start of the run begins."""
        self._config = config
        self._per_epoch = per_epoch
        self._epoch = start.epoch
        self._resumed = start.update > 0
        terminal = brief_terminal()
        if terminal is None or not terminal.has_table:
            self._table = None
            bar_file = sys.stderr
            shows_bar = sys.stderr.isatty()
        else:
            self._table = EpochTable(config, terminal)
            bar_file = sys.stdout  # below the rows of the table
            shows_bar = terminal.can_redraw
        self._bar = _Bar(
            desc=self._place(start),
            total=per_epoch,
            initial=start.step,
            file=bar_file,
            bar_format=BAR,
            dynamic_ncols=True,
            leave=False,
            disable=not shows_bar,
        )

    def _place(self, position: Position) -> str:
        return f"epoch {position.epoch}/{self._config.TRAIN.NUM_EPOCHS}"

    def stepped(self, position: Position) -> None:
        """Show that an update was done."""
        if self._table is not None:
            self._table.print_row()  # of the epoch before, if no validation has followed it
        if position.epoch != self._epoch:
            self._epoch = position.epoch
            self._bar.initial = 0  # after a resume, the bar began within an epoch
            self._bar.reset()
            self._bar.set_description_str(self._place(position), refresh=False)
        updates_shown = self._bar.n
        self._bar.update(position.step - updates_shown)

    def reported(self, reading: Reading, perf: Perf, left: float | None) -> None:
        """Show the metrics of an update. `left`: seconds until the run ends; None if no pace is known yet."""
        if self._table is not None:
            # The count of skipped updates is of the whole run; those before a resume belong to earlier rows.
            is_first_report = self._table.rate is None
            if self._resumed and is_first_report:
                self._table.skipped_before = reading.skipped
            self._table.lr = reading.lr
            self._table.rate = perf.images_per_second
            self._table.skipped = reading.skipped
        rate = f"{shown_rate(perf.images_per_second)} images/s"
        words = [] if left is None else [f"run {clock(left)} left"]
        words += [f"loss {reading.update.loss:.4f}", rate]
        # On a narrow terminal, the first of these are shown.
        while len(words) > 1 and len(", ".join(words)) > terminal_width() - BESIDE_WORDS:
            words.pop()
        self._bar.set_postfix_str(", ".join(words), refresh=False)

    def epoch_ended(self, position: Position, means: Metrics, seconds: float) -> None:
        """Begin the row of an epoch that is trained, with its mean metrics and duration. A validation may follow."""
        if self._table is not None:
            self._table.begin_row(f"{position.epoch}", seconds, means.loss)

    def validating(self, position: Position) -> None:
        """Show that a validation begins."""
        self._bar.set_description_str(f"{self._place(position)}, validating")

    def validated(self, position: Position, metrics: Mapping[WeightSet, Metrics], seconds: float, mark: str) -> None:
        """Show the metrics of a validation. `mark`: word for the best validation so far; '' for another."""
        self._bar.set_description_str(self._place(position), refresh=False)
        if self._table is not None:
            # The number of epochs that are trained. Within an epoch it is a fraction; after one, the step is 0 and the
            # position still has the number of that epoch.
            is_within_epoch = position.step > 0
            finished = position.epoch - 1 if is_within_epoch else position.epoch
            epochs = finished + position.step / self._per_epoch
            self._table.validated(f"{epochs:.2f}" if epochs else "start", metrics, seconds, mark)

    def close(self) -> None:
        """Remove the bar, and print a row that is not printed yet, when the training has ended or failed."""
        self._bar.close()
        if self._table is not None:
            self._table.print_row()


def _columns(config: Config) -> dict[str, tuple[WeightSet, Metric]]:
    """Return the columns for metrics of validations, the most important first: heading -> set of weights, metric.

    The loss is not among them, since it has a column of its own.
    """
    main_metric = config.task.best
    deciding_metric = metric_named(config.SAVE_BEST_BY)
    shown = [(PLAIN, main_metric)]
    if config.TRAIN.MODEL_EMA:
        shown.append((AVERAGE, main_metric if deciding_metric == LOSS else deciding_metric))

    # Metrics that settings ask for, and then those that the task always measures.
    asked_for = [deciding_metric]
    if config.measures_knn:
        asked_for.append(KNN)
    asked_for += map(metric_named, config.VALIDATE_METRICS)
    has_column = (main_metric, LOSS)
    shown += [(PLAIN, metric) for metric in asked_for if metric not in has_column]
    if TOP5 in config.task.metrics and (config.MODEL.NUM_CLASSES or 0) > 10:
        shown.append((PLAIN, TOP5))
    if MACRO_F1 in config.task.metrics:
        shown.append((PLAIN, MACRO_F1))

    columns = dict[str, tuple[WeightSet, Metric]]()
    for weight_set, metric in dict.fromkeys(shown):  # each once, in this order
        unit = " %" if metric.percent else ""
        heading = weight_set.marked(metric.words) + unit  # such as "EMA top-1 %"
        columns[heading] = (weight_set, metric)
    return columns


class EpochTable:
    """Prints a row per epoch, and the header again once other lines have moved it away."""

    def __init__(self, config: Config, brief: Brief) -> None:
        """Print the header. `brief`: the terminal, on which the log's details are left out."""
        self._brief = brief
        self._epochs = config.TRAIN.NUM_EPOCHS
        self._metrics = _columns(config)
        # The first column is as wide as "90/90", or if epochs may be fractions, as "89.25/90".
        validates_within_epochs = config.VALIDATE_EVERY_UPDATES is not None or config.TRAIN.MAX_UPDATES is not None
        epoch_width = len(f"{self._epochs}/{self._epochs}")
        if validates_within_epochs:
            epoch_width += len(".25")
        widths = {"epoch": epoch_width, "train loss": 7, "val loss": 7}
        widths |= dict.fromkeys(self._metrics, 6) | {"time": 7, "images/s": 7, "lr": 8}
        self._widths = {name: max(width, len(name)) for name, width in widths.items()}
        # A terminal that is too narrow for all columns shows the first ones.
        room = terminal_width() - len(GAP + "best")
        while len(self._widths) > 2 and sum(self._widths.values()) + len(GAP) * (len(self._widths) - 1) > room:
            self._widths.popitem()
        self._row: dict[str, str] = {}
        """Cells of an epoch that may still be validated; empty if no row is begun"""
        self._seconds = 0.0
        """Duration of the training of that epoch"""
        self._mark_of_best = ""
        """Word for the best validation so far; '' if that of the row is not the best"""
        self.lr: float | None = None
        self.rate: float | None = None
        """Images per second, of the last report"""
        self.skipped = self.skipped_before = 0
        """Skipped updates up to now, and up to the last row"""
        print_on_terminal("")
        self._print_header()

    def begin_row(self, epoch: str, seconds: float = 0.0, train_loss: float | None = None) -> None:
        """Begin the row of an epoch with the metrics of its training.

        A validation adds its metrics and prints the row; without one, the next update prints it.
        """
        self._seconds = seconds
        self._mark_of_best = ""
        self._row = {
            "epoch": f"{epoch}/{self._epochs}",
            "train loss": _cell(LOSS, train_loss),
            "time": clock(seconds),
            "images/s": NOTHING if self.rate is None else shown_rate(self.rate),
            "lr": NOTHING if self.lr is None else f"{self.lr:.2e}",
        }

    def validated(self, epoch: str, metrics: Mapping[WeightSet, Metrics], seconds: float, mark: str) -> None:
        """Add the metrics of a validation to the row that was begun, or to a new one, and print it."""
        if not self._row:
            self.begin_row(epoch)
        self._row["time"] = clock(self._seconds + seconds)
        self._row["val loss"] = _cell(LOSS, metrics[PLAIN].loss)
        for heading, (weight_set, metric) in self._metrics.items():
            if weight_set in metrics:
                self._row[heading] = _cell(metric, metrics[weight_set].value(metric.name))
        self._mark_of_best = mark
        self.print_row()

    def print_row(self) -> None:
        """Print the row that was begun, if one was. Its end notes the best validation, and skipped updates."""
        if not self._row:
            return
        row = self._row
        self._row = {}
        if self._brief.lines - self._header_line >= LINES_PER_HEADER:
            self._print_header()
        text = GAP.join(row.get(name, NOTHING).rjust(width) for name, width in self._widths.items())

        # "best" is green; "best (as good as guessing)" is not, even if there is no room for the words in brackets.
        mark = self._mark_of_best
        is_green = mark == "best"
        if len(text + GAP + mark) > terminal_width():
            mark, _, _ = mark.partition(" (")
        if is_green:
            mark = self._brief.coloured(mark, GREEN)
        notes = [mark]
        if self.skipped > self.skipped_before:
            notes.append(f"{self.skipped - self.skipped_before:,} skipped")
        self.skipped_before = self.skipped
        print_on_terminal(f"{text}{GAP}{', '.join(filter(None, notes))}".rstrip())

    def _print_header(self) -> None:
        """Print the headings of the columns, and note where, so that `print_row` can repeat them."""
        text = GAP.join(name.rjust(width) for name, width in self._widths.items())
        print_on_terminal(self._brief.coloured(text, BOLD))
        self._header_line = self._brief.lines


def _cell(metric: Metric, value: float | None) -> str:
    """Write the value of a metric for the table; a dash if there is none, or it is NaN."""
    return NOTHING if value is None or math.isnan(value) else metric.number_in_table(value)
