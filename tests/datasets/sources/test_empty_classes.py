"""Classes without an image are logged before training, for every kind of source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import check_dataset
from tests.datasets.shards.tar_files import samples, write_tar
from utils.config.data import DataConfig

Settings = Callable[..., DataConfig]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Warnings of the check before a run."""

    def check(data: DataConfig, classes: int, train: bool = True) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "vitamp"):
            check_dataset(data, classes, train)
        return [record.getMessage() for record in caplog.records]

    return check


def test_shards(tmp_path: Path, of_shards: Callable[..., DataConfig], told: Callable[..., list[str]]) -> None:
    write_tar(tmp_path / "train" / "0.tar", samples([0, 2, 3]))  # labels 0, 2, 0
    write_tar(tmp_path / "val" / "0.tar", samples([1, 2]))
    data, owner = of_shards(tmp_path), f"split of the data set in {tmp_path} has no image for"
    assert told(data, 3) == [
        f"The training {owner} 1 of its 3 classes (the first: 1).",
        f"The validation {owner} 1 of its 3 classes (the first: 0).",
    ]
    assert told(data, 3, False) == [f"The validation {owner} 1 of its 3 classes (the first: 0)."]
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert told(data, 3)[0] == f"The training {owner} 1 of its 3 classes (the first: bee)."


def test_warns_of_empty_classes_in_split_shards(
    tmp_path: Path, of_shards: Callable[..., DataConfig], told: Callable[..., list[str]]
) -> None:
    write_tar(tmp_path / "0.tar", samples([0, 3, 6, 9, 2]))
    data = of_shards(tmp_path, VAL_FRACTION=0.4)
    rare = "which have too few images for DATA.VAL_FRACTION 0.4."
    assert told(data, 3) == [
        f"{tmp_path}: the validation split has no image of 1 of 3 classes (2), {rare}",
        f"The training split of the data set in {tmp_path} has no image for 1 of its 3 classes (the first: 1).",
    ]
    write_tar(tmp_path / "0.tar", samples([0, 3, 6, 9, 2, 1]))
    assert told(data, 3) == [f"{tmp_path}: the validation split has no image of 2 of 3 classes (1, 2), {rare}"]
