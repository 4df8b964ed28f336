"""A training on a terminal: few lines first, one row per epoch, a bar, a short table at the end."""

import os
import re
from collections import Counter
from pathlib import Path

from tests.program import Vitamp, metrics
from tests.terminal import on_terminal

BAR = r"epoch \d/8 \S* +\d+/44 \[\d\d:\d\d left, run \d:\d\d:\d\d left, loss \d+\.\d{4}, [\d,.]+ images/s\]"
ROW = r" +{}/{}  +\d+\.\d{{4}}  +\d+\.\d{{4}}  +\d+\.\d\d  +\d+\.\d\d  0:00:\d\d  +[\d,]+  +\d\.\d\de-\d\d(  best)?"


def forms(log: str) -> Counter[str]:
    """Lines without their numbers, paths and arguments, and without the line that a busy CPU changes."""
    lines = [line for line in log.splitlines() if "arguments" not in line and "Where the time went" not in line]
    return Counter(re.sub(r"/\S+", "PATH", re.sub(r"[\d.,]+", "N", line)) for line in lines)


def test_terminal_shows_a_table_of_epochs(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "TRAIN.NUM_EPOCHS=8", "REPORT_FREQ=4")
    shown = on_terminal(*words, "-output", tmp_path / "a", columns=120)
    lines = shown.lines
    header = next(number for number, line in enumerate(lines) if line.startswith("epoch "))
    assert lines[header].split("  ")[0] == "epoch"
    assert header <= 9, "at most ten lines come before the first update"
    assert any(re.match(r"  data +digits: 1,437 training and 360 validation images", line) for line in lines[:header])
    for epoch in range(1, 9):
        row = lines[header + epoch]
        assert re.fullmatch(ROW.format(epoch, 8), row), row
    assert lines[header + 1].endswith("best")
    bars = re.findall(BAR, re.sub(r"\x1b\[[\d;]*m", "", shown.raw))
    assert bars, shown.raw
    assert not [line for line in lines if "left" in line], "the bar is gone at the end"
    end = "\n".join(lines[header + 9 :])
    done = r"Done: best top-1 [\d.]+ % \(epoch \d\); total time 0:00:\d\d; everything is in /\S+/a\n"
    assert re.search(done, end), end
    assert re.search(r"\n  evaluate +python \S+/evaluate.py \S+/a\n", end), end
    assert "Step[" not in shown.raw

    piped = vitamp(*words, "-output", tmp_path / "b")
    of_terminal, of_pipe = ((tmp_path / run / "log.txt").read_text() for run in "ab")
    assert forms(of_terminal) == forms(of_pipe), "log.txt has the same lines"
    assert piped.out.count("Step[") == of_terminal.count("Step[") == 89


def test_narrow_terminal_and_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    words = ("TRAIN.NUM_EPOCHS=800", "TRAIN.MODEL_EMA=true", "TRAIN.BASE_LR=0.01")
    shown = on_terminal(
        "-cfg", tiny, "-output", tmp_path / "run", *words, columns=60, interrupt_at="  2/800  ", code=130
    )
    lines = shown.lines
    rows = [line for line in lines if re.match(r" +\d+/800 ", line)]
    assert len(rows) >= 2
    assert all(len(line) < 60 for line in rows)
    header = next(line for line in lines if line.startswith("  epoch"))
    assert header.split("  ")[1:] == ["epoch", "train loss", "val loss", "top-1 %", "EMA top-1 %"]
    assert any(re.match(r"Interrupted .*: saving after update \d+; resume with -resume\.", line) for line in lines)
    assert any(line.startswith("Paused, to be resumed with -resume") for line in lines)
    assert re.search(r"\n  resume +python .*main_single_gpu.py -resume \S+/run", "\n".join(lines))
    assert lines[-1] == "", "the shell's prompt begins a line"


def test_closed_terminal(tiny: Path, tmp_path: Path) -> None:
    on_terminal("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.NUM_EPOCHS=800", interrupt_at="  2/800  ", code=143)
    assert metrics(tmp_path / "run", "run")[-1]["what"] == "paused"


def test_plain_terminals(tiny: Path, tmp_path: Path) -> None:
    """Without cursor movement, colours and Unicode, in the output folder's name either."""
    plain = {"TERM": "dumb", "PYTHONIOENCODING": "ascii", "VITAMP_FOLDER_FILE": str(tmp_path / "place")}
    shown = on_terminal("-cfg", tiny, "-output", tmp_path / "du\x1bm\udcffb", env=plain)
    assert (tmp_path / "place").read_bytes() == os.fsencode(tmp_path / "du\x1bm\udcffb\n"), "for vitamp.train"
    assert r"/du\x1bm\udcffb" in shown.raw
    assert "\x1b" not in shown.raw
    assert "\r" not in shown.raw.replace("\r\n", "")
    assert shown.raw.isascii()
    assert sum(bool(re.match(r" +\d/2  ", line)) for line in shown.lines) == 2
