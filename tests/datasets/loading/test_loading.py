import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import Batch, TrainLoader, ValLoader, auto_workers, open_dataset
from tests.datasets.opened import CPU, settings
from utils.distributed.world import World
from utils.machine.cpus import cores
from utils.seeding import seed_all

ROOT = Path(__file__).parents[3]


def by_sample(loader: TrainLoader, epoch: int, start: int = 0) -> dict[int, torch.Tensor]:
    batches = [batch for window in loader.epoch(epoch, start) for _, batch in window]
    return {int(i): image for batch in batches for i, image in zip(batch.indices, batch.images, strict=True)}


def equal(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


def test_persistent_workers_serve_later_epochs_and_interrupted_ones(training) -> None:
    loader, fresh = training(workers=2), training()
    by_sample(loader, 0)
    for _ in loader.epoch(1):
        break
    assert equal(by_sample(loader, 2, start=1), by_sample(fresh, 2, start=1))


def test_window_shares_are_known_before_loading(training) -> None:
    loader = training(batch=3, accum=3)
    windows = [len(window) for window in loader.epoch(0)]
    assert windows == [3, 1]
    for window in loader.epoch(0):
        for share, batch in window:
            assert batch.indices.tolist() == share.indices.tolist()
            assert batch.images.dtype == torch.uint8
            assert batch.images.shape == (3, 3, 8, 8)
            assert batch.labels.tolist() == [i % 3 for i in batch.indices.tolist()]


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
def test_validation_is_padded_and_complete(listed: Path, name: str, workers: int) -> None:
    data = settings(DATASET=name, DATA_PATH=str(listed), SYNTHETIC_VAL=41)
    dataset = open_dataset(data, False, 10, 0, CPU)
    seen: list[Batch] = []
    for rank in range(3):
        loader = ValLoader(dataset, 5, rank, 3, workers, CPU)
        batches = list(loader)
        loader.close()
        assert len(batches) == len(loader)
        seen.extend(batches)
    indices = torch.cat([batch.indices for batch in seen])
    assert sorted(indices[indices >= 0].tolist()) == list(range(len(dataset)))
    assert len({batch.images.shape for batch in seen}) == 1
    padding = torch.cat([batch.labels for batch in seen])[indices < 0]
    assert padding.eq(0).all()


def test_take_wait_returns_waiting_time_once(training) -> None:
    loader = training()
    begin = time.perf_counter()
    by_sample(loader, 0)
    assert 0 < loader.take_wait() < time.perf_counter() - begin
    assert loader.take_wait() == 0


def test_auto_workers_shares_the_cores() -> None:
    assert auto_workers() == min(16, cores())
    assert auto_workers(World(local_size=10 * cores())) == 1
    assert auto_workers(World(local_size=8, cores=12)) == 12, "reserved for this process, not for all eight"
