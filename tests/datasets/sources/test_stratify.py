"""Splits of samples with several labels each: DATA.VAL_FRACTION and DATA.FOLD, by iterative stratification."""

from __future__ import annotations

import numpy as np
import pytest

from datasets.sources.folds import split_rows, split_several_labels
from utils.config.data import DataConfig
from utils.errors import UserError

IMAGES = (900, 700, 600, 500, 400, 300, 200, 60, 30, 20, 15, 12, 10, 10)
"""Images of each label, of 2,000: most sets of labels occur once, so spreading equal sets evenly is not enough."""


def label_rows(seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = np.zeros((2000, len(IMAGES)), dtype=np.uint8)
    for label, images in enumerate(IMAGES):
        rows[generator.choice(len(rows), images, replace=False), label] = 1
    return rows


def split(rows: np.ndarray, **settings: object) -> tuple[np.ndarray, np.ndarray]:
    train, val = split_several_labels(rows, DataConfig.model_validate(settings))
    assert sorted([*train, *val]) == list(range(len(rows)))
    return train, val


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_validation_split_has_every_label_in_proportion(fraction: float) -> None:
    """A label of 10 images has one in a validation split of 10 %, whatever the seed."""
    for seed in range(8):
        rows = label_rows(seed)
        _, val = split(rows, VAL_FRACTION=fraction, SPLIT_SEED=seed)
        assert len(val) == round(2000 * fraction)
        assert np.abs(rows[val].sum(0) - fraction * rows.sum(0)).max() <= 1


def test_folds_have_every_label_in_proportion() -> None:
    for seed in range(4):
        rows = label_rows(seed)
        folds = [split(rows, FOLD=f"{number}/7", SPLIT_SEED=seed)[1] for number in range(1, 8)]
        assert sorted(map(len, folds)) == [285, 285, 286, 286, 286, 286, 286]
        assert sorted(np.concatenate(folds)) == list(range(2000))
        assert np.ptp([rows[fold].sum(0) for fold in folds], axis=0).max() <= 2


@pytest.mark.parametrize("settings", [{}, {"FOLD": "2/5"}])
def test_split_depends_on_its_seed_and_not_on_the_order_of_columns(settings: dict[str, str]) -> None:
    rows = label_rows()
    val = split(rows, **settings)[1]
    assert np.array_equal(val, split(rows, **settings)[1])
    for seed in range(5):
        columns = np.random.default_rng(seed).permutation(rows.shape[1])
        assert np.array_equal(val, split(rows[:, columns], **settings)[1])
    assert not np.array_equal(val, split(rows, SPLIT_SEED=1, **settings)[1])


def test_small_and_unlabelled_tables_are_split() -> None:
    assert [len(of_split) for of_split in split(np.zeros((2, 3), dtype=np.uint8))] == [1, 1]
    assert len(split(np.zeros((50, 3), dtype=np.uint8))[1]) == 5
    with pytest.raises(UserError, match="One image is too few for a validation split"):
        split(np.ones((1, 3), dtype=np.uint8))
    for labels in (np.ones((4, 3), dtype=np.uint8), np.zeros(4, dtype=np.int64)):
        with pytest.raises(UserError, match=r"DATA.FOLD 1/5: 4 images cannot fill 5 folds; use fewer"):
            split_rows(labels, DataConfig(FOLD="1/5"), "train", "here")
