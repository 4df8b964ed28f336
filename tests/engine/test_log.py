"""Who says what where: the terminal, log.txt, and a file for each rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from utils.log import log, log_into, start_log


def texts(path: Path) -> list[str]:
    """Lines without their date and time."""
    return [line[20:] for line in path.read_text(encoding="utf-8").splitlines()]


def test_warnings_and_errors_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(to_terminal=True)
    log.info("all is %s", "well")
    log.warning("take care")
    log.error("it broke")
    out, err = capsys.readouterr()
    assert out == "all is well\n"
    assert err == "warning: take care\nerror: it broke\n"


def test_only_rank_0_logs_to_the_console(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start_log(to_terminal=False)
    log.info("all is well")
    log.error("it broke")
    log_into(tmp_path, rank=1)
    assert capsys.readouterr() == ("", "")
    assert texts(tmp_path / "ranks" / "1.log") == ["all is well", "error: it broke"]
    assert not (tmp_path / "log.txt").exists()


def test_early_log_lines_are_written_to_the_runs_log(tmp_path: Path) -> None:
    start_log(to_terminal=True)
    log.info("before")
    log.warning("100 %% of nothing, %d times", 3)
    log_into(tmp_path / "run", rank=0)
    log.info("after")
    for name in ("log.txt", "ranks/0.log"):
        assert texts(tmp_path / "run" / name) == ["before", "warning: 100 % of nothing, 3 times", "after"]


def test_resumed_run_appends_to_the_same_log(tmp_path: Path) -> None:
    for word in ("first", "second"):
        start_log(to_terminal=False)
        log.info(word)
        log_into(tmp_path, rank=0)
    assert texts(tmp_path / "log.txt") == ["first", "second"]


def test_setting_up_the_log_again_duplicates_no_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start_log(to_terminal=True)
    log_into(tmp_path, rank=0)
    start_log(to_terminal=True)
    log.info("once")
    assert capsys.readouterr().out == "once\n"
    assert texts(tmp_path / "log.txt") == [], "the files of the run before are closed"


def test_traceback_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(to_terminal=True)
    try:
        raise ValueError("it broke")
    except ValueError:
        log.exception("it broke")
    err = capsys.readouterr().err
    assert err.startswith("error: it broke\nTraceback")
    assert err.count("error: it broke") == 1


def test_other_loggers_are_not_affected() -> None:
    start_log(to_terminal=True)
    assert not any(type(handler).__name__ == "_Terminal" for handler in logging.getLogger().handlers)
    assert log.propagate is False
    assert sys.stdout is not None
