"""The table of epochs and the bar on a terminal."""

import io
import logging
import math
import re
import signal
import sys

import pytest

from engine.machine.stopping import Signals
from engine.measure.meters import Position, Reading, mark_of_best
from engine.measure.throughput import Perf
from engine.report.live import EpochTable, Live
from engine.task.one import ValidationMeans
from tests.terminal import screen
from utils.config import Config
from utils.log import DETAIL, IN_FULL, brief_terminal, log, print_on_terminal, shorten_on_terminal, start_log
from utils.terminal import Brief
from vitamp.metrics import AVERAGE, PLAIN

CONFIG = Config.model_validate({"MODEL": {"NUM_CLASSES": 100}, "TRAIN": {"NUM_EPOCHS": 90, "MODEL_EMA": True}})
MEANS = ValidationMeans(1.25, 71.5, 90.25, 70.5, 69.75)


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
    shorten_on_terminal(has_table=True)
    return made


def test_log_lines_are_whole_lines_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    live = Live(CONFIG, 44, Position())
    live.stepped(Position(step=1, update=1))
    log.warning("from the log, in words that are longer than one line of this terminal")
    assert screen(terminal.getvalue())[-1].startswith("epoch 1/90 "), "the bar is drawn again below"
    live.close()
    lines = screen(terminal.getvalue())
    assert "warning: from the log, in words that are longer than one line of this terminal" in lines
    assert not [line for line in lines if "epoch 1" in line]


@pytest.mark.parametrize(("width", "last"), [(100, "loss 1.2500, 1,234 images/s]"), (60, "run 0:00:00 left]")])
def test_narrow_bar_drops_whole_words(monkeypatch: pytest.MonkeyPatch, width: int, last: str) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", f"{width}")
    end = Position(step=44, update=44 * 90, epoch=90)
    live = Live(CONFIG, 44, Position(epoch=90, update=44 * 89))
    live.stepped(end)
    for skipped in (7, 9):  # 7 of them before it was resumed
        live.reported(Reading(MEANS, MEANS, 1.0, 1.0, 1e-3, skipped, 0, 0), Perf(1234.5, 0.0, 1.0, 1.0), 0.0)
    live.validating(end)
    assert screen(terminal.getvalue())[-1].endswith(last)
    live.epoch_ended(end, MEANS, 1.0)
    live.close()
    assert screen(terminal.getvalue())[-2].endswith("  2 skipped")


def test_second_ctrl_c_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, codes = open_terminal(monkeypatch), list[int]()
    monkeypatch.setattr("engine.machine.stopping._exit", codes.append)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    signals, live = Signals(), Live(CONFIG, 44, Position())
    signals.deferred = signals.saved = True
    live.stepped(Position(step=1, update=1))
    for _ in range(2):
        signals._handle(signal.SIGINT, None)
    *_, last, prompt = screen(terminal.getvalue())
    live.close()  # which gives the standard error back
    assert last == "warning: interrupted; earlier checkpoints are intact, and -resume continues from the newest"
    assert (prompt, codes) == ("", [130])


def test_lines_before_training_are_short_and_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    log.info("detail", extra=DETAIL)
    log.info("a note of many words " * 5)
    log.warning("a warning of many words " * 5)
    print_on_terminal("only here")
    note, warning, here, rest = screen(terminal.getvalue())
    assert note.endswith("...")
    assert len(note) < 60
    assert warning == "warning: " + "a warning of many words " * 4 + "a warning of many words"
    assert (here, rest) == ("only here", "")


def test_many_notes_on_the_data_are_counted_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    brief = brief_terminal()
    assert brief is not None
    banner = "vitamp\n  tag        text\n\n  output     here\n  data       digits"
    log.info(banner, extra=DETAIL)
    print_on_terminal(brief.banner(banner))
    for number in range(10):
        log.info("note %d", number)
    log.info("to be read", extra=IN_FULL)
    log.warning("shown")
    assert screen(terminal.getvalue()) == [
        "vitamp",
        "  data       digits",
        *(f"note {n}" for n in range(9)),
        "to be read",
        "warning: shown",
        "",
    ]
    assert brief.left_out == 4, "a note, and three lines of the banner"


def rows(monkeypatch: pytest.MonkeyPatch, width: int, mark: str = "best", skipped: int = 0) -> list[str]:
    """Header and row of an epoch on a terminal without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", f"{width}")
    brief = brief_terminal()
    assert brief is not None
    table = EpochTable(CONFIG, brief)
    table.lr, table.rate, table.skipped = 1e-3, 1234.5, skipped
    table.begin_row("12", 74.0, 2.5)
    table.validated("11.5", {PLAIN: MEANS, AVERAGE: MEANS}, 1.0, mark)
    table.begin_row("13", 3.0, 2.25)
    table.print_row()
    return screen(terminal.getvalue())[1:]


@pytest.mark.parametrize("width", range(40, 140, 9))
@pytest.mark.parametrize("mark", ["best", "best (worse than guessing)"])
def test_rows_are_as_wide_as_the_header_and_fit(monkeypatch: pytest.MonkeyPatch, width: int, mark: str) -> None:
    header, row, bare, _ = rows(monkeypatch, width, mark)
    assert max(len(header), len(row)) < width
    assert row.split()[0] == "12/90"
    assert "best" in row
    assert len(bare) <= len(header)


def test_wide_terminals_show_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    header, row, bare, _ = rows(monkeypatch, 140, skipped=3)
    names = "epoch train-loss val-loss top-1-% EMA-top-1-% top-5-% macro-F1-% time images/s lr"
    assert re.sub(r"(?<=\S) (?=\S)", "-", header.strip()).split() == names.split()
    cells = "12/90 2.5000 1.2500 71.50 71.50 90.25 69.75 0:01:15 1,234 1.00e-03 best, 3 skipped"
    assert row.split() == cells.split()
    assert bare.split() == ["13/90", "2.2500", "-", "-", "-", "-", "-", "0:00:03", "1,234", "1.00e-03"]


def test_best_epoch_that_is_no_better_than_guessing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {top1: mark_of_best(25.0, top1) for top1 in (25.0, 24.9, 25.1, math.nan, None)}
    assert marks[25.0] == "best (as good as guessing)"
    assert marks[24.9] == "best (worse than guessing)"
    assert marks[25.1] == marks[math.nan] == marks[None] == mark_of_best(None, 1.0) == "best"
    assert rows(monkeypatch, 140, marks[25.0])[1].endswith("  best (as good as guessing)")


def test_no_color_leaves_out_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Brief(has_table=True).colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert (Brief(has_table=True).can_redraw, Brief(has_table=True).colours) == (True, False)
