"""Downloads: one process of a machine downloads, and an interrupted download is never used."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from datasets import check_dataset, open_dataset
from datasets.sources.published import fetch_once
from tests.datasets.opened import CPU, settings
from tests.datasets.sources.published import FETCHERS, FOLDERS, MAKERS
from tests.program import Vitamp
from tests.waiting import until
from utils.errors import UserError

FORK = multiprocessing.get_context("fork")
FILES = 5


def target_of(tmp_path: Path) -> Path:
    return tmp_path / "data" / "flowers"


def nothing() -> None:
    """Default action in the middle of a download."""


class Fetcher:
    """Writes files one by one into its folder, and one line per call into another file."""

    def __init__(self, calls: Path, halfway: Callable[[], None] = nothing) -> None:
        self.calls, self.halfway = calls, halfway

    def __call__(self, scratch: Path) -> None:
        with open(self.calls, "a") as file:
            file.write(f"{os.getpid()}\n")
        folder = scratch / "flowers"
        folder.mkdir()
        for number in range(FILES):
            (folder / f"{number}.txt").write_text("whole")
            if number == FILES // 2:
                self.halfway()
        (folder / "archive.tar.gz").write_bytes(b"unpacked already")


def fetch(tmp_path: Path, halfway: Callable[[], None] = nothing) -> None:
    fetch_once(target_of(tmp_path), Fetcher(tmp_path / "calls", halfway), "Fetch it by hand.")


def whole(tmp_path: Path) -> bool:
    return sorted(os.listdir(target_of(tmp_path))) == [f"{number}.txt" for number in range(FILES)]


def calls(tmp_path: Path) -> int:
    return len(lines_of(tmp_path / "calls"))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def racer(tmp_path: Path, name: str, halfway: Callable[[], None]) -> None:
    """Record log messages, and the state of the target right after the call."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with open(tmp_path / name, "a") as heard:
                heard.write(f"{record.getMessage()}\n")

    log = logging.getLogger("vitamp")
    log.handlers, log.propagate = [Keep()], False
    log.setLevel(logging.INFO)
    fetch(tmp_path, halfway)
    log.info("whole: %s", whole(tmp_path))


def started(tmp_path: Path, name: str, halfway: Callable[[], None] = nothing) -> BaseProcess:
    process = FORK.Process(target=racer, args=(tmp_path, name, halfway))
    process.start()
    return process


def test_download_is_made_by_one_process_and_complete_for_all(tmp_path: Path) -> None:
    names = [f"heard{number}" for number in range(4)]
    waiting = f"Waiting for another process, which fetches {target_of(tmp_path)}."

    def until_all_wait() -> None:
        until(lambda: sum(waiting in lines_of(tmp_path / name) for name in names) == 3)

    processes = [started(tmp_path, name, until_all_wait) for name in names]
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    heard = sorted(lines_of(tmp_path / name) for name in names)
    assert calls(tmp_path) == 1
    assert heard == [[f"Fetching {target_of(tmp_path)}.", "whole: True"], *[[waiting, "whole: True"]] * 3]


def test_killed_download_is_restarted_by_a_waiting_process(tmp_path: Path) -> None:
    first = started(tmp_path, "first", lambda: time.sleep(600))
    half = target_of(tmp_path).parent / ".flowers.part" / "flowers" / f"{FILES // 2}.txt"
    until(half.is_file)
    second = started(tmp_path, "second")
    until(lambda: len(lines_of(tmp_path / "second")) == 1)
    assert second.is_alive()
    assert not target_of(tmp_path).exists()
    os.kill(first.pid or 0, signal.SIGKILL)
    second.join(60)
    first.join(60)
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    heard = lines_of(tmp_path / "second")
    assert heard[0].startswith("Waiting for another process")
    assert heard[1].startswith("An earlier download was interrupted: ")
    assert heard[-1] == "whole: True"
    assert not half.parents[1].exists()


def test_failed_download_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("the server is on fire")

    with pytest.raises(UserError, match=r"flowers could not be fetched: the server is on fire. Fetch it by hand."):
        fetch(tmp_path, fails)
    assert os.listdir(target_of(tmp_path).parent) == [".flowers.lock"]
    fetch(tmp_path)
    assert whole(tmp_path)


def test_download_to_a_readonly_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UserError, match="flowers cannot be made: "):
        fetch(tmp_path)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_download_by_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[tuple[str, bool]] = []

    def torchvisions(root: str, download: bool) -> None:
        asked.append((root, download))
        MAKERS[name](Path(root))

    monkeypatch.setattr(f"torchvision.datasets.{FETCHERS[name]}", torchvisions)
    root = tmp_path / "not" / "there yet"
    data = settings(DATASET=name, DATA_PATH=str(root), DOWNLOAD=True)
    check_dataset(data, 257)
    check_dataset(data, 257)
    assert asked == [(str(root / f".{FOLDERS[name]}.part"), True)]
    assert sorted(os.listdir(root)) == sorted([f".{FOLDERS[name]}.lock", FOLDERS[name]])
    assert len(open_dataset(data, True, 257, 0, CPU)) > 0


def test_download_warns_for_data_sets_without_one(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    check_dataset(settings(DATASET="digits", DOWNLOAD=True), 10)
    assert "DATA.DOWNLOAD has no effect on the data set digits" in said.text
    said.clear()
    MAKERS["cifar10"](tmp_path)
    check_dataset(settings(DATASET="cifar10", DATA_PATH=str(tmp_path), DOWNLOAD=True), 10)
    assert "DOWNLOAD" not in said.text


def test_download_without_a_network_ends_the_run_with_a_remedy(tmp_path: Path, tiny: Path, vitamp: Vitamp) -> None:
    nobody = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    changes = ("-dataset", "cifar10", "-data_path", tmp_path / "data", "DATA.DOWNLOAD=true")
    env = {**nobody, "no_proxy": "", "NO_PROXY": ""}
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *changes, env=env, code=2)
    assert "DATA.DOWNLOAD: cifar-10-batches-py could not be fetched: " in done.err
    assert "refused" in done.err
    assert "fetch it yourself from https://www.cs.toronto.edu/~kriz/cifar.html" in done.err
    assert f"{tmp_path}/data/cifar-10-batches-py/data_batch_1, " in done.err
    assert os.listdir(tmp_path / "data") == [".cifar-10-batches-py.lock"]
    assert not (tmp_path / "run").exists()
