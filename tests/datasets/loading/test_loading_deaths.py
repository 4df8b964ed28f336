"""Loading processes that end, are killed, or cannot be started."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datasets import Batch, EpochOrder, ImageDataset, TrainLoader, ValLoader, open_dataset
from datasets.loading.loader import start_worker
from tests.datasets.processes import children, gone, in_order
from utils.config.data import DataConfig
from utils.errors import TrainingError

ROOT = Path(__file__).parents[3]
Settings = Callable[..., DataConfig]


def test_close_ends_the_workers(training) -> None:
    before = set(children(os.getpid()))
    loader = training(workers=2)
    in_order(loader, 0)
    started = set(children(os.getpid())) - before
    assert len(started) == 2
    loader.close()
    assert gone(started)


@pytest.mark.slow  # tests/faults interrupts a run that is loading
@pytest.mark.skipif(sys.platform != "linux", reason="the death of the parent is a signal on Linux only")
def test_workers_ignore_a_groups_signals_and_die_with_their_parent(listed: Path) -> None:
    script = f"""
import sys, time, torch
from datasets import *
from utils.config.data import DataConfig
cpu = torch.device("cpu")
dataset = open_dataset(DataConfig(DATA_PATH={str(listed)!r}, IMAGE_SIZE=8), True, 3, 0, cpu)
loader = TrainLoader(dataset, EpochOrder(12, 4, 1, 0, 1, 0, True), 0, 2, cpu)
print(sum(1 for _ in loader.epoch(0)), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "3\n"
            workers = children(parent.pid)
            assert len(workers) == 2
            for worker in workers:
                for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                    os.kill(worker, name)
            time.sleep(0.3)
            assert children(parent.pid) == workers
        finally:
            parent.kill()
    assert gone(set(workers), seconds=1.5), "torch alone notices within five seconds; a signal at once"


@pytest.mark.slow
def test_process_ends_without_closing_its_loader(listed: Path) -> None:
    script = f"""
import torch
from datasets import *
from utils.config.data import DataConfig
cpu = torch.device("cpu")
dataset = open_dataset(DataConfig(DATA_PATH={str(listed)!r}, IMAGE_SIZE=8), True, 3, 0, cpu)
loader = TrainLoader(dataset, EpochOrder(12, 4, 1, 0, 1, 0, True), 0, 2, cpu)
windows = loader.epoch(0)
next(iter(next(windows)))
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=40, check=False).returncode == 7


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_multiprocessing_child_ends_without_closing_its_loader(listed: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_load_without_closing, args=(listed,))
    process.start()
    process.join(60)
    code = process.exitcode
    if code is None:
        for pid in (*children(process.pid or 0), process.pid or 0):
            os.kill(pid, signal.SIGKILL)
    assert code == 7


def _load_without_closing(listed: Path) -> None:
    cpu = torch.device("cpu")
    dataset = open_dataset(DataConfig(DATA_PATH=str(listed), IMAGE_SIZE=8), True, 3, 0, cpu)
    loader = TrainLoader(dataset, EpochOrder(12, 4, 1, 0, 1, 0, True), 0, 2, cpu)
    _unclosed.append(loader)
    windows = loader.epoch(0)
    next(iter(next(windows)))
    assert len(multiprocessing.active_children()) == 2
    raise SystemExit(7)


_unclosed: list[TrainLoader] = []


class Deadly(ImageDataset):
    """Images that kill the loading process that reads them (0: end it with code 3), until their lives are used up."""

    def __init__(self, images: ImageDataset, lives: Path, signal_number: int) -> None:
        self.images, self.lives, self.signal_number = images, lives, signal_number

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        for _, index in keys:
            for life in self.lives.glob(f"{index}-*"):
                life.unlink()
                if not self.signal_number:
                    os._exit(3)
                os.kill(os.getpid(), self.signal_number)
        return self.images.__getitems__(keys)


@pytest.fixture
def deadly(training, tmp_path: Path) -> Iterator[Callable[..., TrainLoader]]:
    """`deadly({3: 2})` makes a loader whose processes die twice, when they read image 3."""
    opened: list[TrainLoader] = []

    def make(times: dict[int, int], workers: int = 2, signal_number: int = signal.SIGKILL) -> TrainLoader:
        lives = tmp_path / "lives"
        lives.mkdir()
        for index, count in times.items():
            for life in range(count):
                (lives / f"{index}-{life}").touch()
        plain = training(batch=2)
        dataset = Deadly(plain._feed._fetch.dataset, lives, signal_number)
        opened.append(TrainLoader(dataset, plain.order, 5, workers, torch.device("cpu")))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


# At most two deaths in all: a process may die of its next batch before it has sent the last one, and three deaths
# in a row end the run.
@pytest.mark.parametrize("times", [{3: 2}, {3: 1, 8: 1}])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_killed_loading_process_changes_no_batch(
    training, deadly, caplog, monkeypatch, workers: int, start: int, times: dict[int, int]
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    expected = [in_order(training(batch=2), epoch, start) for epoch in (1, 2)]
    loader = deadly(times, workers)
    before = signal.getsignal(signal.SIGCHLD)
    began = time.monotonic()
    assert [in_order(loader, epoch, start) for epoch in (1, 2)] == expected
    assert time.monotonic() - began < 5, "torch alone looks every five seconds"
    assert signal.getsignal(signal.SIGCHLD) is before, "no handler may raise wherever the program happens to be"
    assert "was killed by SIGKILL (probably out of memory)" in caplog.text
    assert "No sample is lost" in caplog.text


def test_loading_process_that_never_begins_is_restarted(training, caplog, monkeypatch, tmp_path: Path) -> None:
    """A process that is forked while a thread holds a lock that it needs waits for it for ever."""
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    (tmp_path / "held").touch()

    def stuck_once(number: int) -> None:
        if number == 1 and (tmp_path / "held").exists():
            (tmp_path / "held").unlink()
            time.sleep(600)
        start_worker(number)

    monkeypatch.setattr("datasets.loading.loader.start_worker", stuck_once)
    monkeypatch.setattr("datasets.loading.workers.SECONDS_TO_BEGIN", 1.0)
    expected = in_order(training(batch=2), 1)
    before = set(children(os.getpid()))
    loader = training(batch=2, workers=2)
    assert in_order(loader, 1) == expected
    assert "did not begin in 1 s. No sample is lost" in caplog.text
    assert len(set(children(os.getpid())) - before) == 2, "the stuck one is gone"
    loader.close()


def test_loading_processes_killed_between_batches_and_epochs_are_restarted(training) -> None:
    reference, loader = training(batch=2), training(batch=2, workers=2)
    before = set(children(os.getpid()))
    found = []
    for epoch in (1, 2):
        windows = loader.epoch(epoch)
        for number, window in enumerate(windows):
            found += [(batch.indices.tolist(), batch.images.numpy().tobytes()) for _, batch in window]
            if number in (1, 5):  # 5 is the last one of the epoch
                for worker in set(children(os.getpid())) - before:
                    os.kill(worker, signal.SIGKILL)
                time.sleep(0.1)  # a signal handler that raises would do so here
    assert found == in_order(reference, 1) + in_order(reference, 2)


def test_validation_survives_killed_loading_processes(listed: Path, settings: Settings, cpu: torch.device) -> None:
    dataset = open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, cpu)
    loader = ValLoader(dataset, 2, 0, 1, 2, cpu)
    before = set(children(os.getpid()))
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 1:
            for worker in set(children(os.getpid())) - before:
                os.kill(worker, signal.SIGKILL)
    loader.close()
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert [index for index in indices if index >= 0] == list(range(7))


@pytest.mark.parametrize(
    ("signal_number", "hint"),
    [(signal.SIGKILL, "probably out of memory"), (signal.SIGBUS, "/dev/shm"), (0, "ended with code 3")],
)
def test_repeated_deaths_of_loading_processes_end_the_run(deadly, signal_number: int, hint: str) -> None:
    loader = deadly({7: 99}, 1, signal_number)
    with pytest.raises(TrainingError) as caught:
        in_order(loader, 1)
    assert "died 3 times without one batch in between" in str(caught.value)
    assert hint in str(caught.value)
    assert "use fewer processes (DATA.NUM_WORKERS, -num_workers;" in str(caught.value)


def test_failed_fork_is_retried_and_then_reported(training, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = os.fork, [OSError(12, "Cannot allocate memory")] * 2

    def fork() -> int:
        if refusals:
            raise refusals.pop()
        return real()

    monkeypatch.setattr(os, "fork", fork)
    assert in_order(training(batch=2, workers=2), 1) == in_order(training(batch=2), 1)
    refusals += [OSError(12, "Cannot allocate memory")] * 3
    with pytest.raises(TrainingError, match="could not be started: Cannot allocate memory"):
        in_order(training(workers=1), 1)


def test_started_processes_end_if_another_cannot_start(training, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, forks = set(children(os.getpid())), os.fork, []

    def fork() -> int:
        forks.append(1)
        if len(forks) % 2 == 0:
            raise OSError(12, "Cannot allocate memory")
        return real()

    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(os, "fork", fork)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="could not be started: Cannot allocate memory"):
        in_order(training(workers=2), 1)
    assert len(forks) == 6
    assert gone(set(children(os.getpid())) - before, seconds=2)
    gc.collect()
    assert not unraised
    assert time.monotonic() - began < 5
