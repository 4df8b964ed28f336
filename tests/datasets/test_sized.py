"""TRAIN.SIZE_SCHEDULE: the epoch determines the image size, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from datasets import Batch, ImageDataset, open_dataset
from datasets.variants import Repeated, Sized
from tests.program import save_image
from utils.config.data import DataConfig
from utils.config.train import TrainConfig

CPU = torch.device("cpu")
TRAIN = TrainConfig(NUM_EPOCHS=4, SIZE_SCHEDULE=((0.0, 8), (0.5, 12), (0.75, 16)))
SIZES = {1: 8, 2: 8, 3: 12, 4: 16}


def data_of(imagenet: Path, name: str, **settings: Any) -> DataConfig:
    path = None if name in ("digits", "synthetic") else str(imagenet)
    return DataConfig(**{"DATASET": name, "DATA_PATH": path, "IMAGE_SIZE": 16, **settings})


def opened(data: DataConfig, train: TrainConfig = TRAIN) -> ImageDataset:
    return open_dataset(data, True, 10, 0, CPU).augment(train)


def batch(dataset: ImageDataset, epoch: int) -> Batch:
    return dataset.__getitems__([(epoch, index) for index in (3, 0, 7)])


@pytest.mark.parametrize("name", ["digits", "synthetic", "imagenet2012"])
@pytest.mark.parametrize("copies", [1, 2])
def test_sized_follows_the_schedule_by_epoch(imagenet: Path, name: str, copies: int) -> None:
    samples = opened(data_of(imagenet, name, SHIFT=0.1))
    grown = Sized(Repeated(samples, copies) if copies > 1 else samples, TRAIN, 16)
    assert {epoch: batch(grown, epoch).images.shape[-2:] for epoch in SIZES} == {e: (s, s) for e, s in SIZES.items()}


@pytest.mark.parametrize("name", ["digits", "imagenet2012"])
@pytest.mark.parametrize("changes", [{}, {"RAND_AUGMENT": True, "COLOR_JITTER": 0.4}], ids=["plain", "augmented"])
def test_sized_images_equal_a_data_set_of_that_size(imagenet: Path, name: str, changes: dict[str, Any]) -> None:
    """Independent of earlier batches: a resumed run may start at any epoch."""
    train = TRAIN.model_copy(update=changes)
    grown = Sized(opened(data_of(imagenet, name, SHIFT=0.1, ROTATE=10), train), train, 16)
    for epoch in (4, 1, 3, 2, 1):
        alone = opened(data_of(imagenet, name, SHIFT=0.1, ROTATE=10, IMAGE_SIZE=SIZES[epoch]), train)
        for ours, theirs in zip(batch(grown, epoch), batch(alone, epoch), strict=True):
            assert torch.equal(ours, theirs)


def test_sized_reports_broken_images_of_all_sizes(tmp_path: Path) -> None:
    for number in range(6):
        save_image(tmp_path / f"train/n{number % 2}/{number}.JPEG", seed=number)
    (tmp_path / "train/n0/0.JPEG").write_bytes(b"no image")
    lines = "".join(f"train/n{number % 2}/{number}.JPEG {number % 2}\n" for number in range(6))
    (tmp_path / "train_list.txt").write_text(lines, encoding="utf-8")
    data = data_of(tmp_path, "imagenet2012", MAX_BAD=1)
    grown = Sized(opened(data), TRAIN, 16)
    for epoch in (1, 4):
        grown.__getitems__([(epoch, 0)])
        assert [broken[0] for broken in grown.take_broken()] == [0]
