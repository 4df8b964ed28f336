"""Repeated augmentation, and image sizes that the epoch determines (TRAIN.SIZE_SCHEDULE)."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datasets import PADDING, Batch, EpochOrder, ImageDataset, open_dataset
from datasets.variants import Repeated, Sized
from engine.inputs.by_epoch import ImageSizes
from tests.datasets.opened import CPU, settings
from utils.config.train import TrainConfig


def indices(copies: int, epoch: int = 1) -> list[int]:
    """Sample indices of an epoch of 24 in their order."""
    windows = EpochOrder(24, 4, 1, 0, 1, 0, True, copies).windows(epoch)
    return [index for (share,) in windows for index in share.indices.tolist()]


@pytest.mark.parametrize("copies", [2, 3])
def test_repeated_epoch_keeps_its_length(copies: int) -> None:
    found = indices(copies)
    assert len(found) == 24
    assert len(set(found)) == 24, "no copy twice"
    assert set(Counter(index % 24 for index in found).values()) == {copies}
    assert {index // 24 for index in found} == set(range(copies))
    assert [index % 24 for index in found[:copies]] == [found[0]] * copies, "copies stand side by side"


def test_repeated_epochs_differ() -> None:
    met = [{index % 24 for index in indices(3, epoch)} for epoch in range(1, 30)]
    assert set.union(*met) == set(range(24))


def test_repeated_global_batches_do_not_depend_on_ranks() -> None:
    found = []
    for accum, world in ((4, 1), (2, 2), (1, 4)):
        orders = [EpochOrder(48, 4, accum, rank, world, 0, True, 3) for rank in range(world)]
        windows = zip(*(order.windows(1) for order in orders), strict=True)
        shares = ([share for rank in ranks for share in rank] for ranks in windows)
        of_each = [sorted(some, key=lambda share: share.number) for some in shares]
        found.append([index for some in of_each for share in some for index in share.indices.tolist()])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("source", ["imagenet2012", "digits"])
def test_repeated_copies_are_one_sample_with_new_transforms_in_every_epoch(listed: Path, source: str) -> None:
    channels = 1 if source == "digits" else 3
    data = settings(DATASET=source, DATA_PATH=str(listed), IMAGE_CHANNELS=channels, SHIFT=0.3, ROTATE=30)
    samples = open_dataset(data, True, 10, 0, CPU)
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
    seen = [repeated.__getitems__([(epoch, 4 + copy * count)]).images for epoch in (1, 2, 3) for copy in (0, 1, 2)]
    assert len({image.numpy().tobytes() for image in seen}) == 9
    batch = repeated.__getitems__([(1, PADDING), (1, count + 1)])
    assert batch.indices.tolist() == [PADDING, 1]
    assert not np.any(batch.images[0].numpy())


TRAIN = TrainConfig(NUM_EPOCHS=4, SIZE_SCHEDULE=((0.0, 8), (0.5, 12), (0.75, 16)))
SIZES = {1: 8, 2: 8, 3: 12, 4: 16}


def opened(place: Path, name: str, train: TrainConfig = TRAIN, **values: Any) -> ImageDataset:
    data = settings(**{"DATASET": name, "DATA_PATH": str(place), "IMAGE_SIZE": 16, **values})
    return open_dataset(data, True, 10, 0, CPU).augment(train)


def batch(dataset: ImageDataset, epoch: int) -> Batch:
    return dataset.__getitems__([(epoch, index) for index in (3, 0, 7)])


@pytest.mark.parametrize("name", ["digits", "synthetic", "imagenet2012"])
@pytest.mark.parametrize("changes", [{}, {"RAND_AUGMENT": True, "COLOR_JITTER": 0.4}], ids=["plain", "augmented"])
@pytest.mark.parametrize("copies", [1, 2])
def test_sized_images_equal_a_data_set_of_that_size(
    imagenet: Path, name: str, changes: dict[str, Any], copies: int
) -> None:
    """Independent of earlier batches: a resumed run may start at any epoch."""
    train = TRAIN.changed(**changes)

    def made(size: int) -> ImageDataset:
        dataset = opened(imagenet, name, train, SHIFT=0.1, ROTATE=10, IMAGE_SIZE=size)
        return Repeated(dataset, copies) if copies > 1 else dataset

    grown = Sized(made(16), train, 16)
    for epoch in (4, 1, 3, 2, 1):
        alone = made(SIZES[epoch])
        for ours, theirs in zip(batch(grown, epoch), batch(alone, epoch), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_last_epoch_has_the_final_size(epochs: int) -> None:
    train = TRAIN.changed(NUM_EPOCHS=epochs)
    sizes = [train.size_in(epoch, 16) for epoch in range(1, epochs + 1)]
    assert sizes == [8, 8, 16][-epochs:]
    (told,) = ImageSizes(train, 16).rows().values()
    assert told.endswith(f"16 from epoch {epochs}")


def test_sized_reports_broken_images_of_all_sizes(listed: Path) -> None:
    (listed / "train/0.png").write_bytes(b"no image")
    grown = Sized(opened(listed, "imagenet2012", MAX_BAD=1), TRAIN, 16)
    for epoch in (1, 4):
        grown.__getitems__([(epoch, 0)])
        assert [broken[0] for broken in grown.take_broken()] == [0]
