"""Splits and folds (DATA.VAL_FRACTION, DATA.FOLD) of data that comes without a validation split."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from datasets import check_dataset, count_classes, open_dataset
from datasets.sources.grouped import split_several_labels
from datasets.sources.split import split, split_by_fold, split_rows
from tests.datasets.layouts import lay_out
from tests.datasets.opened import CPU, settings
from tests.datasets.shards.tar_files import write_set
from utils.config.data import DataConfig
from utils.config.kinds import Fold
from utils.errors import UserError

LABELS = np.random.default_rng(0).choice(6, 1003, p=[0.5, 0.3, 0.1, 0.06, 0.03, 0.01])


def test_the_split_is_stratified_and_depends_on_its_seed_alone() -> None:
    labels = np.random.default_rng(0).choice(5, 1000, p=[0.5, 0.3, 0.1, 0.09, 0.01])
    train, validation = split(labels, 0.25, 0)
    assert len(validation) == 250
    assert sorted([*train, *validation]) == list(range(1000))
    for label in range(5):
        assert abs((labels[validation] == label).sum() - (labels == label).sum() * 0.25) < 1
    assert np.array_equal(split(labels, 0.25, 0)[1], validation)
    assert not np.array_equal(split(labels, 0.25, 1)[1], validation)


def test_every_class_keeps_an_image_for_training_and_noise_of_rounding_adds_none() -> None:
    assert len(split(np.zeros(70, dtype=np.int64), 0.1, 0)[1]) == 7
    labels = np.array([0, 1, 1, 2, 2, 2])
    train, validation = split(labels, 0.95, 0)
    assert sorted(labels[train].tolist()) == [0, 1, 2]
    assert sorted(labels[validation].tolist()) == [1, 2, 2]


def folds(labels: np.ndarray, count: int, seed: int = 0) -> list[np.ndarray]:
    """Validation samples of each fold, after checking that the others are its training samples."""
    found = []
    for number in range(1, count + 1):
        train, validation = split_by_fold(labels, Fold(number, count), seed)
        assert sorted([*train, *validation]) == list(range(len(labels)))
        found.append(validation)
    return found


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_folds_are_disjoint_stratified_and_depend_on_their_seed_alone(count: int) -> None:
    found = folds(LABELS, count)
    assert sorted(np.concatenate(found)) == list(range(len(LABELS)))
    sizes = [len(validation) for validation in found]
    assert max(sizes) - min(sizes) <= 1
    per_fold = np.array([np.bincount(LABELS[validation], minlength=6) for validation in found])
    assert (per_fold.max(0) - per_fold.min(0) <= 1).all()
    for one, same, other in zip(found, folds(LABELS, count), folds(LABELS, count, seed=1), strict=True):
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)


def both(data: DataConfig, classes: int) -> tuple[list[str], list[str]]:
    """Names of the training and of the validation images."""
    check_dataset(data, classes)
    found = [open_dataset(data, train, classes, 0, CPU).single_images() for train in (True, False)]
    train, validation = ([split.name(index) for index in range(len(split))] for split in found if split is not None)
    return train, validation


@pytest.mark.parametrize("kind", ["imagefolder", "csv", "shards"])
def test_each_source_without_a_split_has_folds(kind: str, tmp_path: Path) -> None:
    rows = [(f"{number:02d}.png", number % 3 if number else 3) for number in range(12)]
    given = lay_out(kind, tmp_path, {"": rows})
    validated = []
    for number in range(1, 5):
        train, validation = both(settings(**given, FOLD=f"{number}/4"), 4)
        assert count_classes(settings(**given, FOLD=f"{number}/4"), True) == 4, "also without its only image"
        assert (len(train), len(validation)) == (9, 3)
        assert not set(train) & set(validation)
        validated += validation
    assert len(set(validated)) == 12


def test_digits_have_folds_of_all_images() -> None:
    validated = []
    for number in range(1, 6):
        data = settings(DATASET="digits", FOLD=f"{number}/5", IMAGE_CHANNELS=1)
        train, validation = (open_dataset(data, part, 10, 0, CPU) for part in (True, False))
        assert len(train) + len(validation) == 1797
        validated.append(np.bincount(validation.sample_labels(), minlength=10))
    counts = np.array(validated)
    assert counts.sum() == 1797
    assert (counts.max(0) - counts.min(0) <= 1).all()


def test_data_with_a_validation_split_has_no_folds(tmp_path: Path, imagenet: Path, class_tree: Path) -> None:
    write_set(tmp_path / "shards")
    folders = shutil.copytree(class_tree, tmp_path / "folders")
    given = [
        {"DATASET": "imagenet2012", "DATA_PATH": str(imagenet)},
        {"DATASET": "imagefolder", "DATA_PATH": str(folders)},
        {"DATASET": "shards", "DATA_PATH": str(tmp_path / "shards")},
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
def test_wrong_fold_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not K/N \(fold K of N, with N >= 2 and K from 1 to N, such as 2/5\)"):
        settings(FOLD=wrong)


IMAGES = (900, 700, 600, 500, 400, 300, 200, 60, 30, 20, 15, 12, 10, 10)
"""Images of each label, of 2,000: most sets of labels occur once, so spreading equal sets evenly is not enough."""


def label_rows(seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = np.zeros((2000, len(IMAGES)), dtype=np.uint8)
    for label, images in enumerate(IMAGES):
        rows[generator.choice(len(rows), images, replace=False), label] = 1
    return rows


def split_labels(rows: np.ndarray, **settings: object) -> tuple[np.ndarray, np.ndarray]:
    train, val = split_several_labels(rows, DataConfig.model_validate(settings))
    assert sorted([*train, *val]) == list(range(len(rows)))
    return train, val


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_validation_split_has_every_label_in_proportion(fraction: float) -> None:
    """A label of 10 images has one in a validation split of 10 %, whatever the seed."""
    for seed in range(8):
        rows = label_rows(seed)
        _, val = split_labels(rows, VAL_FRACTION=fraction, SPLIT_SEED=seed)
        assert len(val) == round(2000 * fraction)
        assert np.abs(rows[val].sum(0) - fraction * rows.sum(0)).max() <= 1


def test_folds_have_every_label_in_proportion() -> None:
    for seed in range(4):
        rows = label_rows(seed)
        folds = [split_labels(rows, FOLD=f"{number}/7", SPLIT_SEED=seed)[1] for number in range(1, 8)]
        assert sorted(map(len, folds)) == [285, 285, 286, 286, 286, 286, 286]
        assert sorted(np.concatenate(folds)) == list(range(2000))
        assert np.ptp([rows[fold].sum(0) for fold in folds], axis=0).max() <= 2


@pytest.mark.parametrize("settings", [{}, {"FOLD": "2/5"}])
def test_split_depends_on_its_seed_and_not_on_the_order_of_columns(settings: dict[str, str]) -> None:
    rows = label_rows()
    val = split_labels(rows, **settings)[1]
    assert np.array_equal(val, split_labels(rows, **settings)[1])
    for seed in range(5):
        columns = np.random.default_rng(seed).permutation(rows.shape[1])
        assert np.array_equal(val, split_labels(rows[:, columns], **settings)[1])
    assert not np.array_equal(val, split_labels(rows, SPLIT_SEED=1, **settings)[1])


def test_small_and_unlabelled_tables_are_split() -> None:
    assert [len(of_split) for of_split in split_labels(np.zeros((2, 3), dtype=np.uint8))] == [1, 1]
    assert len(split_labels(np.zeros((50, 3), dtype=np.uint8))[1]) == 5
    with pytest.raises(UserError, match="One image is too few for a validation split"):
        split_labels(np.ones((1, 3), dtype=np.uint8))
    for labels in (np.ones((4, 3), dtype=np.uint8), np.zeros(4, dtype=np.int64)):
        with pytest.raises(UserError, match=r"DATA.FOLD 1/5: 4 images cannot fill 5 folds; use fewer"):
            split_rows(labels, DataConfig(FOLD="1/5"), "train", "here")
    with pytest.raises(UserError, match=r"DATA.FOLD 2000/5000: 1797 images cannot fill 5000 folds"):
        open_dataset(DataConfig(DATASET="digits", FOLD="2000/5000"), False, 10, 0, CPU)
