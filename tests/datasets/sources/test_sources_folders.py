"""Class folders without splits, and warnings of empty classes for lists and folders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.images import Images
from datasets.sources.split import split
from tests.datasets.sources.published import image
from utils.config.data import DataConfig
from utils.errors import UserError

Settings = Callable[..., DataConfig]
CPU = torch.device("cpu")


@pytest.fixture
def unparted(tmp_path: Path) -> Path:
    for name, count in (("daisy", 10), ("rose", 20)):
        for number in range(count):
            image(tmp_path / name / "deep" / f"{number:02d}.png", number)
    return tmp_path


def paths(data: DataConfig, train: bool) -> list[tuple[str, int]]:
    dataset = open_dataset(data, train, 10, 0, CPU)
    assert isinstance(dataset, Images)
    samples = dataset.samples
    return [(samples.name(k), int(samples.labels[k])) for k in range(len(samples))]


def test_class_folders_without_splits_are_split(unparted: Path, settings: Settings) -> None:
    data = settings(DATASET="imagefolder", DATA_PATH=str(unparted), VAL_FRACTION=0.2)
    check_dataset(data, 2)
    train, validation = paths(data, True), paths(data, False)
    assert [label for _, label in validation] == [0] * 2 + [1] * 4
    assert not set(train) & set(validation)
    expected = [(str(path), int("rose" in str(path))) for path in sorted(unparted.rglob("*.png"))]
    assert sorted(train + validation) == expected
    assert open_dataset(data, False, 2, 0, CPU).classes == ["daisy", "rose"]
    batch = open_dataset(data, True, 2, 0, CPU).__getitems__([(1, k) for k in range(len(train))])
    assert batch.labels.tolist() == [label for _, label in train]


def test_the_split_is_stratified_and_depends_on_its_seed_alone() -> None:
    labels = np.random.default_rng(0).choice(5, 1000, p=[0.5, 0.3, 0.1, 0.09, 0.01])
    train, validation = split(labels, 0.25, 0)
    assert len(validation) == 250
    assert sorted([*train, *validation]) == list(range(1000))
    for label in range(5):
        assert abs((labels[validation] == label).sum() - (labels == label).sum() * 0.25) < 1
    assert np.array_equal(split(labels, 0.25, 0)[1], validation)
    assert not np.array_equal(split(labels, 0.25, 1)[1], validation)


def test_split_size_ignores_floating_point_noise() -> None:
    assert len(split(np.zeros(70, dtype=np.int64), 0.1, 0)[1]) == 7


def test_every_class_keeps_an_image_for_training() -> None:
    labels = np.array([0, 1, 1, 2, 2, 2])
    train, validation = split(labels, 0.95, 0)
    assert sorted(labels[train].tolist()) == [0, 1, 2]
    assert sorted(labels[validation].tolist()) == [1, 2, 2]


def test_too_few_images_for_a_split_are_refused(tmp_path: Path, settings: Settings) -> None:
    for name in ("a", "b"):
        image(tmp_path / name / "only.png")
    with pytest.raises(UserError, match="too few images for a validation split: 2 in 2 classes"):
        check_dataset(settings(DATASET="imagefolder", DATA_PATH=str(tmp_path)), 2)


def test_data_path_one_folder_too_high_is_refused(unparted: Path, settings: Settings) -> None:
    image(unparted / "flowers" / "train" / "tulip" / "0.png")
    said = f"one folder too high: .* has class folders in train/. Try -data_path {unparted / 'flowers'}"
    with pytest.raises(UserError, match=said):
        check_dataset(settings(DATASET="imagefolder", DATA_PATH=str(unparted)), 10)


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_class_may_have_the_name_of_a_split(
    unparted: Path, settings: Settings, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for number in range(10):
        image(unparted / name / f"{number}.png")
    data = settings(DATASET="imagefolder", DATA_PATH=str(unparted))
    with caplog.at_level(logging.WARNING, "vitamp"):
        check_dataset(data, 3)
    assert f"{unparted / name} is taken for a class" in caplog.text
    assert open_dataset(data, True, 3, 0, CPU).classes == sorted(["daisy", "rose", name])


def test_split_folders_without_class_folders_are_not_classes(tmp_path: Path, settings: Settings) -> None:
    for part in ("train", "val"):
        for number in range(10):
            image(tmp_path / part / f"{number}.png")
    with pytest.raises(UserError, match="has no images in class folders"):
        check_dataset(settings(DATASET="imagefolder", DATA_PATH=str(tmp_path)), 2)
