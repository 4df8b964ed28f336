"""Classes without an image are logged before training, for every kind of source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import check_dataset
from tests.datasets.shards.tar_files import samples, write_tar
from tests.datasets.sources.published import image
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("csv", "train.csv has no image for 2 of its 4 classes (the first: 1)"),
        ("imagenet2012", "train_list.txt has no image for 2 of its 4 classes (the first: 1)"),
        ("imagefolder", "train has no image for 1 of its 3 classes (the first: none)"),
        ("imagefolder without splits", "set has no image for 1 of its 3 classes (the first: none)"),
    ],
)
def test_lists_and_folders(
    tmp_path: Path, settings: Settings, told: Callable[..., list[str]], kind: str, said: str
) -> None:
    root = tmp_path / "set"
    for split, labels in (("train", (0, 3)), ("val", (0, 1, 2, 3))):
        folder = root if "without" in kind else root / split
        paths = [folder / f"class{label % 2}" / f"{label}.png" for label in labels]
        for path in paths:
            image(path)
        named = [(path.relative_to(root), label) for path, label in zip(paths, labels, strict=True)]
        (root / f"{split}.csv").write_text("path,target\n" + "".join(f"{path},{label}\n" for path, label in named))
        (root / f"{split}_list.txt").write_text("".join(f"{path} {label}\n" for path, label in named))
    (root / "none" if "without" in kind else root / "train" / "none").mkdir()
    found = told(settings(DATASET=kind.partition(" ")[0], DATA_PATH=str(root)), 4)
    assert found[0].endswith(f"{said}.")


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
