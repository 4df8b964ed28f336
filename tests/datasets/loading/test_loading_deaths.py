"""Loading processes that end, are killed, or cannot be started."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from datasets import Batch, EpochOrder, ImageDataset, TrainLoader, open_dataset
from datasets.loading import workers
from datasets.variants import Variant
from tests.datasets.opened import CPU
from tests.datasets.processes import children, gone, in_order
from tests.refused import refusal
from utils.config.data import DataConfig
from utils.errors import TrainingError

ROOT = Path(__file__).parents[3]


def test_multiprocessing_child_ends_without_closing_its_loader(listed: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_load_without_closing, args=(listed,))
    process.start()
    process.join(60)
    code = process.exitcode
    if code is None:
        for pid in (*children(process.pid or 0), process.pid or 0):
            os.kill(pid, signal.SIGKILL)
    assert code == 7


def _load_without_closing(listed: Path) -> None:
    dataset = open_dataset(DataConfig(DATA_PATH=str(listed), IMAGE_SIZE=8), True, 3, 0, CPU)
    loader = TrainLoader(dataset, EpochOrder(12, 4, 1, 0, 1, 0, True), 0, 2, CPU)
    _unclosed.append(loader)
    windows = loader.epoch(0)
    next(iter(next(windows)))
    assert len(multiprocessing.active_children()) == 2
    raise SystemExit(7)


_unclosed: list[TrainLoader] = []


class Deadly(Variant):
    """Its loading process ends when it reads image 7: by a signal, or (0) with code 3."""

    def __init__(self, inner: ImageDataset, number: int) -> None:
        super().__init__(inner)
        self.number = number

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        if any(index == 7 for _, index in keys):
            if not self.number:
                os._exit(3)
            os.kill(os.getpid(), self.number)
        return self.inner.__getitems__(keys)


@pytest.mark.parametrize(
    ("signal_number", "hint"),
    [(signal.SIGKILL, "probably out of memory"), (signal.SIGBUS, "/dev/shm"), (0, "ended with code 3")],
)
def test_dead_loading_process_ends_the_run_with_its_reason(training, signal_number: int, hint: str) -> None:
    before, handler = set(children(os.getpid())), signal.getsignal(signal.SIGCHLD)
    loader = training(batch=2, workers=2, around=lambda images: Deadly(images, signal_number))
    said = refusal(in_order, loader, 1, by=TrainingError)
    assert "A batch could not be loaded: the loading process" in said
    assert hint in said
    assert "use fewer processes (DATA.NUM_WORKERS, -num_workers;" in said
    assert signal.getsignal(signal.SIGCHLD) is handler, "no handler may raise wherever the program happens to be"
    loader.close()
    assert gone(set(children(os.getpid())) - before)


def test_processes_killed_between_epochs_end_the_run(training) -> None:
    before, loader = set(children(os.getpid())), training(batch=2, workers=2)
    in_order(loader, 1)
    for worker in set(children(os.getpid())) - before:
        os.kill(worker, signal.SIGKILL)
    time.sleep(0.1)  # a signal handler that raises would do so here
    with pytest.raises(TrainingError, match="was killed by SIGKILL"):
        in_order(loader, 2)


def test_started_processes_end_if_another_cannot_start(training, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, forks = set(children(os.getpid())), os.fork, []

    def fork() -> int:
        forks.append(1)
        if len(forks) == 2:
            raise OSError(12, "Cannot allocate memory")
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(TrainingError, match="could not be started: Cannot allocate memory"):
        in_order(training(workers=2), 1)
    assert gone(set(children(os.getpid())) - before, seconds=2)


@pytest.mark.parametrize("stalls", [1, 2, 3])
def test_processes_that_stall_as_they_begin_are_started_again(
    training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stalls: int
) -> None:
    """A lock that a thread held at the moment of the fork stays locked in the new process."""
    expected, real, started = in_order(training(batch=2), 1), workers.start_worker, []

    def start_or_stall(number: int) -> None:
        if number == 1 and len(started) <= stalls:
            time.sleep(1000)
        real(number)

    def count(loader: Any) -> Any:
        started.append(1)
        return begin(loader)

    begin = DataLoader._get_iterator  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(DataLoader, "_get_iterator", count)
    monkeypatch.setattr(workers, "start_worker", start_or_stall)
    monkeypatch.setattr(workers, "SECONDS_TO_BEGIN", (2.0, 2.0, 2.0))
    before, loader = set(children(os.getpid())), training(batch=2, workers=2)
    with caplog.at_level("WARNING", "vitamp"):
        if stalls == 3:
            with pytest.raises(TrainingError, match="Loading processes stall as they begin"):
                in_order(loader, 1)
        else:
            assert in_order(loader, 1) == expected
    assert caplog.messages == ["A loading process stalled as it began: all of them are started again."] * min(stalls, 2)
    loader.close()
    assert gone(set(children(os.getpid())) - before)


class Interrupting(Deadly):
    """Its loading process is killed or stopped in the middle of a message that is larger than a pipe's buffer."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        pid = os.getpid()
        if multiprocessing.parent_process() is not None:
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -{int(self.number)} {pid}"])
        return self.inner.__getitems__(keys)

    def take_broken(self) -> list[Any]:
        return [_Large()]


class _Large:
    """Half of its pickled bytes fill the pipe; the rest comes when the sender has slept."""

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return bytes, (b"x" * 10_000_000,)


class Unsendable(Variant):
    """No descriptor is left for the memory that its loading process shares."""

    def take_broken(self) -> list[Any]:
        return [_Refusing()]


class _Refusing:
    def __reduce__(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_batch_that_cannot_be_sent_ends_the_run(training, capfd: pytest.CaptureFixture[str]) -> None:
    loader = training(batch=2, workers=1, around=Unsendable)
    with pytest.raises(TrainingError, match=r"the loading process \d+ ended with code 1"):
        in_order(loader, 1)
    assert "a batch could not be sent: [Errno 24] Too many open files" in capfd.readouterr().err


@pytest.fixture
def half_sent(training, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], TrainLoader]:
    """A loader whose process gets a signal after half of its first message."""
    real = Connection._send  # pyright: ignore[reportAttributeAccessIssue]

    def in_two(self: Any, data: Any, *more: Any) -> None:
        if multiprocessing.parent_process() is not None and len(data) > 1_000_000:
            real(self, data[:1000], *more)
            time.sleep(5)
            data = data[1000:]
        real(self, data, *more)

    monkeypatch.setattr(Connection, "_send", in_two)
    return lambda number: training(batch=2, workers=1, around=lambda images: Interrupting(images, number))


def test_process_killed_in_the_middle_of_a_message_ends_the_run(half_sent) -> None:
    loader, before = half_sent(signal.SIGKILL), signal.getsignal(signal.SIGCHLD)
    with pytest.raises(TrainingError, match="was killed by SIGKILL"):
        in_order(loader, 1)
    assert signal.getsignal(signal.SIGCHLD) is before


def test_wait_for_a_stopped_process_is_reported_and_can_be_ended(
    half_sent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Asked(Exception):
        pass

    def ask() -> None:
        if caplog.messages:
            raise Asked

    monkeypatch.setattr("datasets.loading.workers.SECONDS_TO_WARN", 2.0)
    monkeypatch.setattr("datasets.loading.workers.on_long_wait", ask)
    before, loader = set(children(os.getpid())), half_sent(signal.SIGSTOP)
    with caplog.at_level("WARNING", "vitamp"), pytest.raises(Asked):
        in_order(loader, 1)
    assert "is stopped (SIGSTOP). `ls -l /proc/" in caplog.messages[0]
    loader.close()
    assert gone(set(children(os.getpid())) - before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets without a file")
def test_loading_leaves_nothing_in_the_temporary_folder(listed: Path, tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.datasets.loading.test_loading_deaths import _load_without_closing
try:
    _load_without_closing(__import__("pathlib").Path({str(listed)!r}))
finally:
    os._exit(7)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, check=False).returncode == 7
    assert not list(tmp_path.glob("pymp-*"))
