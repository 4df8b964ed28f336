"""Reports of a run: metrics.jsonl, log lines, the measured time, and the command that resumes it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.amp.health import report_skip
from engine.amp.overflow import Blame
from engine.measure import throughput
from engine.measure.meters import Position, Reading, seconds_of
from engine.measure.throughput import Perf, Throughput
from engine.report.reporter import Reporter
from engine.task.one import Means
from tests.engine.small import CPU
from utils.config import Config
from utils.distributed.launchers import BY_HAND, SLURM
from utils.distributed.world import World
from utils.program import LAUNCHER_PID, start_again
from utils.text import clock
from vitamp.metrics import PLAIN

PERF = Perf(images_per_second=1234.56789, data_wait_percent=1.5, peak_memory_gb=0.25, seconds=3725.4)
READING = Reading(
    update=Means(0.200444, 12.5, 50.0),
    epoch=Means(0.25, 25.0, 60.0),
    grad_norm=1.5,
    scale=1024.0,
    lr=0.001,
    skipped=2,
    skipped_in_a_row=1,
    first_bad=-1,
)


def reporter(folder: Path | None, start: Position | None = None, **settings: Any) -> Reporter:
    return Reporter(Config(**settings), 100, folder, start or Position())


def lines(folder: Path) -> list[dict[str, Any]]:
    """Parse strictly: JSON has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("start", "settings", "hours"),
    [
        (Position(), {}, 9),
        (Position(1, 50, 50), {}, 18),  # the hour went into half an epoch; a start of ten minutes does not count
        (Position(), {"SIZE_SCHEDULE": [[0, 112], [0.4, 224]]}, 3 + 6 * 4),
        (Position(), {"SIZE_SCHEDULE": [[0, 112], [0.4, 224]], "MAX_UPDATES": 500}, 3 + 4),
        (Position(), {"TOKEN_DROP": 0.5, "TOKEN_DROP_TAIL": 2}, 7 + 2 * 2),
        (Position(), {"TOKEN_DROP": 0.5, "TOKEN_DROP_TAIL": 20}, 9),
    ],
)
def test_time_left_counts_the_pixels_and_tokens_of_later_epochs(
    said: pytest.LogCaptureFixture, start: Position, settings: dict[str, Any], hours: int
) -> None:
    config = {"TRAIN": {"NUM_EPOCHS": 10, "WARMUP_EPOCHS": 0, **settings}, "DATA": {"IMAGE_SIZE": 224}}
    report = reporter(None, start, **config)
    report.train(start, READING, replace(PERF, seconds=600.0))
    assert "Time: 0:10:00" in said.text
    assert "Left" not in said.text, "the first row knows no pace"
    report.train(Position(2, 0, 100), READING, replace(PERF, seconds=4200.0))
    assert f"Time: 1:10:00, Left: {hours}:00:00" in said.text


def test_time_left_of_a_dry_run_that_begins_its_epoch_again(said: pytest.LogCaptureFixture) -> None:
    """A dry run from the end of an epoch makes the first updates of the same epoch."""
    start = Position(1, 100, 100)
    again = Position(1, 20, 120)
    report = reporter(None, start, TRAIN={"NUM_EPOCHS": 2})
    report.train(Position(1, 0, 100), READING, replace(PERF, seconds=1.0))
    report.train(again, READING, replace(PERF, seconds=21.0))
    assert "Time: 0:00:21, Left: 0:01:20" in said.text


def test_train_line_has_exactly_its_fields(tmp_path: Path) -> None:
    reporter(tmp_path).train(Position(2, 5, 105), READING, PERF)
    (line,) = lines(tmp_path)
    perf = line.pop("perf")
    assert line == {
        "event": "train",
        "epoch": 2,
        "step": 5,
        "update": 105,
        "loss": 0.200444,
        "acc1": 12.5,
        "acc5": 50.0,
        "lr": 0.001,
        "grad_norm": 1.5,
        "scale": 1024.0,
        "skipped": 2,
    }
    assert perf["images_per_second"] == 1234.5679
    assert perf["seconds"] == 3725.4


def test_skip_line_has_noticed_at_under_perf(tmp_path: Path) -> None:
    """It may be noticed at the end of its epoch, between epochs, or in the next epoch."""
    found = Blame(update=100, noticed_at=100, module="head", sample_indices=(3, 1, 2), scale=64.0, kernel="aten::mm")
    for number, (noticed, position) in enumerate(
        [(100, Position(1, 100, 100)), (100, Position(2, 0, 100)), (102, Position(2, 2, 102))]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        report_skip(reporter(folder), position, replace(found, noticed_at=noticed))
    told = [lines(tmp_path / name)[0] for name in "012"]
    assert [line.pop("perf") for line in told] == [{"noticed_at": noticed} for noticed in (100, 100, 102)]
    assert told[0] == told[1] == told[2]
    assert told[0]["epoch"] == 1
    assert (told[0]["update"], told[0]["samples"], told[0]["module"]) == (100, [3, 1, 2], "head")
    report_skip(reporter(tmp_path), Position(2, 1, 101), replace(found, update=101, noticed_at=101))
    assert lines(tmp_path)[0]["epoch"] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_null(tmp_path: Path, bad: float) -> None:
    reading = Reading(Means(bad, 0.0, 0.0), Means(bad, 0.0, 0.0), bad, 1.0, 0.1, 0, 0, 3)
    reporter(tmp_path).train(Position(1, 1, 1), reading, PERF)
    reporter(tmp_path, Position(1, 1, 1)).validation(Position(1, 1, 1), {PLAIN: Means(bad, 0.0, 0.0)}, 1.0)
    train, val = lines(tmp_path)
    assert (train["loss"], train["grad_norm"], train["scale"], val["loss"]) == (None, None, 1.0, None)


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        (Position(2, 0, 5, validated=5), ["run", "train", "epoch", "val"]),
        (Position(1, 5, 5, validated=0), ["run", "train"]),
        (Position(), []),
    ],
    ids=["after the epoch", "stopped in its validation", "from the beginning"],
)
def test_resume_keeps_lines_at_the_same_update_that_are_not_repeated(
    tmp_path: Path, start: Position, kept: list[str]
) -> None:
    before, at = reporter(tmp_path), Position(1, 5, 5)
    before.run("start", Position(), 0.0)
    before.train(at, READING, PERF)
    before.epoch(at, Means(1.0, 2.0, 3.0), 1.0)
    before.validation(at, {PLAIN: Means(1.0, 2.0, 3.0)}, 1.0)
    reporter(tmp_path, start)
    assert [line["event"] for line in lines(tmp_path)] == kept


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (0.6, "0:00:01"), (59.6, "0:01:00"), (3599.6, "1:00:00"), (3725.4, "1:02:05"), (1e6, "277:46:40")],
)
def test_clock_formats_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(("text", "seconds"), [("01:30:00", 5400.0), ("00:00:07", 7.0), ("100:00:01", 360001.0)])
def test_seconds_of_parses_clock(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_pace_covers_the_time_between_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    made = Throughput(CPU)
    made.count(64)
    made.count(64)
    now = 104.0
    first = made.read(waited=1.0)
    assert (first.images_per_second, first.data_wait_percent, first.seconds) == (32.0, 25.0, 4.0)
    made.count(64)
    now = 110.0
    made.restart()  # validation is not training
    made.count(64)
    now = 112.0
    second = made.read(waited=9.0)
    assert (second.images_per_second, second.data_wait_percent, second.seconds) == (32.0, 100.0, 12.0)
    assert 0.01 < second.peak_memory_gb < 1000


@pytest.mark.parametrize(("launcher", "how"), [(BY_HAND, "by hand, each with its rank"), (SLURM, "by SLURM")])
def test_command_that_resumes_several_processes_says_how_they_are_started(
    monkeypatch: pytest.MonkeyPatch, launcher: str, how: str
) -> None:
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    command = start_again(World(0, 4, 0, 4, launcher), "-resume runs/a")
    assert f"-resume runs/a  # start its 4 processes {how}, as before" in command
