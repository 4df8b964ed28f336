"""Who says what where: the terminal, log.txt, and a file for each rank."""

from __future__ import annotations

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
