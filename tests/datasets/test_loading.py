from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import Batch, EpochOrder, ImageDataset, TrainLoader, ValLoader, auto_workers, open_dataset
from utils.config.schema import DataConfig
from utils.errors import TrainingError
from utils.seeding import seed_all

ROOT = Path(__file__).parents[2]
Settings = Callable[..., DataConfig]


@pytest.fixture
def training(listed: Path, settings: Settings, cpu: torch.device) -> Iterator[Callable[..., TrainLoader]]:
    """Loaders of the twelve listed images, with every random transform on."""
    data = settings(DATA_PATH=str(listed), SHIFT=0.2, ZOOM=0.2, ROTATE=20, AFFINE_PROB=0.7)
    opened: list[TrainLoader] = []

    def make(batch: int = 4, accum: int = 1, workers: int = 0, seed: int = 5) -> TrainLoader:
        dataset = open_dataset(data, True, 3, seed, cpu)
        opened.append(
            TrainLoader(dataset, EpochOrder(len(dataset), batch, accum, 0, 1, seed, True), seed, workers, cpu)
        )
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def by_sample(loader: TrainLoader, epoch: int, start: int = 0) -> dict[int, torch.Tensor]:
    batches = [batch for window in loader.epoch(epoch, start) for _, batch in window]
    return {int(i): image for batch in batches for i, image in zip(batch.indices, batch.images, strict=True)}


def equal(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


def test_a_sample_does_not_depend_on_workers_or_on_its_batch(training) -> None:
    reference = by_sample(training(), 1)
    assert len(reference) == 12
    assert equal(reference, by_sample(training(workers=2), 1))
    assert equal(reference, by_sample(training(batch=3, accum=2), 1))
    assert not equal(reference, by_sample(training(), 2))
    assert not equal(reference, by_sample(training(seed=6), 1))


def test_persistent_workers_serve_later_epochs_and_interrupted_ones(training) -> None:
    loader, fresh = training(workers=2), training()
    by_sample(loader, 0)
    for _ in loader.epoch(1):
        break
    assert equal(by_sample(loader, 2, start=1), by_sample(fresh, 2, start=1))


def test_windows_tell_their_shares_before_fetching(training) -> None:
    loader = training(batch=3, accum=3)
    windows = [len(window) for window in loader.epoch(0)]
    assert windows == [3, 1]
    for window in loader.epoch(0):
        for share, batch in window:
            assert batch.indices.tolist() == share.indices.tolist()
            assert batch.images.dtype == torch.uint8
            assert batch.images.shape == (3, 3, 8, 8)
            assert batch.labels.tolist() == [i % 3 for i in batch.indices.tolist()]


def test_a_window_left_early_does_not_shift_the_next(training) -> None:
    for window in training(batch=2, accum=3).epoch(0):
        share, batch = next(iter(window))
        assert batch.indices.tolist() == share.indices.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_random_numbers_of_training_alone(training, workers: int) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_all("test")
    expected = draws()
    seed_all("test")
    by_sample(training(workers=workers), 0)
    assert draws() == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["imagenet2012", "digits", "synthetic"])
def test_validation_is_padded_and_complete(
    listed: Path, settings: Settings, cpu: torch.device, name: str, workers: int
) -> None:
    data = settings(DATASET=name, DATA_PATH=str(listed), SYNTHETIC_VAL=41)
    dataset = open_dataset(data, False, 10, 0, cpu)
    seen: list[Batch] = []
    for rank in range(3):
        loader = ValLoader(dataset, 5, rank, 3, workers, cpu)
        batches = list(loader)
        loader.close()
        assert len(batches) == len(loader)
        seen.extend(batches)
    indices = torch.cat([batch.indices for batch in seen])
    assert sorted(indices[indices >= 0].tolist()) == list(range(len(dataset)))
    assert len({batch.images.shape for batch in seen}) == 1
    padding = torch.cat([batch.labels for batch in seen])[indices < 0]
    assert padding.eq(0).all()


def test_waiting_is_counted_and_handed_over_once(training) -> None:
    loader = training()
    begin = time.perf_counter()
    by_sample(loader, 0)
    assert 0 < loader.take_wait() < time.perf_counter() - begin
    assert loader.take_wait() == 0


def test_close_ends_the_workers(training) -> None:
    before = set(_children(os.getpid()))
    loader = training(workers=2)
    by_sample(loader, 0)
    started = set(_children(os.getpid())) - before
    assert len(started) == 2
    loader.close()
    assert _gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="the death of the parent is a signal on Linux only")
def test_workers_ignore_a_groups_signals_and_die_with_their_parent(listed: Path) -> None:
    script = f"""
import sys, time, torch
from datasets import *
from utils.config.schema import DataConfig
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
            workers = _children(parent.pid)
            assert len(workers) == 2
            for worker in workers:
                for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                    os.kill(worker, name)
            time.sleep(0.3)
            assert _children(parent.pid) == workers
        finally:
            parent.kill()
    assert _gone(set(workers), seconds=1.5), "torch alone notices within five seconds; a signal at once"


def test_a_process_that_never_closes_its_loader_ends_all_the_same(listed: Path) -> None:
    script = f"""
import torch
from datasets import *
from utils.config.schema import DataConfig
cpu = torch.device("cpu")
dataset = open_dataset(DataConfig(DATA_PATH={str(listed)!r}, IMAGE_SIZE=8), True, 3, 0, cpu)
loader = TrainLoader(dataset, EpochOrder(12, 4, 1, 0, 1, 0, True), 0, 2, cpu)
windows = loader.epoch(0)
next(iter(next(windows)))
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=40, check=False).returncode == 7


class Deadly(ImageDataset):
    """A loading process that is to fetch an image with lives left dies of it, and takes one of them."""

    def __init__(self, images: ImageDataset, lives: Path, signal_number: int) -> None:
        self.images, self.lives, self.signal_number = images, lives, signal_number

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        for _, index in keys:
            for life in self.lives.glob(f"{index}-*"):
                life.unlink()
                os.kill(os.getpid(), self.signal_number)
        return self.images.__getitems__(keys)


@pytest.fixture
def deadly(training, tmp_path: Path) -> Iterator[Callable[..., TrainLoader]]:
    """`deadly({3: 2})`: loaders whose processes die of image 3, twice."""
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


def in_order(loader: TrainLoader, epoch: int, start: int = 0) -> list[tuple[list[int], bytes]]:
    batches = [batch for window in loader.epoch(epoch, start) for _, batch in window]
    return [(batch.indices.tolist(), batch.images.numpy().tobytes()) for batch in batches]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_a_killed_loading_process_changes_nothing(
    training, deadly, caplog, monkeypatch, workers: int, start: int
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    expected = [in_order(training(batch=2), epoch, start) for epoch in (1, 2)]
    loader = deadly({3: 2, 8: 2}, workers)
    before = signal.getsignal(signal.SIGCHLD)
    began = time.monotonic()
    assert [in_order(loader, epoch, start) for epoch in (1, 2)] == expected
    assert time.monotonic() - began < 5, "torch alone looks every five seconds"
    assert signal.getsignal(signal.SIGCHLD) is before, "no handler may raise wherever the program happens to be"
    assert "was killed by SIGKILL: out of memory?" in caplog.text
    assert "no sample is lost" in caplog.text


def test_loading_processes_killed_between_batches_and_between_epochs(training) -> None:
    reference, loader = training(batch=2), training(batch=2, workers=2)
    before = set(_children(os.getpid()))
    found = []
    for epoch in (1, 2):
        windows = loader.epoch(epoch)
        for number, window in enumerate(windows):
            found += [(batch.indices.tolist(), batch.images.numpy().tobytes()) for _, batch in window]
            if number in (1, 5):  # 5: the last of the epoch
                for worker in set(_children(os.getpid())) - before:
                    os.kill(worker, signal.SIGKILL)
                time.sleep(0.1)  # a handler that raises would do so here
    assert found == in_order(reference, 1) + in_order(reference, 2)


def test_validation_outlives_its_loading_processes_too(listed: Path, settings: Settings, cpu: torch.device) -> None:
    dataset = open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, cpu)
    loader = ValLoader(dataset, 2, 0, 1, 2, cpu)
    before = set(_children(os.getpid()))
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 1:
            for worker in set(_children(os.getpid())) - before:
                os.kill(worker, signal.SIGKILL)
    loader.close()
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert [index for index in indices if index >= 0] == list(range(7))


@pytest.mark.parametrize(("signal_number", "hint"), [(signal.SIGKILL, "out of memory?"), (signal.SIGBUS, "/dev/shm")])
def test_loading_processes_that_die_again_and_again_end_the_run(deadly, signal_number: int, hint: str) -> None:
    loader = deadly({7: 99}, 1, signal_number)
    with pytest.raises(TrainingError) as caught:
        in_order(loader, 1)
    assert "died 3 times without one batch in between" in str(caught.value)
    assert hint in str(caught.value)
    assert "DATA.NUM_WORKERS (-num_workers)" in str(caught.value)


def test_processes_that_cannot_be_started(training, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_auto_workers_shares_the_cores() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert auto_workers(1) == min(16, cores)
    assert auto_workers(10 * cores) == 1


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _gone(pids: set[int], seconds: float = 5) -> bool:
    """Whether all end in time. A child nobody has waited for yet counts as ended."""
    deadline = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
