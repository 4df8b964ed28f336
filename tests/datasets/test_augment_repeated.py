"""Repeated augmentation: samples of an epoch, and differences between copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import PADDING, EpochOrder, open_dataset
from datasets.variants import Repeated
from utils.config.data import DataConfig

Settings = Callable[..., DataConfig]


def indices(samples: int, copies: int, epoch: int = 1, accum: int = 1, world: int = 1) -> list[int]:
    """Sample indices of an epoch in the order of the global batches, over all ranks."""
    found = []
    orders = [EpochOrder(samples, 4, accum, rank, world, 0, True, copies) for rank in range(world)]
    for shares in zip(*(order.windows(epoch) for order in orders), strict=True):
        of_window = sorted((share for rank in shares for share in rank), key=lambda share: share.number)
        found += [int(index) for share in of_window for index in share.indices]
    return found


@pytest.mark.parametrize("copies", [2, 3])
def test_repeated_epoch_keeps_its_length(copies: int) -> None:
    found = indices(24, copies)
    assert len(found) == 24
    assert len(set(found)) == 24, "no copy twice"
    assert set(Counter(index % 24 for index in found).values()) == {copies}
    assert {index // 24 for index in found} == set(range(copies))
    assert [index % 24 for index in found[:copies]] == [found[0]] * copies, "copies stand side by side"


def test_repeated_epochs_differ_and_one_copy_is_the_plain_order() -> None:
    met = [{index % 24 for index in indices(24, 3, epoch)} for epoch in range(1, 30)]
    assert set.union(*met) == set(range(24))
    assert indices(24, 1) == [int(i) for shares in EpochOrder(24, 4, 1, 0, 1, 0, True).windows(1) for i in shares[0][1]]


def test_repeated_global_batches_do_not_depend_on_ranks() -> None:
    assert indices(48, 3, accum=4) == indices(48, 3, accum=2, world=2) == indices(48, 3, world=4)


@pytest.mark.parametrize("source", ["imagenet2012", "digits"])
def test_repeated_copies_are_one_sample_with_new_transforms(
    settings: Settings, cpu: torch.device, listed: Path, source: str
) -> None:
    channels = 1 if source == "digits" else 3
    data = settings(DATASET=source, DATA_PATH=str(listed), IMAGE_CHANNELS=channels, SHIFT=0.3, ROTATE=30)
    samples = open_dataset(data, True, 10, 0, cpu)
    repeated = Repeated(samples, 3)
    count = len(samples)
    assert (len(repeated), repeated.classes, repeated.in_memory) == (count, samples.classes, samples.in_memory)
    keys = [(2, 5), (2, 7 + count), (2, 5 + 2 * count), (2, 5 + count), (2, 7)]
    batch = repeated.__getitems__(keys)
    assert batch.indices.tolist() == [5, 7, 5, 5, 7]
    assert batch.labels.tolist() == samples.__getitems__([(1, i) for i in (5, 7, 5, 5, 7)]).labels.tolist()
    assert len({image.numpy().tobytes() for image in batch.images}) == 5
    for row, key in enumerate(keys):
        assert torch.equal(repeated.__getitems__([key]).images[0], batch.images[row]), "whoever stands beside it"


def test_repeated_copies_of_all_epochs_differ(settings: Settings, cpu: torch.device, listed: Path) -> None:
    data = settings(DATASET="imagenet2012", DATA_PATH=str(listed))
    repeated = Repeated(open_dataset(data, True, 10, 0, cpu), 3)
    seen = [
        repeated.__getitems__([(epoch, 4 + copy * len(repeated))]).images for epoch in (1, 2, 3) for copy in (0, 1, 2)
    ]
    assert len({image.numpy().tobytes() for image in seen}) == 9


def test_repeated_padding_stays_padding(settings: Settings, cpu: torch.device, listed: Path) -> None:
    data = settings(DATASET="imagenet2012", DATA_PATH=str(listed))
    batch = Repeated(open_dataset(data, True, 10, 0, cpu), 2).__getitems__([(1, PADDING), (1, 13)])
    assert batch.indices.tolist() == [PADDING, 1]
    assert not np.any(batch.images[0].numpy())
