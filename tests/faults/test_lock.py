"""Two runs started into one folder: the second is told who the first is, and a dead one locks nothing."""

import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.killing import ENDLESS, reported
from tests.program import Started, Vitamp
from tests.waiting import until
from utils.errors import UserError
from utils.record import folder_lock as run_lock
from utils.record.folder_lock import FolderLock


def test_a_second_run_is_told_who_is_there(
    begin: Callable[..., Started], vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = begin("-output", run, *ENDLESS, "REPORT_FREQ=1", "SAVE_EVERY_UPDATES=20")
    until(lambda: reported(run) > 20 or not first.running(), 60)
    before = (run / "log.txt").read_text()
    second = vitamp("-cfg", tiny, "-output", run, "-resume", "auto", *ENDLESS, code=2)
    assert f"pid {first.pid} on host {platform.node()}" in second.err
    assert str(run) in second.err
    assert first.running()
    assert (run / "log.txt").read_text().startswith(before), "and has touched nothing"
    os.kill(first.pid, signal.SIGKILL)
    first.end(30)
    more = f"TRAIN.MAX_UPDATES={reported(run) + 1}"
    vitamp("-resume", run, more, code=0)


def test_of_many_runs_at_once_into_a_new_folder_one_trains(begin: Callable[..., Started], tmp_path: Path) -> None:
    runs = [begin("-output", tmp_path / "run", "TRAIN.MAX_UPDATES=5", "REPORT_FREQ=1") for _ in range(3)]
    ends = [run.end(120) for run in runs]
    assert sorted(done.code for done in ends) == [0, 2, 2], "\n".join(done.text for done in ends)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines if '"train"' in line] == [1, 2, 3, 4, 5]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SECONDS_BETWEEN_HEARTBEATS", 0.1)
    monkeypatch.setattr(run_lock, "SECONDS_TO_WATCH", 2.0)
    monkeypatch.setattr(run_lock, "SECONDS_TO_EXIT", 0.2)


def write_as(folder: Path, sign: int, host: str = "elsewhere") -> None:
    about = {"host": host, "pid": 4711, "since": "2026-01-01 00:00:00", "sign": sign}
    (folder / run_lock.LOCK).touch()
    with (folder / run_lock.LOCK).open("r+") as file:  # as a run does: never empty while it lives
        file.write(json.dumps(about) + "\n")


def test_a_run_on_another_machine_that_lives(tmp_path: Path) -> None:
    """Where the file system keeps no locks between machines, its sign of life tells."""
    over = threading.Event()

    def live() -> None:
        sign = 1
        while not over.wait(0.1):
            sign += 1
            write_as(tmp_path, sign)

    write_as(tmp_path, 1)
    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(UserError, match="pid 4711 on host elsewhere"), FolderLock() as mine:
            mine.take(tmp_path)
    finally:
        over.set()
        thread.join()


def test_a_run_on_another_machine_that_is_dead(tmp_path: Path) -> None:
    write_as(tmp_path, 1)
    with FolderLock() as mine:
        assert mine.take(tmp_path)
        assert json.loads((tmp_path / run_lock.LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / run_lock.LOCK).read_text() == ""


def test_a_run_that_died_on_this_machine_keeps_nobody_waiting(tmp_path: Path) -> None:
    write_as(tmp_path, 1, platform.node())
    began = time.monotonic()
    with FolderLock() as mine:
        mine.take(tmp_path)
    assert time.monotonic() - began < 1


def test_a_loading_process_that_outlives_the_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    with FolderLock() as mine:
        mine.take(tmp_path)
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with FolderLock() as next_one:
            assert next_one.take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_resuming_a_run_that_trains_and_has_not_saved_says_so(vitamp: Vitamp, tmp_path: Path) -> None:
    with FolderLock() as mine:
        mine.take(tmp_path)
        (tmp_path / "config.yaml").write_text("THREADS: 1\n")
        assert f"{tmp_path}: a run is training in this folder (pid" in vitamp("-resume", tmp_path, code=2).err
    assert "no usable checkpoint found" in vitamp("-resume", tmp_path, code=2).err


def test_it_shows_that_it_lives(tmp_path: Path) -> None:
    with FolderLock() as mine:
        mine.take(tmp_path)
        path = tmp_path / run_lock.LOCK
        first = json.loads(path.read_text())["sign"]
        until(lambda: json.loads(path.read_text() or "{}").get("sign", 0) > first, 5)


def test_lock_that_is_removed_is_taken_again(tmp_path: Path) -> None:
    with FolderLock() as first:
        first.take(tmp_path)
        path = tmp_path / run_lock.LOCK
        path.unlink()
        until(lambda: path.exists() and path.read_text(), 10)  # written to once it is locked
        with pytest.raises(UserError, match="a run is training in this folder"), FolderLock() as second:
            second.take(tmp_path)
    with FolderLock() as third:
        third.take(tmp_path)
