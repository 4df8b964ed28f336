"""Cross-validation (DATA.FOLD): folds of data that comes without a validation split."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.base import ImageDataset
from datasets.sources.folds import split_by_fold
from tests.datasets.shards.tar_files import samples, write_set, write_tar
from tests.datasets.sources.published import image
from utils.config.data import DataConfig
from utils.config.kinds import Fold
from utils.errors import UserError

Settings = Callable[..., DataConfig]
CPU = torch.device("cpu")
LABELS = np.random.default_rng(0).choice(6, 1003, p=[0.5, 0.3, 0.1, 0.06, 0.03, 0.01])


def folds(labels: np.ndarray, count: int, seed: int = 0) -> list[np.ndarray]:
    """Validation samples of each fold, after checking that the others are its training samples."""
    found = []
    for number in range(1, count + 1):
        train, validation = split_by_fold(labels, Fold(number, count), seed)
        assert sorted([*train, *validation]) == list(range(len(labels)))
        found.append(validation)
    return found


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_folds_are_disjoint_stratified_and_cover_all_samples(count: int) -> None:
    found = folds(LABELS, count)
    assert sorted(np.concatenate(found)) == list(range(len(LABELS)))
    sizes = [len(validation) for validation in found]
    assert max(sizes) - min(sizes) <= 1
    per_fold = np.array([np.bincount(LABELS[validation], minlength=6) for validation in found])
    assert (per_fold.max(0) - per_fold.min(0) <= 1).all()


def test_folds_depend_on_their_seed_alone() -> None:
    for one, same, other in zip(folds(LABELS, 5), folds(LABELS, 5), folds(LABELS, 5, seed=1), strict=True):
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)


def both(data: DataConfig, classes: int) -> tuple[list[str], list[str]]:
    """Names of the training and of the validation images."""
    check_dataset(data, classes)
    found = [open_dataset(data, train, classes, 0, CPU).single_images() for train in (True, False)]
    train, validation = ([split.name(index) for index in range(len(split))] for split in found if split is not None)
    return train, validation


@pytest.mark.parametrize("kind", ["imagefolder", "csv", "shards"])
def test_each_source_without_a_split_has_folds(kind: str, tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "data"
    if kind == "shards":
        write_tar(path / "a.tar", samples(range(12)))
    else:
        for number in range(12):
            image(path / f"{'abc'[number % 3]}" / f"{number:02d}.png", number)
    if kind == "csv":
        lines = [f"{'abc'[number % 3]}/{number:02d}.png,{number % 3}" for number in range(12)]
        path = path / "all.csv"
        path.write_text("\n".join(["path,target", *lines]) + "\n")
    given = {"DATASET": kind, "DATA_PATH": str(path), "CACHE": str(tmp_path / "cache")}
    validated = []
    for number in range(1, 5):
        train, validation = both(settings(**given, FOLD=f"{number}/4"), 3)
        assert (len(train), len(validation)) == (9, 3)
        assert not set(train) & set(validation)
        validated += validation
    assert len(set(validated)) == 12


def labels_of(dataset: ImageDataset) -> np.ndarray:
    labels = dataset.sample_labels()
    assert labels is not None
    return labels


def test_digits_have_folds_of_all_images(settings: Settings) -> None:
    validated = []
    for number in range(1, 6):
        data = settings(DATASET="digits", FOLD=f"{number}/5", IMAGE_CHANNELS=1)
        train, validation = (open_dataset(data, part, 10, 0, CPU) for part in (True, False))
        assert len(train) + len(validation) == 1797
        validated.append(np.bincount(labels_of(validation), minlength=10))
    counts = np.array(validated)
    assert counts.sum() == 1797
    assert (counts.max(0) - counts.min(0) <= 1).all()


def test_data_with_a_validation_split_has_no_folds(
    tmp_path: Path, imagenet: Path, class_tree: Callable[..., Path], settings: Settings
) -> None:
    write_set(tmp_path / "shards")
    folders = shutil.copytree(class_tree(), tmp_path / "folders")
    given = [
        {"DATASET": "imagenet2012", "DATA_PATH": str(imagenet)},
        {"DATASET": "imagefolder", "DATA_PATH": str(folders)},
        {"DATASET": "shards", "DATA_PATH": str(tmp_path / "shards"), "CACHE": str(tmp_path / "cache")},
        {"DATASET": "synthetic"},
    ]
    for data in given:
        check_dataset(settings(**data), 4)
        with pytest.raises(
            UserError, match=rf"DATA.FOLD 2/5: the data set {data['DATASET']}.* its own validation split"
        ):
            check_dataset(settings(**data, FOLD="2/5"), 4)
        with pytest.raises(UserError, match=r"Leave DATA.FOLD out"):
            open_dataset(settings(**data, FOLD="2/5"), False, 4, 0, CPU)


@pytest.mark.parametrize("wrong", ["0/5", "6/5", "1/1", "2", "2/", "a/b", "-1/5", "2.0/5"])
def test_wrong_fold_is_refused(wrong: str, settings: Settings) -> None:
    with pytest.raises(ValueError, match=r"is not K/N \(fold K of N, with N >= 2 and K from 1 to N, such as 2/5\)"):
        settings(FOLD=wrong)
