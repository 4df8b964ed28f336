"""Fingerprint by which a resumed run recognises its samples and their order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from datasets import EpochOrder, Repeated, identity_of, open_dataset
from utils.config.data import DataConfig


def identity(batch: int = 8, rank: int = 0, world: int = 1, seed: int = 0, copies: int = 1, **data) -> dict:
    settings = DataConfig(**{"DATASET": "digits", "IMAGE_SIZE": 8, "IMAGE_CHANNELS": 1, **data})
    part = open_dataset(settings, True, 10, seed, torch.device("cpu"))
    order = EpochOrder(len(part), batch, 1, rank, world, seed, True, copies, part.shuffled)
    return identity_of(Repeated(part, copies) if copies > 1 else part, order)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"copies": 2}])
def test_identity_changes_with_the_order(changed: dict) -> None:
    assert identity(**changed)["order"] != identity()["order"]


def test_identity_does_not_depend_on_sharding_and_augmentation() -> None:
    assert identity(IMAGE_SIZE=16, FLIP=0.0) == identity()
    assert identity(batch=4, rank=1, world=2)["order"] == identity()["order"]


def test_identity_does_not_depend_on_the_folder(listed: Path) -> None:
    words = {"DATASET": "imagenet2012", "IMAGE_CHANNELS": 3}
    before = identity(DATA_PATH=str(listed), **words)
    moved = listed.rename(listed.with_name("moved"))
    assert identity(DATA_PATH=str(moved), **words) == before
    assert before["number"] == 12
    lines = (moved / "train_list.txt").read_text().splitlines()
    (moved / "train_list.txt").write_text("\n".join(reversed(lines)))
    assert identity(DATA_PATH=str(moved), **words) != before
