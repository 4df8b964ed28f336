"""The first global batches have the same samples and pixels with any number of processes.

The tests compare the batches that training gets: its own loader with real worker processes, one loader per rank.
"""

import hashlib
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import Batch, open_dataset
from engine.setup import training_data
from tests.datasets.layouts import lay_out
from utils.config import Config, load_config
from utils.distributed.world import World

SAMPLES, CLASSES = 101, 4
GLOBAL_BATCH, BATCH = 8, 2
"""A global batch is four micro-batches of two samples, on 1, 2 or 4 ranks."""
UPDATES = -(-SAMPLES // GLOBAL_BATCH)
GLOBAL_BATCHES = 50
START = 17

GlobalBatch = tuple[list[int], str]
"""Samples in their order, and a checksum of their labels and pixels."""


def jpeg(number: int) -> bytes:
    """Sizes and shapes differ, so that a crop of one is never the crop of another."""
    generator = np.random.default_rng(number)
    height, width = generator.integers(20, 44, 2)
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.fixture(scope="module", params=("imagefolder", "shards"))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp(request.param)
    lay_out(request.param, root, {"train": [(f"{k:03d}.jpg", k % CLASSES) for k in range(SAMPLES)]}, jpeg)
    (root / "val").symlink_to("train")
    return request.param, root


@pytest.fixture(scope="module")
def expected(source: tuple[str, Path]) -> list[GlobalBatch]:
    """Batches of one rank without loading processes."""
    return global_batches(source)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_batches_do_not_depend_on_the_number_of_workers(
    source: tuple[str, Path], expected: list[GlobalBatch], workers: int
) -> None:
    assert global_batches(source, workers=workers) == expected


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (4, 0), (2, 2)])
def test_batches_do_not_depend_on_the_number_of_ranks(
    source: tuple[str, Path], expected: list[GlobalBatch], world: int, workers: int
) -> None:
    assert global_batches(source, world=world, workers=workers) == expected


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 1)])
def test_batches_do_not_depend_on_the_start(
    source: tuple[str, Path], expected: list[GlobalBatch], world: int, workers: int
) -> None:
    assert START % UPDATES, "not at the beginning of an epoch"
    assert global_batches(source, world=world, workers=workers, start=START) == expected[START:]


def test_epochs_have_all_samples_once_and_differ(expected: list[GlobalBatch]) -> None:
    epochs = [expected[first : first + UPDATES] for first in range(0, GLOBAL_BATCHES - UPDATES + 1, UPDATES)]
    orders = [[index for indices, _ in epoch for index in indices] for epoch in epochs]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders) == 3
    checksums = [checksum for _, checksum in expected]
    assert len(set(checksums)) == len(checksums)


@pytest.mark.parametrize(("world", "batch"), [(1, 8), (2, 4)])
def test_sample_does_not_depend_on_its_place_in_the_batch(
    source: tuple[str, Path], expected: list[GlobalBatch], world: int, batch: int
) -> None:
    assert global_batches(source, world=world, batch=batch) == expected


@pytest.fixture(autouse=True)
def _ranks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot share a listing: each opens the data set by itself."""
    monkeypatch.setattr("engine.setup.open_dataset", lambda *given: open_dataset(*given[:5]))


def global_batches(
    source: tuple[str, Path], world: int = 1, workers: int = 0, start: int = 0, batch: int = BATCH
) -> list[GlobalBatch]:
    """Global batches from number `start` on, combined from all ranks."""
    config = settings(source, world, workers, batch)
    ranks = [one_rank(config, World(rank, world), start) for rank in range(world)]
    found: list[GlobalBatch] = []
    for parts in zip(*ranks, strict=True):
        micro_batches = [micro_batch for part in parts for micro_batch in part]
        numbers = [number for number, _ in micro_batches]
        assert numbers == sorted(set(numbers)), "the ranks' shares of a global batch, one after the other"
        samples = [sample for _, content in micro_batches for sample in zip(*content, strict=True)]
        seen = b"".join(label.numpy().tobytes() + pixels.numpy().tobytes() for pixels, label, _ in samples)
        found.append(([int(index) for _, _, index in samples], hashlib.sha256(seen).hexdigest()))
    return found


def one_rank(config: Config, world: World, start: int) -> list[list[tuple[int, Batch]]]:
    """(number in the global batch, content) of this rank's micro-batches, one list per global batch."""
    _, loader = training_data(config, world, torch.device("cpu"))
    assert loader.order.updates == UPDATES
    found: list[list[tuple[int, Batch]]] = []
    try:
        while (done := start + len(found)) < GLOBAL_BATCHES:
            for window in itertools.islice(loader.epoch(1 + done // UPDATES, done % UPDATES), GLOBAL_BATCHES - done):
                found.append([(share.number, batch) for share, batch in window if share.weight])
    finally:
        loader.close()
    return found


def settings(source: tuple[str, Path], world: int, workers: int, batch: int) -> Config:
    name, root = source
    words = {
        "DATA.DATASET": name,
        "DATA.DATA_PATH": str(root),
        "DATA.IMAGE_SIZE": 16,
        "DATA.BATCH_SIZE": batch,
        "DATA.DROP_LAST": False,
        "DATA.NUM_WORKERS": workers,
        "DATA.CACHE": str(root / "cache"),
        "MODEL.NUM_CLASSES": CLASSES,
        "TRAIN.ACCUM_ITER": GLOBAL_BATCH // (batch * world),
        "TRAIN.RAND_AUGMENT": True,
        "SEED": 3,
    }
    return load_config(None, words={key: str(value) for key, value in words.items()}).config
