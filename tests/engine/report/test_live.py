"""The table of epochs and the bar on a terminal."""

from __future__ import annotations

import io
import logging
import math
import signal
import sys
import warnings

import pytest

from engine.machine.stopping import Signals
from engine.measure.progress import Best
from engine.report.bar import Bar, Piece, line_of
from engine.report.epoch_table import EpochTable, Row
from engine.report.in_context import Guess, marks_of_best, tied
from engine.task.one import ValidationMeans
from tests.terminal import screen
from utils.config import Config
from utils.log import brief_terminal, log, print_on_terminal, shorten_on_terminal, start_log
from utils.record.history import History
from utils.record.weight_sets import AVERAGE, PLAIN
from utils.terminal import DETAIL, Looks, looks_of

PIECES = [Piece("epoch 1/9", 0), Piece("3/44", 2), Piece("loss 2.3", 3), Piece("run 0:00:09 left", 1)]
PLAIN_LOOKS = Looks(moves=False, colours=False, unicode=False)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both standard streams, and a log that leaves out details. No fixture: pytest would take the streams back."""
    made = Terminal()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, made)
    start_log(to_terminal=True)
    shorten_on_terminal()
    return made


def test_messages_of_all_kinds_are_whole_lines_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    bar = Bar(Looks())
    bar.draw(PIECES, 0.5, 1.0)
    sys.stderr.write(warnings.formatwarning("from a library", UserWarning, "library.py", 1, "code"))
    log.warning("from the log, in words that are longer than one line of this terminal")
    print("printed", file=sys.stderr)
    assert screen(terminal.getvalue())[-1].startswith("epoch 1/9  ━"), "the bar is drawn again below"
    bar.close()
    print("begun", file=sys.stderr, end="")
    lines = screen(terminal.getvalue())
    assert lines[:2] == ["library.py:1: UserWarning: from a library", "  code"]
    assert "warning: from the log, in words that are longer than one line of this terminal" in lines
    assert lines[-2:] == ["printed", "begun"]
    assert not [line for line in lines if "epoch" in line]


def test_second_ctrl_c_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, codes = open_terminal(monkeypatch), list[int]()
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    signals, bar = Signals(), Bar(Looks())
    signals.deferred = signals.saved = True
    bar.draw(PIECES, 0.5, 1.0)
    for _ in range(2):
        signals._handle(signal.SIGINT, None)
    *_, last, prompt = screen(terminal.getvalue())
    bar.close()  # which gives the standard error back
    assert last == "warning: interrupted; earlier checkpoints are intact, and -resume continues from the newest"
    assert (prompt, codes) == ("", [130])


def test_lines_before_training_are_short_and_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    log.info("detail", extra=DETAIL)
    log.info("a note of many words " * 5)
    log.warning("a warning of many words " * 5)
    print_on_terminal("only here")
    note, warning, here, rest = screen(terminal.getvalue())
    assert note.endswith("…")
    assert len(note) < 60
    assert warning == "warning: " + "a warning of many words " * 4 + "a warning of many words"
    assert (here, rest) == ("only here", "")


def test_many_notes_on_the_data_are_counted_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    brief = brief_terminal()
    assert brief is not None
    print_on_terminal(brief.banner("vitamp", {"data": "digits"}))
    for number in range(9):
        log.info("note %d", number)
    log.warning("shown")
    assert screen(terminal.getvalue()) == [
        "vitamp",
        "  data      digits",
        *(f"note {n}" for n in range(6)),
        "warning: shown",
        "",
    ]
    assert brief.left_out == 3


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (79, f"epoch 1/9  {'#' * 15}{'.' * 15}  3/44  loss 2.3  run 0:00:09 left"),
        (50, "epoch 1/9  ########.......  3/44  run 0:00:09 left"),
        (34, "epoch 1/9  3/44  run 0:00:09 left"),
        (28, "epoch 1/9  run 0:00:09 left"),
        (10, "epoch 1/9"),
    ],
)
def test_bar_leaves_out_what_does_not_fit(width: int, line: str) -> None:
    assert line_of(PIECES, 0.5, width, PLAIN_LOOKS) == line


def table(**train: object) -> EpochTable:
    given = {"MODEL": {"NUM_CLASSES": 100}, "TRAIN": {"NUM_EPOCHS": 90, **train}}
    return EpochTable(Config.model_validate(given), PLAIN_LOOKS)


def test_rows_are_as_wide_as_the_header_and_fit() -> None:
    ours = table(MODEL_EMA=True)
    means = ValidationMeans(1.25, 71.5, 90.25, 70.5, 69.75)
    row = Row("12/90", 75.0, 2.5, 1e-3, 1234.5, 3, {PLAIN: means, AVERAGE: means}, marks=("best",))
    for width in range(40, 140):
        columns = ours.columns(width)
        text = ours.row(row, columns, width)
        assert len(text) <= width
        assert len(ours.header(columns)) <= width
        assert text.split()[0] == "12/90"
        assert "best" in text
    assert ours.row(row, ours.columns(139), 139).split()[1:] == [
        *(
            "0:01:15",
            "2.5000",
            "1.2500",
            "71.50",
            "71.50",
            "90.25",
            "69.75",
            "1.00e-03",
            "1,234",
            "best,",
            "3",
            "skipped",
        )
    ]


def test_best_epoch_that_is_no_better_than_guessing_says_so() -> None:
    ours, guess = table(), Guess("arrow", 25.0)
    means = ValidationMeans(1.25, 25.0, 90.25, 70.5, 69.75)
    marks = {top1: marks_of_best(guess, top1) for top1 in (25.0, 24.9, 25.1, math.nan, None)}
    assert marks[25.0] == ("best (as good as always guessing arrow)", "best (= guessing)")
    assert marks[24.9] == ("best (worse than always guessing arrow)", "best (< guessing)")
    assert marks[25.1] == marks[math.nan] == marks[None] == marks_of_best(None, 1.0) == ("best",)
    row = Row("12/90", 75.0, 2.5, 1e-3, 1234.5, 0, {PLAIN: means}, marks=marks[25.0])
    for width in range(40, 160):
        text = ours.row(row, ours.columns(width), width)
        assert len(text) <= width
        assert "best" not in text or "guessing" in text, "no mark rather than one without the doubt"
    assert ours.row(row, ours.columns(159), 159).endswith("  best (as good as always guessing arrow)")
    assert ours.row(row, ours.columns(110), 110).endswith("  best (= guessing)")


def test_row_without_validation_has_no_metrics() -> None:
    ours = table()
    assert ours.row(Row("1/90", 3.0, 2.5), ours.columns(100), 100).split() == [
        *("1/90", "0:00:03", "2.5000", "-", "-", "-", "-", "-", "-")
    ]


def test_looks_follow_the_environment() -> None:
    stream = Terminal()
    assert looks_of(stream, {"TERM": "xterm"}) == Looks()
    assert looks_of(stream, {"TERM": "xterm", "NO_COLOR": "1"}) == Looks(colours=False)
    assert looks_of(stream, {"TERM": "dumb"}) == Looks(moves=False, colours=False)
    stream.encoding = "latin-1"  # pyright: ignore
    assert not looks_of(stream, {"TERM": "xterm"}).unicode


def test_detail_is_logged_where_nothing_is_shortened(said: pytest.LogCaptureFixture) -> None:
    log.info("detail", extra=DETAIL)
    assert said.messages == ["detail"]
    assert said.records[0].levelno == logging.INFO


def test_a_line_says_that_all_validations_tied() -> None:
    def said(values: list[float], by: str = "acc1") -> str:
        lines = [{"event": "val", by: value - 1, f"ema_{by}": value} for value in values]
        return tied(Best(values[0], f"ema_{by}", stale=len(values) - 1), History(lines))

    assert said([3, 3]) == (
        "top-1 was the same in all 2 validations, so the first is kept as best; SAVE_BEST_BY=loss judges by "
        "another metric"
    )
    assert "SAVE_BEST_BY=acc1" in tied(
        Best(1.0, "loss", stale=1), History([{"event": "val", "loss": 1.0, "acc1": acc1} for acc1 in (5.0, 6.0)])
    )
    assert not said([3])
    assert not said([3, 2, 3])
    assert not tied(Best(3, stale=0), History([{"event": "val", "acc1": 3}] * 2))  # SAVE_BEST_BY has changed since
